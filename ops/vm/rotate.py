"""New secrets in the place of those in use: written, told to Postgres, and brought to every container by a roll-out.

The api changes over between its slots, so no request fails. While the cache and the embedding server are made anew, the
old api serves without them, and says so. What does not pass is undone, password and file included.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from .apps import Apps
from .gate import Signals
from .progress import phase, say
from .rollout import FOLLOWERS, RollOut
from .secrets import BYTES, DATABASE_URL, FILE, OWN_DATABASE, given_names, render, write
from .smoke import run_smoke
from .stack import UP, Refused, Release, Stack, VmError

POSTGRES: Final = "POSTGRES_PASSWORD"
ROLE: Final = "warmstart"


def rotate(stack: Stack, before: Mapping[str, str], names: Sequence[str]) -> None:
    release = stack.current()
    if release is None:
        raise Refused("nothing was rolled out on this machine yet: deploy to it")
    own_database = Apps(stack, release).own_postgres
    after = {**before, **{name: secrets.token_hex(BYTES) for name in names}}
    if own_database and DATABASE_URL not in given_names(stack):
        after[DATABASE_URL] = OWN_DATABASE.format(password=after[POSTGRES])
    tell_postgres = own_database and POSTGRES in names
    say(f"New: {', '.join(names)}")
    try:
        _put(stack, release, after, tell_postgres)
    except VmError as error:
        say(f"Failed: {error}")
        try:
            _put(stack, release, before, tell_postgres)
        except VmError as second:
            raise VmError(f"the old secrets are in their file again, but not everywhere: {second}: deploy") from error
        raise VmError("undone: the old secrets are in use") from error


def _put(stack: Stack, release: Release, values: Mapping[str, str], tell_postgres: bool) -> None:
    """`values` are in use everywhere."""
    if tell_postgres:
        with phase("password of the database") as done:
            # by standard input; a new connection needs it at once, those that are open stay
            words = (
                "psql",
                "--quiet",
                "--no-psqlrc",
                "--set=ON_ERROR_STOP=1",
                f"--username={ROLE}",
                f"--dbname={ROLE}",
            )
            stack.exec("postgres", *words, stdin=f"ALTER USER {ROLE} PASSWORD '{values[POSTGRES]}';\n")
            done.append("changed")
    write(stack.etc / FILE, render(values))
    signals = Signals()
    signals.install()
    run = RollOut(stack, release, signals, lambda stack, release, base: run_smoke(stack, release, base=base))
    run.services()
    with phase(FOLLOWERS[0]) as done:
        # the new api is tried with it before it gets the traffic
        stack.run(stack.compose(release, *UP, FOLLOWERS[0]))
        done.append("has its new secrets")
    run.rollout()
