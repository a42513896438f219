"""`warmstart smoke` as a process, against the service behind a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import uvicorn
from starlette.types import Receive, Scope, Send

from integration.service import App, Tenant, down, fresh_database, running, settings_for, until
from warmstart.cli.smoke import NAMESPACE, SOURCE
from warmstart.errors import EmbeddingError

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = ["ready", "sweep", "save", "search", "mcp", "queue", "delete"]


@dataclass
class Run:
    code: int
    out: str
    err: str

    @property
    def told(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return told

    @property
    def steps(self) -> dict[str, bool]:
        return {step["name"]: step["ok"] for step in self.told["steps"]}


async def start(url: str, key: str, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "warmstart.cli", "smoke", "--url", url, *arguments,
        env={"PATH": os.environ["PATH"], "HOME": "/nonexistent", "WARMSTART_API_KEY": key},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def ended(process: asyncio.subprocess.Process) -> Run:
    try:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode is not None
    return Run(process.returncode, out.decode(), err.decode())


async def smoke(url: str, key: str, *arguments: str) -> Run:
    return await ended(await start(url, key, *arguments))


@asynccontextmanager
async def listening(app: App, broken: str = "") -> AsyncIterator[str]:
    """Its URL; what is asked of the path `broken` fails."""

    async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
        if broken and scope["path"] == broken:
            await send({"type": "http.response.start", "status": 500, "headers": []})
            await send({"type": "http.response.body", "body": b"broken"})
        else:
            await app.asgi(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(asgi, port=0, lifespan="off", log_config=None, ws="none"))
    serving = asyncio.create_task(server._serve())

    async def started() -> bool:
        return server.started

    await until(started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(app: App) -> AsyncIterator[str]:
    async with listening(app) as address:
        yield address


async def left(tenant: Tenant) -> list[str]:
    return await tenant.page(include_deleted="true")


async def test_a_whole_server_passes_and_keeps_nothing(url: str, alice: Tenant) -> None:
    people = await smoke(url, alice.key)
    assert people.code == 0, people
    assert [line.split()[:2] for line in people.out.splitlines()] == [["ok", name] for name in STEPS]
    programs = await smoke(url + "/", alice.key, "--json")
    assert programs.code == 0, programs
    assert programs.steps == dict.fromkeys(STEPS, True)
    assert programs.told["ok"]
    assert programs.told["failed"] is None
    assert len(programs.out.splitlines()) == 1
    assert await left(alice) == []


async def test_without_the_embedder_the_search_is_what_fails(app: App, url: str, alice: Tenant) -> None:
    assert app.provider
    with down(app.provider):
        found = await smoke(url, alice.key, "--json", "--timeout", "4")
    assert found.code == 1
    assert found.told["failed"] == "search"
    assert found.steps == {"ready": True, "sweep": True, "save": True, "search": False, "delete": True}
    step = found.told["steps"][3]
    assert step["expected"] == "the memory among the hits, mode hybrid, nothing degraded"
    assert step["got"] == "the memory among 1 hits, mode keyword, degraded: embedding"
    assert found.err.startswith(f"Error: search failed at {url}: expected the memory")
    assert await left(alice) == []


async def test_a_queue_that_does_not_empty_fails_at_the_end_of_the_time(app: App, url: str, alice: Tenant) -> None:
    assert app.provider
    with down(app.provider):
        await alice.save("nobody embeds this one")
    await until(lambda: healthy(app))
    found = await smoke(url, alice.key, "--timeout", "7")
    assert found.code == 1
    line = next(line for line in found.out.splitlines() if "queue" in line)
    assert line.startswith("failed  queue")
    assert line.endswith("expected status ok, nothing queued; got status ok (degraded: nothing), 1 queued")
    assert len(await left(alice)) == 1


async def test_stopped_half_way_it_deletes_all_the_same(app: App, url: str, alice: Tenant) -> None:
    assert app.provider
    with down(app.provider):
        await alice.save("nobody embeds this one either")
    await until(lambda: healthy(app))
    process = await start(url, alice.key)
    await until(lambda: saved(alice))
    process.send_signal(signal.SIGTERM)
    found = await ended(process)
    assert found.code == 128 + signal.SIGTERM
    assert "Traceback" not in found.err
    assert len(await left(alice)) == 1


async def test_mcp_that_does_not_work_is_named(app: App, alice: Tenant) -> None:
    async with listening(app, broken="/mcp") as address:
        found = await smoke(address, alice.key, "--json", "--timeout", "4")
    assert found.code == 1
    assert found.told["failed"] == "mcp"
    assert found.steps["delete"]
    assert await left(alice) == []


async def test_what_killed_runs_left_is_swept_and_nothing_else(url: str, alice: Tenant) -> None:
    def ours(offset_s: int) -> dict[str, Any]:
        until_then = (datetime.now(UTC) + timedelta(seconds=offset_s)).isoformat()
        return {"namespace": NAMESPACE, "source": SOURCE, "metadata": {"until": until_then}}

    killed = await alice.save("left by a run that was killed", **ours(-5))
    trashed = await alice.save("left in the trash", **ours(-5))
    await alice.delete(f"/v1/memories/{trashed['id']}")
    at_work = await alice.save("of a run that goes on elsewhere", **ours(60))
    notes = await alice.save("about the smoke over the harbour", namespace=NAMESPACE)
    found = await smoke(url, alice.key, "--json")
    assert found.code == 0, found
    assert found.told["steps"][1]["detail"] == "2 left by earlier runs"
    assert killed["id"] not in await left(alice)
    assert set(await left(alice)) == {at_work["id"], notes["id"]}


async def test_a_wrong_key_fails_and_is_shown_nowhere(url: str) -> None:
    key = "ws_sk_" + "x" * 43
    found = await smoke(url, key, "--json")
    assert found.code == 1
    assert found.told["failed"] == "sweep"
    assert list(found.steps) == ["ready", "sweep"]
    assert key not in found.out + found.err


async def test_without_embedding_the_mode_is_keyword(postgres_session: Any, tmp_path: Path) -> None:
    dsn = await fresh_database(postgres_session.dsn)
    settings = settings_for(tmp_path, dsn, None, embedding_enabled=False)
    async with running(settings) as app, listening(app) as address:
        tenant = await app.tenant()
        passed = await smoke(address, tenant.key, "--mode", "keyword", "--json")
        failed = await smoke(address, tenant.key, "--json", "--timeout", "2")
    assert passed.code == 0, passed
    assert failed.told["failed"] == "search"


async def healthy(app: App) -> bool:
    with suppress(EmbeddingError):
        return bool(await app.runtime.embedder.embed_query("is all well?", 1.0))
    return False


async def saved(tenant: Tenant) -> bool:
    return len(await left(tenant)) == 2
