"""health, doctor: is it well, and what to do where it is not."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import click

from warmstart import __version__
from warmstart.cli import hosts, output
from warmstart.cli.connection import find, run
from warmstart.client import MemoryClient
from warmstart.config import load
from warmstart.errors import WarmstartError
from warmstart.home import Home
from warmstart.memory import Health, NewMemory, SearchRequest

MIN_FREE_BYTES: Final = 500_000_000
MCP_TIMEOUT_S: Final = 30.0
HOOK_LIMIT_S: Final = 0.6
TOOLS: Final = 8
#: What to do about a part that is down.
ADVICE: Final = {
    "lancedb": "the server's log has the reason; a full or read-only disk is the usual one",
    "embedding": "searches go by words meanwhile, and saves are queued: look whether the provider of OPENAI_BASE_URL "
    "runs; on this machine's own memory, start it anew",
    "postgres": "memories are served all the same: look whether the database of DATABASE_URL takes connections",
    "redis": "nothing is lost: look whether the endpoint of UPSTASH_REDIS_REST_URL runs, and its token is right",
}


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
    """Check everything, and say what to do.

    Settings, home, disk, server, key, versions, each part, MCP over HTTP and stdio, a memory saved, found and deleted
    for good, the agents that are set up and the time of their hook. Starts a server where none runs. Exit code 1
    where something is wrong.
    """
    checks: list[dict[str, Any]] = []
    remote = bool(os.environ.get("WARMSTART_URL"))
    for name, check in (
        ("settings", _settings),
        *(() if remote else (("home", _home), ("disk", _disk))),
        ("server", lambda: find().url),
        ("key", _key),
        ("version", _version),
        ("parts", _parts),
        ("mcp over http", _mcp_http),
        ("mcp over stdio", _mcp_stdio),
        ("round trip", lambda: run(_round_trip)),
        ("agents", _agents),
        ("hook", _hook),
    ):
        checks.append(_run_check(name, check))
        if not as_json:
            _show(checks[-1])
        if name in ("server", "key") and not checks[-1]["ok"]:
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
    there = _existing(home.path)
    if not os.access(there, os.W_OK | os.X_OK):
        raise WarmstartError(f"{there} can't be written: change its rights, or set WARMSTART_HOME to another place")
    holder = home.holder()
    return f"{home.path}, {f'in use ({holder})' if holder else 'nothing runs on it'}"


def _disk() -> str:
    there = _existing(Home.from_environ().path)
    free = shutil.disk_usage(there).free
    if free < MIN_FREE_BYTES:
        raise WarmstartError(f"{free / 1e6:.0f} MB are free at {there}: make room before saves are refused")
    return f"{free / 1e9:.1f} GB free"


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


async def _health(memory: MemoryClient) -> Health:
    return await memory.health()


def _key() -> str:
    return f"accepted; searches are {run(_health).mode}"


def _version() -> str:
    found = run(_health)
    if found.version != __version__:
        raise WarmstartError(
            f"the server is {found.version}, this command is {__version__}: bring both to one version; "
            "a server of this machine is the new one once it was started anew"
        )
    return __version__


def _parts() -> str:
    found = run(_health)
    down = [d for d in found.dependencies if d.status == "down"]
    faults = [f"{d.name} is down ({d.detail}): {ADVICE.get(d.name, 'its log has the reason')}" for d in down]
    off = [d for d in found.dependencies if d.status == "off" and d.name in found.degraded]
    faults += [f"{d.name}: {d.detail}" for d in off]
    if "space" in found.degraded or "migrating" in found.degraded:
        faults += [f"{d.name}: {d.detail}" for d in found.dependencies if d.detail and d not in down + off]
    if found.failed:
        faults.append(
            f"{found.failed} memories could not be embedded: `warmstart list` shows them, edit or delete them"
        )
    if faults:
        raise WarmstartError("; ".join(faults))
    return f"{', '.join(d.name for d in found.dependencies)} well; {found.queued} memories wait for their vector"


def _mcp_http() -> str:
    target = find()

    async def listed() -> int:
        import httpx2
        from mcp import ClientSession
        from mcp.client.streamable_http import streamable_http_client

        headers = {"Authorization": f"Bearer {target.api_key}"}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=MCP_TIMEOUT_S) as http,
            streamable_http_client(f"{target.url.rstrip('/')}/mcp", http_client=http) as (read, write),
            ClientSession(read, write, read_timeout_seconds=MCP_TIMEOUT_S) as session,
        ):
            await session.initialize()
            return len((await session.list_tools()).tools)

    return _tools(listed(), "a proxy before the server must let /mcp through, unbuffered")


def _mcp_stdio() -> str:
    program, *arguments = hosts.command()

    async def listed() -> int:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client

        parameters = StdioServerParameters(command=program, args=[*arguments, "mcp"], env=dict(os.environ))
        async with (
            stdio_client(parameters, errlog=nowhere) as (read, write),
            ClientSession(read, write, read_timeout_seconds=MCP_TIMEOUT_S) as session,
        ):
            await session.initialize()
            return len((await session.list_tools()).tools)

    with Path(os.devnull).open("w") as nowhere:
        return _tools(listed(), f"run `{' '.join([program, *arguments, 'mcp'])}` and look at ~/.warmstart/logs")


def _tools(listed: Coroutine[Any, Any, int], advice: str) -> str:
    async def in_time() -> int:
        async with asyncio.timeout(MCP_TIMEOUT_S):
            return await listed

    try:
        count = asyncio.run(in_time())
    except Exception as error:
        fault: BaseException = error
        while isinstance(fault, BaseExceptionGroup):
            fault = fault.exceptions[0]
        said = " ".join(str(fault).split())[:200] or type(fault).__name__
        raise WarmstartError(f"{said}: {advice}") from None
    if count != TOOLS:
        raise WarmstartError(f"{count} tools instead of {TOOLS}: client and server must be of one version")
    return f"{count} tools"


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


def _agents() -> str:
    """Who is set up; wrong only where what was set up can't work."""
    told, faults = [], []
    for host, change in hosts.hosts(os.environ, Path.home()).items():
        try:
            text = hosts.read(change.path)
            there = change.remove(text, change.path) != text
        except WarmstartError as error:
            faults.append(str(error))
            continue
        if there:
            told.append(host)
            if change.install(text, change.path) != text:
                faults.append(
                    f"{change.path} starts another warmstart than this one: `warmstart install {host}` shows how"
                )
    hooks = hosts.claude_hooks(os.environ, Path.home())
    try:
        text = hosts.read(hooks.path)
        if hosts.has_hooks(text):
            told.append("hooks of claude-code")
            if hooks.install(text, hooks.path) != text:
                faults.append(f"{hooks.path} runs another warmstart: `warmstart install claude-code --hooks` mends it")
    except WarmstartError as error:
        faults.append(str(error))
    if faults:
        raise WarmstartError("; ".join(faults))
    return f"set up: {', '.join(told)}" if told else "none set up by this command: `warmstart install --help`"


def _hook() -> str:
    """Its time as a host has it, with a prompt that asks nothing of the memory."""
    event = {"hook_event_name": "UserPromptSubmit", "session_id": "doctor", "prompt": "warmstart doctor"}
    began = time.monotonic()
    done = subprocess.run(
        [*hosts.command(), "hook", "prompt"],
        input=json.dumps(event).encode(),
        capture_output=True,
        timeout=30,
        check=False,
    )
    took = time.monotonic() - began
    if done.returncode:
        raise WarmstartError(f"ended with {done.returncode}: {done.stderr.decode(errors='replace')[-200:].strip()}")
    late = "; over its limit, so prompts go without it: the machine is busy" if took > HOOK_LIMIT_S else ""
    return f"{took * 1000:.0f} ms{late}"
