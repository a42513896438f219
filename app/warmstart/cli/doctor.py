"""health, doctor: is it well, and what to do where it is not."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from warmstart.cli import output
from warmstart.cli.connection import find, run
from warmstart.client import MemoryClient
from warmstart.config import load
from warmstart.errors import WarmstartError
from warmstart.home import Home
from warmstart.memory import NewMemory, SearchRequest


@click.command()
@output.json_option
def health(as_json: bool) -> None:
    """Show the state of the memory and its parts.

    Exit code 1 where it is degraded.
    """
    found = run(lambda memory: memory.health())
    if as_json:
        output.print_json(found)
    else:
        click.echo(f"{found.status}: searches are {found.mode}, {found.queued} queued, {found.failed} failed")
        output.table(("part", "state", "detail"), [(d.name, d.status, d.detail) for d in found.dependencies])
    if found.status != "ok":
        raise SystemExit(output.EXIT_ERROR)


@click.command()
@output.json_option
def doctor(as_json: bool) -> None:
    """Check each part, and say what to do.

    Settings, home, server, key, and a memory's way there and back; starts a server where none runs.
    """
    checks: list[dict[str, Any]] = []
    remote = bool(os.environ.get("WARMSTART_URL"))
    for name, check in (
        ("settings", _settings),
        *(() if remote else (("home", _home),)),
        ("server", lambda: find().url),
        ("key", _key),
        ("round trip", lambda: run(_round_trip)),
    ):
        checks.append(_run_check(name, check))
        if not as_json:
            _show(checks[-1])
        if name == "server" and not checks[-1]["ok"]:
            break  # what follows would say the same again
    ok = all(check["ok"] for check in checks)
    if as_json:
        output.print_json({"ok": ok, "checks": checks})
    if not ok:
        raise SystemExit(output.EXIT_ERROR)


def _run_check(name: str, check: Callable[[], str]) -> dict[str, Any]:
    try:
        return {"name": name, "ok": True, "detail": check()}
    except WarmstartError as error:
        return {"name": name, "ok": False, "detail": str(error)}
    except OSError as error:
        return {"name": name, "ok": False, "detail": f"{error}: check the rights on it"}


def _show(check: dict[str, Any]) -> None:
    word = click.style("ok", fg="green") if check["ok"] else click.style("failed", fg="red")
    click.echo(f"{check['name']}: {word}: {output.safe(check['detail'])}")


def _settings() -> str:
    settings = load()
    return f"{settings.embed_model}, {settings.embedding_dim} wide"


def _home() -> str:
    home = Home.from_environ()
    home.check_version()
    there: Path = home.path
    while not there.exists():
        there = there.parent
    if not os.access(there, os.W_OK | os.X_OK):
        raise WarmstartError(f"{there} can't be written: change its rights, or set WARMSTART_HOME to another place")
    holder = home.holder()
    return f"{home.path}, {f'in use ({holder})' if holder else 'nothing runs on it'}"


def _key() -> str:
    found = run(lambda memory: memory.health())
    return f"accepted; searches are {found.mode}{', degraded: ' + ', '.join(found.degraded) if found.degraded else ''}"


async def _round_trip(memory: MemoryClient) -> str:
    """In a namespace of its own, and gone at the end."""
    word = f"doctor{secrets.token_hex(8)}"
    saved = await memory.save(NewMemory(content=f"A check of the memory: {word}.", namespace=word, source="doctor"))
    try:
        found = await memory.search(SearchRequest(query=word, namespace=word))
        if [hit.id for hit in found.hits] != [saved.id]:
            raise WarmstartError("a memory was saved, but a search did not find it: `warmstart health` may say why")
    finally:
        await memory.delete(saved.id, hard=True)
    return f"saved, found ({found.mode}, {found.took_ms:.0f} ms), deleted"
