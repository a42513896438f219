"""The bookkeeping's way out and back: dumps by the release's own Postgres programs, here or in a scratch server.

Passwords go by the environment, scripts by standard input: an argument is for every process to read.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final
from urllib.parse import parse_qsl, unquote, urlsplit

from .apps import HARDENED, WORK_TIMEOUT_S, Apps
from .children import run_child
from .stack import COMMAND_TIMEOUT_S, Refused, VmError

START_TIMEOUT_S: Final = 60.0
MEMORY: Final = "192m"
#: Postgres' own user in its image; role and database of the stack's server.
USER: Final = "999:999"
ROLE: Final = "warmstart"
BEFORE: Final = "warmstart_before"
_RESTORED: Final = "warmstart_restored"
#: Quiet, one row a line, and ending at the first error.
_PSQL: Final = ("psql", "--no-psqlrc", "--quiet", "--no-align", "--tuples-only", "--set=ON_ERROR_STOP=1")
_RESTORE: Final = ("pg_restore", "--no-owner", "--no-privileges", "--single-transaction", "--exit-on-error")
#: Counted, not estimated.
_COUNT_ROWS: Final = r"""
SELECT format('SELECT %L, count(*) FROM %I.%I', schemaname || '.' || tablename, schemaname, tablename)
FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema') \gexec
"""
#: The restored one takes the other's name; what a killed restore put there gives way to it.
_SWAP: Final = rf"""
SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{ROLE}';
SELECT 'ALTER DATABASE {ROLE} RENAME TO {BEFORE}' WHERE EXISTS (SELECT FROM pg_database WHERE datname = '{ROLE}')
AND NOT EXISTS (SELECT FROM pg_database WHERE datname = '{BEFORE}') \gexec
DROP DATABASE IF EXISTS {ROLE} WITH (FORCE);
ALTER DATABASE {_RESTORED} RENAME TO {ROLE};
"""  # noqa: S608 - names of this module
#: What a URL's parameters are called in the environment of libpq.
_LIBPQ: Final = {
    "host": "PGHOST", "port": "PGPORT", "user": "PGUSER", "password": "PGPASSWORD", "dbname": "PGDATABASE",
    "sslmode": "PGSSLMODE", "sslnegotiation": "PGSSLNEGOTIATION", "channel_binding": "PGCHANNELBINDING",
    "gssencmode": "PGGSSENCMODE", "options": "PGOPTIONS", "connect_timeout": "PGCONNECT_TIMEOUT",
    "target_session_attrs": "PGTARGETSESSIONATTRS",
}  # fmt: skip

Rows = dict[str, int]


@dataclass(frozen=True)
class Server:
    """A server in a container."""

    container: str

    def run(
        self, *words: str, database: str = ROLE, text: str = "",
        stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None,
    ) -> str:  # fmt: skip
        words = (*words, f"--username={ROLE}", f"--dbname={database}")
        command = ["docker", "exec", "--interactive", self.container, *words]
        return run_child(command, words[0], text=text, stdin=stdin, stdout=stdout, timeout_s=WORK_TIMEOUT_S)

    def sql(self, script: str, database: str = "postgres") -> str:
        return self.run(*_PSQL, database=database, text=script)

    def fill(self, dump: Path, database: str = ROLE) -> Rows:
        """The dump into the empty `database`: all of it, or VmError."""
        with dump.open("rb") as file:
            self.run(*_RESTORE, database=database, stdin=file)
        return _rows(self.sql(_COUNT_ROWS, database))


@dataclass(frozen=True)
class Live:
    """The database that the service uses: of the stack's own server, or wherever DATABASE_URL points to."""

    apps: Apps

    def _own(self) -> Server:
        found = self.apps.stack.container("postgres")
        if found is None or not found.running:
            raise VmError("postgres does not run: `warmstart-vm status` shows what does")
        return Server(found.id)

    def dump(self, target: Path) -> None:
        words = ("pg_dump", "--format=custom", "--no-owner", "--no-privileges")
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            if self.apps.own_postgres:
                self._own().run(*words, stdout=file)
            else:
                self._elsewhere(words, stdout=file)

    def restore(self, dump: Path, *, resumed: bool) -> Rows | None:
        """Rows by table of what is now there. None: a database elsewhere that has its data is left as it is.

        Of the stack's own server the database that was there stays, by another name, until `drop_before`. Where a
        killed restore is `resumed`, that name is taken already, and what is there is what that one put there.
        """
        if not self.apps.own_postgres:
            return self._restore_elsewhere(dump)
        server = self._own()
        if not resumed:
            self.drop_before()
        server.sql(f"DROP DATABASE IF EXISTS {_RESTORED} WITH (FORCE);\nCREATE DATABASE {_RESTORED};")
        rows = server.fill(dump, _RESTORED)
        server.sql(_SWAP)
        # the one that the service gives, whatever this server was made with
        quoted = self.apps.postgres_password.replace("'", "''")
        server.sql(f"ALTER ROLE {ROLE} PASSWORD '{quoted}';")
        return rows

    def drop_before(self) -> None:
        if self.apps.own_postgres:
            self._own().sql(f"DROP DATABASE IF EXISTS {BEFORE} WITH (FORCE);")

    def _restore_elsewhere(self, dump: Path) -> Rows | None:
        if _rows(self._elsewhere(_PSQL, text=_COUNT_ROWS)):
            return None
        with dump.open("rb") as file:
            self._elsewhere((*_RESTORE, "--dbname="), stdin=file)
        return _rows(self._elsewhere(_PSQL, text=_COUNT_ROWS))

    def _elsewhere(
        self, words: Sequence[str], *, text: str = "", stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None
    ) -> str:
        self.apps.remove("database")
        environment = libpq_environment(self.apps.database_url)
        command = [
            "docker", "run", "--rm", "--interactive", "--name", self.apps.name("database"), *HARDENED,
            "--network", self.apps.database_network, "--memory", MEMORY, "--user", USER, "--tmpfs", "/tmp",  # noqa: S108
            *(word for name in environment for word in ("--env", name)),
            "--entrypoint", words[0], self.apps.image("postgres"), *words[1:],
        ]  # fmt: skip
        return run_child(
            command, words[0], environment, text=text, stdin=stdin, stdout=stdout, timeout_s=WORK_TIMEOUT_S
        )


@contextmanager
def scratch(apps: Apps, what: str) -> Iterator[tuple[Server, str, str]]:
    """A server in a network of its own: with that network's name, and its URL in it. All is gone afterwards."""
    name, password = apps.name(what), secrets.token_hex(16)
    settings = {"POSTGRES_USER": ROLE, "POSTGRES_DB": ROLE, "POSTGRES_PASSWORD": password}
    remove_scratch(apps, what)
    try:
        apps.stack.run(["docker", "network", "create", "--internal", name])
        command = [
            "docker", "run", "--detach", "--name", name, "--network", name, *HARDENED,
            "--memory", MEMORY, "--shm-size", "32m", "--user", USER,
            "--tmpfs", "/tmp", "--tmpfs", "/var/run/postgresql:uid=999,gid=999",  # noqa: S108
            *(word for setting in settings for word in ("--env", setting)), apps.image("postgres"),
        ]  # fmt: skip
        run_child(command, "docker run postgres", settings, timeout_s=COMMAND_TIMEOUT_S)
        _wait_for(apps, name)
        yield Server(name), name, f"postgresql://{ROLE}:{password}@{name}:5432/{ROLE}"
    finally:
        remove_scratch(apps, what)


def remove_scratch(apps: Apps, what: str) -> None:
    apps.remove(what)
    with suppress(VmError):
        apps.stack.run(["docker", "network", "rm", apps.name(what)])


def _wait_for(apps: Apps, container: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            # over TCP: while it sets itself up it listens on its socket alone
            apps.stack.run(["docker", "exec", container, "pg_isready", "--quiet", "--host=127.0.0.1"])
        except VmError:
            if time.monotonic() > deadline:
                raise VmError(f"the scratch Postgres was not ready in {START_TIMEOUT_S:.0f} s") from None
            time.sleep(0.2)
        else:
            return


# -- rows


def rows_of_dump(apps: Apps, dump: Path) -> Rows:
    """Rows by table as the dump has them, which reads it from end to end."""
    apps.remove("database")
    command = [
        "docker", "run", "--rm", "--interactive", "--name", apps.name("database"), "--network", "none", *HARDENED,
        "--memory", MEMORY, "--user", USER, "--entrypoint", "pg_restore", apps.image("postgres"),
        "--data-only", "--file=-",
    ]  # fmt: skip
    script = dump.with_suffix(".sql")
    try:
        with dump.open("rb") as source, open(os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            run_child(command, "pg_restore", stdin=source, stdout=out, timeout_s=WORK_TIMEOUT_S)
        with script.open("rb") as lines:
            return rows_of_script(lines)
    finally:
        script.unlink(missing_ok=True)


def rows_of_script(lines: Iterable[bytes]) -> Rows:
    """Of what pg_restore writes: `COPY schema.table (…) FROM stdin;`, a line a row, and one of backslash and dot."""
    rows: Rows = {}
    table = ""
    for line in lines:
        if table and line == b"\\.\n":
            table = ""
        elif table:
            rows[table] += 1
        elif found := re.match(rb"COPY (\S+) .*FROM stdin;$", line.rstrip(b"\n")):
            table = found[1].decode().replace('"', "")
            rows[table] = 0
    return rows


def _rows(said: str) -> Rows:
    return {name: int(count) for name, count in (line.split("|") for line in said.splitlines() if line)}


def differences(found: Rows, expected: Rows) -> str:
    """In words; empty where they are the same."""
    tables = sorted(t for t in {*found, *expected} if found.get(t) != expected.get(t))
    return ", ".join(f"{t} has {found.get(t, 'none')} instead of {expected.get(t, 'none')}" for t in tables)


def libpq_environment(url: str) -> dict[str, str]:
    """The URL's parts as libpq finds them in its environment. Raises Refused."""
    parts = urlsplit(url)
    if parts.scheme not in ("postgres", "postgresql"):
        raise Refused("DATABASE_URL is not of the form postgresql://user:password@host/name")
    hosts = [re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::(\d*))?", host) for host in parts.netloc.rpartition("@")[2].split(",")]
    found = {
        "PGUSER": unquote(parts.username or ""), "PGPASSWORD": unquote(parts.password or ""),
        "PGHOST": ",".join(unquote(host[1]).strip("[]") for host in hosts if host),
        "PGPORT": ",".join(host[2] or "5432" for host in hosts if host), "PGDATABASE": unquote(parts.path.lstrip("/")),
    }  # fmt: skip
    found |= {_LIBPQ[name]: value for name, value in parse_qsl(parts.query) if name in _LIBPQ}
    return {name: value for name, value in found.items() if value}
