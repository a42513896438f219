"""The real embedded Postgres, started once; a fresh database for each test that asks for one.

`app` is the whole service, one for each module that asks for it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import pytest_asyncio

import warmstart.circuit
import warmstart.upstash
from fakes.provider import FakeProvider
from integration.service import DIM, App, Tenant, fresh_database, hosted, running, settings_for, until, well
from warmstart.errors import EmbeddingError
from warmstart.postgres import SETTINGS, EmbeddedPostgres
from warmstart.store.bookkeeping import Bookkeeping

ROOM_FOR_CLUSTERS = 2_000_000_000
#: Longest first, so that no process is left with one of them when the others have nothing to do.
LONG_MODULES = ("test_mcp_clients", "test_resident", "test_worker", "test_serve", "test_store_repair", "test_smoke")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: place for place, name in enumerate(LONG_MODULES)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


class TestServer:
    """The server, and what can happen to one. Its DSN stays the same over restarts."""

    __test__ = False

    def __init__(self, data_dir: Path) -> None:
        self.embedded = EmbeddedPostgres(data_dir)
        self.dsn = ""

    async def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SETTINGS, "fsync", "off")  # no test of it cuts the power, and it is most of the time
            self.dsn = await self.embedded.start()

    def freeze(self) -> None:
        """Connections are taken by the kernel, and nothing ever answers."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        await self.embedded.stop()

    async def heal(self) -> None:
        """However a test left it."""
        self.thaw()
        if not self.embedded.processes():
            await self.start()

    def _signal(self, sign: signal.Signals) -> None:
        for pid in self.embedded.processes():
            with suppress(ProcessLookupError):  # a session that ended just now
                os.kill(pid, sign)


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """In memory where there is room: a cluster is a thousand files a database."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > ROOM_FOR_CLUSTERS
    made = Path(tempfile.mkdtemp(prefix="warmstart-test-", dir=memory if roomy else None))
    try:
        yield made
    finally:
        shutil.rmtree(made)


@pytest.fixture
def scratch() -> Iterator[Path]:
    with scratch_directory() as made:
        yield made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 96 MiB."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(mount_point)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.fail(f"this test needs to mount a tmpfs (run it as root): {mounted.stderr.strip()}")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)


@pytest.fixture(scope="session")
def postgres_session() -> Iterator[TestServer]:
    with scratch_directory() as directory:
        server = TestServer(directory / "postgres")
        asyncio.run(server.start())
        yield server
        asyncio.run(server.embedded.stop())


@pytest.fixture
async def postgres(postgres_session: TestServer) -> AsyncIterator[TestServer]:
    """The server, for tests that do it harm; whole again afterwards."""
    yield postgres_session
    await postgres_session.heal()


@pytest.fixture
async def dsn(postgres_session: TestServer) -> AsyncIterator[str]:
    """An empty database; they go with the server, since dropping one costs a checkpoint."""
    yield await fresh_database(postgres_session.dsn)
    await postgres_session.heal()


@pytest.fixture
async def bookkeeping(dsn: str) -> AsyncIterator[Bookkeeping]:
    """Bookkeeping over an empty, migrated database."""
    opened = Bookkeeping(dsn)
    await opened.open()
    yield opened
    await opened.close()


# -- the whole service


@pytest.fixture
def quick_circuits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was broken is tried again within a test's time."""
    quicken(monkeypatch)


def quicken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(warmstart.circuit, "FIRST_PAUSE_S", 0.05)
    patch.setattr(warmstart.circuit, "MAX_PAUSE_S", 0.2)
    patch.setattr(warmstart.upstash, "OPEN_S", 0.2)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def app(
    request: pytest.FixtureRequest, postgres_session: TestServer, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[App]:
    """The running service of a module, with the settings that the module's SETTINGS change."""
    changes = getattr(request.module, "SETTINGS", {})
    dsn = await fresh_database(postgres_session.dsn)
    with FakeProvider(DIM) as provider, pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        settings = settings_for(tmp_path_factory.mktemp("home"), dsn, provider, **changes)
        async with hosted(running(settings, provider)) as opened:
            yield opened


@pytest_asyncio.fixture(loop_scope="module")
async def alice(app: App) -> AsyncIterator[Tenant]:
    """A new tenant of a service in which all is well."""
    await app.compact()
    yield await app.tenant()
    if app.provider is not None:
        well(app.provider)

    async def healed() -> bool:
        try:
            return bool(await app.runtime.embedder.embed_query("is all well?", 1.0))
        except EmbeddingError:
            return False

    await until(healed)


@pytest_asyncio.fixture(loop_scope="module")
async def bob(app: App) -> Tenant:
    """Another tenant."""
    return await app.tenant()
