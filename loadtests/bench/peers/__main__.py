"""What a user would pick instead, on the same machine, data and model, each through its own MCP server over stdio.

    python -m loadtests.bench.peers [--memories 500] [--searches 60] [--write]
    python -m loadtests.bench.peers --without-model --before 10000 --write

Each is installed into an environment of its own, as its package comes, and started
as its documentation says, with the model's endpoint, the same for all; what else is
set stands beside it. Searches are first-time ones: no query is asked twice.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import click
import httpx
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

from loadtests.bench.__main__ import Times, into_readme, machine, server
from loadtests.data import Generator
from warmstart.config import DEFAULT_MODEL

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parents[2]
MARK: Final = "<!-- peers -->"
MARK_WITHOUT_MODEL: Final = "<!-- peers-without-model -->"
#: Saves at once while a memory is filled; the one at a time that are measured come behind them.
FILLING: Final = 4
START_S: Final = 120.0
#: One whose sqlite3 loads extensions, which not every build does.
PYTHON: Final = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable


@dataclass(frozen=True)
class Peer:
    name: str
    command: list[str]
    environ: dict[str, str]
    save: Callable[[str], tuple[str, dict[str, Any]]]
    search: Callable[[str], tuple[str, dict[str, Any]]]
    #: What its MCP server needs beside it.
    beside: Callable[[], AbstractAsyncContextManager[Any]] = nullcontext


@dataclass
class Found:
    start_s: float = 0.0
    saves: list[float] = field(default_factory=list)
    searches: list[float] = field(default_factory=list)
    #: Characters that a search hands to the agent.
    characters: list[float] = field(default_factory=list)


@asynccontextmanager
async def model(*arguments: str) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "app")))}
    process = subprocess.Popen(
        [sys.executable, "-m", "loadtests.bench.peers.model", str(port), *arguments], env=environ
    )
    try:
        async with httpx.AsyncClient() as http:
            deadline = time.monotonic() + START_S
            while time.monotonic() < deadline:
                try:
                    await http.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(10)


def installed(package: str, folder: Path) -> tuple[Path, str]:
    """(bin, version) of `package` in an environment of its own."""
    subprocess.run([PYTHON, "-m", "venv", folder], check=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", package], check=True, stderr=subprocess.DEVNULL)
    script = f"from importlib.metadata import version; print(version({package!r}))"
    told = subprocess.run([folder / "bin" / "python", "-c", script], check=True, capture_output=True, text=True)
    return folder / "bin", told.stdout.strip()


def peers(folder: Path, url: str) -> list[Peer]:
    service, service_version = installed("mcp-memory-service", folder / "mcp-memory-service")
    qdrant, qdrant_version = installed("mcp-server-qdrant", folder / "mcp-server-qdrant")
    (home := folder / "warmstart").mkdir(mode=0o711)
    return [
        Peer(
            f"Warmstart {version('warmstart')}",
            [sys.executable, "-m", "warmstart.cli", "mcp"],
            {"WARMSTART_HOME": str(home), "WARMSTART_ALLOW_ROOT": "True", "PYTHONPATH": str(ROOT / "app")},
            lambda text: ("memory_save", {"content": text}),
            lambda query: ("memory_search", {"query": query}),
            # one that a client starts takes no provider from the client's environment; the others limit no rate
            lambda: server(home, settings={"OPENAI_BASE_URL": url, "RATE_LIMIT_PER_MINUTE": "1000000"}),
        ),
        Peer(
            f"mcp-memory-service {service_version}",
            [str(service / "memory"), "server"],
            {
                "MCP_MEMORY_STORAGE_BACKEND": "sqlite_vec", "MCP_MEMORY_BASE_DIR": str(folder / "memory-service"),
                "MCP_EXTERNAL_EMBEDDING_URL": f"{url}/embeddings", "MCP_EXTERNAL_EMBEDDING_MODEL": DEFAULT_MODEL,
                # this model's similarities are all above its threshold: it would refuse the second memory
                "MCP_SEMANTIC_DEDUP_ENABLED": "false",
            },
            lambda text: ("memory_store", {"content": text}),
            lambda query: ("memory_search", {"query": query, "limit": 10}),
        ),
        Peer(
            f"mcp-server-qdrant {qdrant_version}, its local mode",
            [str(qdrant / "python"), str(HERE / "qdrant_launcher.py")],
            {
                "QDRANT_LOCAL_PATH": str(folder / "qdrant"), "COLLECTION_NAME": "memories", "MODEL": DEFAULT_MODEL,
                "MODEL_URL": f"{url}/embeddings",
            },
            lambda text: ("qdrant-store", {"information": text}),
            lambda query: ("qdrant-find", {"query": query}),
        ),
    ]  # fmt: skip


async def measured(peer: Peer, before: list[str], memories: list[str], queries: list[str], log: Path) -> Found:
    found = Found()
    environ = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")} | peer.environ
    parameters = StdioServerParameters(command=peer.command[0], args=peer.command[1:], env=environ)
    with log.open("w") as errors:
        began = time.perf_counter()
        async with (
            peer.beside(),
            stdio_client(parameters, errlog=errors) as (read, write),
            ClientSession(read, write) as client,
        ):
            await client.initialize()
            await client.list_tools()
            found.start_s = time.perf_counter() - began

            async def call(tool: tuple[str, dict[str, Any]], times: list[float]) -> str:
                began = time.perf_counter()
                result = await client.call_tool(*tool)
                times.append((time.perf_counter() - began) * 1000)
                text = "".join(getattr(part, "text", "") for part in result.content)
                if getattr(result, "is_error", getattr(result, "isError", False)):
                    raise RuntimeError(f"{peer.name}: {text[:500]}")
                return text

            waiting = iter(before)

            async def fill() -> None:
                for memory in waiting:
                    await call(peer.save(memory), [])

            await asyncio.gather(*(fill() for _ in range(FILLING)))
            for memory in memories:
                await call(peer.save(memory), found.saves)
            await call(peer.search("warm up"), [])
            for query in queries:
                found.characters.append(len(await call(peer.search(query), found.searches)))
    return found


async def report(before: int, memories: int, searches: int, *, without_model: bool) -> str:
    generator = Generator("peers", "bench")
    items = generator.items(before + memories)
    texts = [f"{(m := item.memory).get('title', '')}\n{m['content']}".strip() for item in items]
    queries = list(dict.fromkeys(generator.query() for _ in range(searches * 4)))[:searches]
    lines = [
        f"{machine()}; {before + memories:,} memories, {len(queries)} searches",
        "",
        "| | first search p50 / p95 ms | times Warmstart's | save p50 / p95 ms | times | start | characters a search |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chmod(folder, 0o711)
        async with model(*["--none"] * without_model) as url:
            ours: Found | None = None
            for peer in peers(folder, url):
                click.echo(f"{peer.name}: {len(texts):,} memories, {len(queries)} searches …", err=True)
                found = await measured(peer, texts[:before], texts[before:], queries, folder / "log")
                ours = ours or found
                search, save = Times(found.searches), Times(found.saves)
                more = [
                    " / ".join(f"{mine.quantile(q) / theirs.quantile(q):.1f}" for q in (0.5, 0.95))
                    for mine, theirs in ((search, Times(ours.searches)), (save, Times(ours.saves)))
                ]
                lines.append(
                    f"| {peer.name} | {search.quantile(0.5):.0f} / {search.quantile(0.95):.0f} | {more[0]} "
                    f"| {save.quantile(0.5):.0f} / {save.quantile(0.95):.0f} | {more[1]} | {found.start_s:.1f} s "
                    f"| {Times(found.characters).quantile(0.5):,.0f} |"
                )
                click.echo(lines[-1], err=True)
    return "\n".join(lines)


@click.command()
@click.option("--before", default=0, show_default=True, help="Memories that are there before any is timed.")
@click.option("--memories", default=500, show_default=True, help="Memories whose saves are timed.")
@click.option("--searches", default=60, show_default=True)
@click.option("--without-model", is_flag=True, help="Vectors by chance, in no time: what is left is each one's own.")
@click.option("--write", is_flag=True, help="Put the figures into the README of loadtests/bench.")
def main(before: int, memories: int, searches: int, without_model: bool, write: bool) -> None:
    """Measure other memories beside this one."""
    figures = asyncio.run(report(before, memories, searches, without_model=without_model))
    click.echo(figures)
    if write:
        into_readme(MARK_WITHOUT_MODEL if without_model else MARK, figures)


if __name__ == "__main__":
    main()
