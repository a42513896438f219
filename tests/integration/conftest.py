"""The real embedded Postgres, started once; a fresh database for each test that asks for one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from warmstart.postgres import SETTINGS, EmbeddedPostgres
from warmstart.store.bookkeeping import Bookkeeping

ROOM_FOR_CLUSTERS = 2_000_000_000


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
    name = f"test_{uuid4().hex}"
    async with await psycopg.AsyncConnection.connect(postgres_session.dsn, autocommit=True) as conn:
        await conn.execute(f"CREATE DATABASE {name}")
    yield postgres_session.dsn.replace("/postgres?", f"/{name}?")
    await postgres_session.heal()


@pytest.fixture
async def bookkeeping(dsn: str) -> AsyncIterator[Bookkeeping]:
    """Bookkeeping over an empty, migrated database."""
    opened = Bookkeeping(dsn)
    await opened.open()
    yield opened
    await opened.close()
