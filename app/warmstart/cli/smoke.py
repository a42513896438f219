"""smoke: is a server whole, as its clients see it? One memory's way there and back, over REST and MCP."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, Self

import click
import httpx

from warmstart.cli import output
from warmstart.client import MemoryClient
from warmstart.errors import ConfigError, NotFound, ServerUnreachable, WarmstartError
from warmstart.memory import ListRequest, Memory, NewMemory, SearchRequest

NAMESPACE: Final = "smoke"
SOURCE: Final = "warmstart-smoke"
TIMEOUT_S: Final = 60.0
#: For one request at least, and for the deletion at the end, which has its time in any case.
REQUEST_S: Final = 10.0
DELETE_S: Final = 15.0
#: A server that has just started may be asked again for this long; its queue, while there is time.
SETTLE_S: Final = 20.0
PAUSE_S: Final = 0.5
#: Most memories that a start looks through for what killed runs left.
MAX_SWEPT: Final = 200


@click.command()
@click.option("--url", required=True, help="Of the server, such as https://memory.example.org.")
@click.option(
    "--ca-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The one authority to trust, for a certificate of a server's own.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1, 3600),
    default=TIMEOUT_S,
    show_default=True,
    help="Seconds for all of it but the deletion.",
)
@click.option(
    "--mode",
    type=click.Choice(["hybrid", "keyword"]),
    default="hybrid",
    show_default=True,
    help="How searches must be; keyword where EMBEDDING_ENABLED is False.",
)
@output.json_option
def smoke(url: str, ca_file: Path | None, timeout: float, mode: str, as_json: bool) -> None:
    """Try a server from outside: save, search, MCP, queue.

    With the key of WARMSTART_API_KEY. One memory in the namespace `smoke` is saved, found and
    deleted for good. Exit code 1 where a step failed.
    """
    key = os.environ.get("WARMSTART_API_KEY", "").strip()
    if not key:
        raise ConfigError(["WARMSTART_API_KEY is not set: it must be a key of the server, best of a tenant for this"])
    try:
        server = _Server(url, key, _trust(ca_file), max(REQUEST_S, timeout * REQUEST_S / TIMEOUT_S))
    except ServerUnreachable:
        raise ConfigError([f"--url {url[:200]} must be like https://memory.example.org"]) from None
    try:
        results = asyncio.run(_run(server, timeout, mode, _silent if as_json else _show))
    except asyncio.CancelledError:
        raise SystemExit(128 + signal.SIGTERM) from None
    failed = next((result for result in results if not result.ok), None)
    if as_json:
        steps = [result.to_dict() for result in results]
        name = failed.name if failed else None
        output.print_json({"ok": failed is None, "url": url, "mode": mode, "failed": name, "steps": steps})
    if failed:
        said = f"{failed.name} failed at {url}: expected {failed.expected}; got {failed.detail}"
        click.echo(f"Error: {output.safe(said)}", err=True)
        raise SystemExit(output.EXIT_ERROR)


class Unexpected(Exception):
    """A step was answered, but not as it must be; the text says what came."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    expected: str
    #: Answers what is shown of it.
    run: Callable[[], Awaitable[str]]
    #: How long it is tried again.
    settle_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    ok: bool
    ms: int
    detail: str
    expected: str

    def to_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {"name": self.name, "ok": self.ok, "ms": self.ms, "detail": self.detail}
        return told if self.ok else told | {"expected": self.expected, "got": self.detail}


async def _run(server: _Server, timeout_s: float, mode: str, show: Callable[[Result], None]) -> list[Result]:
    """The steps up to the first that fails, and the deletion in any case."""
    import mcp.client.streamable_http  # noqa: F401 # takes a second, which is not the server's

    this = asyncio.current_task()
    assert this is not None  # noqa: S101
    # a container that is stopped deletes too
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    results: list[Result] = []

    async def take(step: Step, deadline: float) -> bool:
        results.append(await _take(step, deadline))
        show(results[-1])
        return results[-1].ok

    async with server:
        visit = _Visit(server, mode, timeout_s)
        deadline = time.monotonic() + timeout_s
        try:
            for step in visit.steps():
                if not await take(step, deadline):
                    break
        finally:
            if visit.saving:
                await take(visit.deletion(), time.monotonic() + DELETE_S)
    return results


async def _take(step: Step, deadline: float) -> Result:
    began = time.monotonic()
    until = min(deadline, began + step.settle_s)
    fault = ""
    while True:
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                detail = await step.run()
            return Result(step.name, True, _ms(began), detail, step.expected)
        except TimeoutError:
            fault = fault or "no answer in the time there was"
        except Exception as error:
            # whatever came, clients met it too; what they can't be is that it goes unsaid
            fault = _said(error)
        if time.monotonic() + PAUSE_S >= until:
            return Result(step.name, False, _ms(began), fault, step.expected)
        await asyncio.sleep(PAUSE_S)


class _Server:
    """The ways to it, all with one idea of whom to trust, and past any proxy of the environment."""

    def __init__(self, url: str, key: str, trust: ssl.SSLContext, request_s: float) -> None:
        self.memory = MemoryClient(url, key, transport=httpx.AsyncHTTPTransport(verify=trust), timeout_s=request_s)
        self._request_s = request_s
        self.url = self.memory.url
        self._trust = trust
        self._headers = {"Authorization": f"Bearer {key}"}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._open.enter_async_context(self.memory)
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._open.aclose()

    async def ready(self) -> tuple[int, str]:
        """Status and body of /readyz, which needs no key."""
        async with httpx.AsyncClient(verify=self._trust, trust_env=False, timeout=self._request_s) as http:
            answer = await http.get(self.url + "/readyz")
        return answer.status_code, answer.text

    @asynccontextmanager
    async def mcp(self) -> AsyncIterator[Any]:
        """A session as other clients have it."""
        import httpx2
        from mcp import ClientSession
        from mcp.client.streamable_http import streamable_http_client

        async with (
            httpx2.AsyncClient(
                verify=self._trust, headers=self._headers, timeout=self._request_s, trust_env=False
            ) as http,
            streamable_http_client(f"{self.url}/mcp", http_client=http) as (read, write),
            ClientSession(read, write, read_timeout_seconds=self._request_s) as session,
        ):
            yield session


class _Visit:
    """One memory's way there and back."""

    def __init__(self, server: _Server, mode: str, timeout_s: float) -> None:
        self._server, self._memory, self._mode = server, server.memory, mode
        self._word = f"smoke{secrets.token_hex(8)}"
        self._query = f"{self._word}: when does the lighthouse keeper read the tide tables?"
        #: When this run is over in any case, so that no other takes its memory away before.
        self._until = datetime.now(UTC) + timedelta(seconds=timeout_s + DELETE_S)
        self._id = ""
        #: From here on there may be something to delete.
        self.saving = False

    def steps(self) -> Sequence[Step]:
        answer = f"the memory among the hits, mode {self._mode}, nothing degraded"
        return (
            Step("ready", "/readyz with 200 and status ok", self._ready, SETTLE_S),
            Step("sweep", "what earlier runs left to be deleted", self._sweep),
            Step("save", "the memory to be saved", self._save),
            Step("search", answer, self._search, SETTLE_S),
            Step("mcp", f"over MCP: {answer}", self._mcp, SETTLE_S),
            Step("queue", "status ok, nothing queued", self._queue, float("inf")),
        )

    def deletion(self) -> Step:
        return Step("delete", "the memory to be gone for good", self._delete, DELETE_S)

    async def _ready(self) -> str:
        status, body = await self._server.ready()
        if status != 200 or '"status":"ok"' not in body.replace(" ", ""):
            raise Unexpected(f"{status} {output.excerpt(body)}")
        return "ok"

    async def _sweep(self) -> str:
        over = [memory for memory in await self._ours() if _until(memory) < datetime.now(UTC)]
        for memory in over:
            await self._delete_one(memory.id)
        return f"{len(over)} left by earlier runs"

    async def _save(self) -> str:
        self.saving = True
        saved = await self._memory.save(
            NewMemory(
                content=f"{self._word}: the lighthouse keeper reads the tide tables every morning at six.",
                namespace=NAMESPACE,
                source=SOURCE,
                metadata={"until": self._until.isoformat()},
            )
        )
        self._id = saved.id
        return f"{saved.id}, vector {saved.embedding_status}"

    async def _search(self) -> str:
        found = await self._memory.search(SearchRequest(query=self._query, namespace=NAMESPACE))
        self._judge([hit.id for hit in found.hits], found.mode, found.degraded)
        ranks = next(hit.ranks for hit in found.hits if hit.id == self._id)
        if self._mode == "hybrid" and (ranks.text is None or ranks.vector is None):
            raise Unexpected(f"the memory, but not by both arms (text rank {ranks.text}, vector rank {ranks.vector})")
        return f"found, {found.mode}, text rank {ranks.text}, vector rank {ranks.vector or '-'}"

    async def _mcp(self) -> str:
        async with self._server.mcp() as session:
            server = (await session.initialize()).server_info
            result = await session.call_tool("memory_search", {"query": self._query, "namespace": NAMESPACE})
        found = result.structured_content
        if result.is_error or not isinstance(found, dict):
            raise Unexpected(output.excerpt(" ".join(getattr(part, "text", "") for part in result.content)))
        self._judge([hit["id"] for hit in found["hits"]], found["mode"], found["degraded"])
        return f"found, {found['mode']}, {server.name} {server.version}"

    def _judge(self, ids: Sequence[str], mode: str, degraded: Sequence[str]) -> None:
        if self._id not in ids or mode != self._mode or degraded:
            place = "among" if self._id in ids else "not among"
            what = f"degraded: {', '.join(degraded)}" if degraded else "nothing degraded"
            raise Unexpected(f"the memory {place} {len(ids)} hits, mode {mode}, {what}")

    async def _queue(self) -> str:
        health = await self._memory.health()
        waiting = health.queued if self._mode == "hybrid" else 0  # without embedding, every memory waits for ever
        if health.status != "ok" or waiting:
            what = ", ".join(health.degraded) or "nothing"
            raise Unexpected(f"status {health.status} (degraded: {what}), {health.queued} queued")
        if self._mode == "keyword":
            return "embedding is off: not waited for"
        status = (await self._memory.get(self._id)).embedding_status
        if status != "ready":
            raise Unexpected(f"an empty queue, but the memory's vector is {status}")
        return "empty"

    async def _delete(self) -> str:
        # a save that broke off may have been made
        ids = [self._id] if self._id else [m.id for m in await self._ours() if self._word in m.content]
        for memory_id in ids:
            await self._delete_one(memory_id)
            try:
                left = await self._memory.get(memory_id)
            except NotFound:
                continue
            raise Unexpected(f"it is there still (deleted at {left.deleted_at})")
        return "gone for good" if ids else "nothing was saved"

    async def _delete_one(self, memory_id: str) -> None:
        try:
            await self._memory.delete(memory_id, hard=True)
        except NotFound:
            return  # by another run, or by a try before whose answer was lost

    async def _ours(self) -> list[Memory]:
        """Memories of smokes: nobody else's in a namespace of that name."""
        page = await self._memory.list(ListRequest(namespace=NAMESPACE, include_deleted=True, limit=MAX_SWEPT))
        return [memory for memory in page.memories if memory.source == SOURCE and "until" in memory.metadata]


def _until(memory: Memory) -> datetime:
    try:
        return datetime.fromisoformat(str(memory.metadata["until"])).astimezone(UTC)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)


def _trust(ca_file: Path | None) -> ssl.SSLContext:
    if ca_file is None:
        return httpx.create_ssl_context()
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError([f"--ca-file {ca_file} must be a PEM file of certificates: {error}"]) from None


def _said(error: BaseException) -> str:
    """One line; of a group, its first fault."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split())
    return output.excerpt(text if isinstance(error, Unexpected | WarmstartError) else f"{type(error).__name__}: {text}")


def _show(result: Result) -> None:
    word = click.style("ok    ", fg="green") if result.ok else click.style("failed", fg="red")
    detail = result.detail if result.ok else f"expected {result.expected}; got {result.detail}"
    click.echo(f"{word}  {result.name:<6}  {result.ms:>6} ms  {output.safe(detail)}")


def _silent(result: Result) -> None:
    pass


def _ms(began: float) -> int:
    return round((time.monotonic() - began) * 1000)
