"""The connection to Postgres: opened when Postgres is there, given up when it does not answer.

There is a pool while Postgres answers and none while it does not. Without one
every call fails at once, and one background task tries to get it back. A server
that hangs is the case to think of: it accepts connections and never answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import psycopg
import structlog
from psycopg import AsyncConnection, waiting
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import DictRow, dict_row
from psycopg_pool import AsyncConnectionPool, TooManyRequests

from warmstart.errors import BookkeepingUnavailable, ConfigError
from warmstart.store import migrations

log = structlog.get_logger(__name__)
T = TypeVar("T")

#: The longest any call waits for Postgres, connecting included.
CALL_BUDGET_S: Final = 2.0
OPEN_BUDGET_S: Final = 3.0
FIRST_RETRY_S: Final = 1.0
#: A revocation must reach every process 10 s after Postgres is back, so no longer than this.
LAST_RETRY_S: Final = 5.0
HEARTBEAT_S: Final = 5.0
#: What is noted within this time goes out together.
GATHER_S: Final = 0.1
CLOSE_BUDGET_S: Final = 1.0
POOL_SIZE: Final = 4
POOL_WAITING: Final = 50

#: SQLSTATE classes after which a connection or its server is of no more use.
_LOST_CLASSES: Final = ("08", "53", "57", "")


class Connection(AsyncConnection[DictRow]):
    async def wait(self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        """As psycopg's, but a cancelled wait ends the connection.

        psycopg asks the server to cancel the query and waits 5 s for its answer,
        which a server that hangs never gives.
        """
        try:
            return await waiting.wait_async(gen, self.pgconn.socket, interval=interval, timeout=timeout)
        except asyncio.CancelledError:
            self.pgconn.finish()
            raise


class Database:
    def __init__(self, dsn: str) -> None:
        try:
            conninfo_to_dict(dsn)
        except psycopg.ProgrammingError:
            raise ConfigError(
                ["DATABASE_URL can't be read: it must be like postgresql://user:password@host/name"]
            ) from None
        self._dsn = dsn
        self.healthy = False
        #: Why Postgres can't be used, in one line; empty while it can.
        self.reason = "not connected yet"
        #: When the present state began.
        self.since = datetime.now(UTC)
        self._pool: AsyncConnectionPool[Connection] | None = None
        self._task: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._tried = asyncio.Event()
        self._refused: ConfigError | None = None
        self._opened_once = False

    async def open(self) -> None:
        """Returns with Postgres up or down; raises ConfigError for a database this version must not touch."""
        self._task = asyncio.create_task(self._run(), name="bookkeeping")
        with suppress(TimeoutError):
            async with asyncio.timeout(OPEN_BUDGET_S):
                await self._tried.wait()
        if self._refused is not None:
            await self.close()
            raise self._refused

    async def close(self) -> None:
        """Takes CLOSE_BUDGET_S at most, also when Postgres hangs."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        self._discard_pool()
        if self._closing:
            await asyncio.wait(list(self._closing), timeout=CLOSE_BUDGET_S)

    async def migrate(self) -> list[migrations.Migration]:
        """Applies what the database lacks, and answers what that was; `open` does it too.

        Raises ConfigError, MigrationFailed or BookkeepingUnavailable.
        """
        async with self.direct() as conn:
            async with asyncio.timeout(CALL_BUDGET_S):
                found = await migrations.state(conn, migrations.shipped())
            found.check()
            if found.newer:
                log.info("bookkeeping.schema.newer", schema=found.schema, known=found.known, compatible=True)
            if not found.pending:
                return []
            async with asyncio.timeout(migrations.MIGRATE_BUDGET_S):
                made = await migrations.migrate(conn, migrations.shipped())
        for migration in made:
            log.info("bookkeeping.migrated", migration=str(migration), compatible=not migration.incompatible)
        return made

    async def schema(self) -> migrations.State:
        """The database's schema as this release sees it; works without `open`, and changes nothing."""
        async with self.direct() as conn, asyncio.timeout(CALL_BUDGET_S):
            return await migrations.state(conn, migrations.shipped())

    @asynccontextmanager
    async def connection(self, budget_s: float = CALL_BUDGET_S) -> AsyncIterator[Connection]:
        """A connection whose use ends after `budget_s`; raises BookkeepingUnavailable."""
        pool = self._pool
        if pool is None:
            raise BookkeepingUnavailable(self.reason)
        try:
            async with asyncio.timeout(budget_s), pool.connection() as conn:
                yield conn
        except TimeoutError:
            reason = f"Postgres did not answer in {budget_s * 1000:.0f} ms"
            # too slow for a shorter budget does not make it down
            if budget_s >= CALL_BUDGET_S:
                self._lost(pool, reason)
            raise BookkeepingUnavailable(reason) from None
        except psycopg.Error as error:
            if _is_lost(error):
                self._lost(pool, _line(error))
            raise BookkeepingUnavailable(_line(error)) from error

    @asynccontextmanager
    async def unbounded_connection(self) -> AsyncIterator[Connection]:
        """`direct` for long work, where Postgres is known to answer."""
        if self._pool is None:
            raise BookkeepingUnavailable(self.reason)
        async with self.direct() as conn:
            yield conn

    @asynccontextmanager
    async def direct(self) -> AsyncIterator[Connection]:
        """A connection of its own, of which the caller bounds each use; works without `open`."""
        try:
            async with asyncio.timeout(CALL_BUDGET_S):
                conn = await self._connect()
            async with conn:
                yield conn
        except TimeoutError:
            raise BookkeepingUnavailable("Postgres did not answer in its time") from None
        except psycopg.Error as error:
            raise BookkeepingUnavailable(_line(error)) from error

    async def _connect(self) -> Connection:
        return await Connection.connect(self._dsn, **_CONNECT)

    async def _run(self) -> None:
        delay = FIRST_RETRY_S
        while True:
            try:
                if self._pool is None:
                    await self._get_pool()
                    delay = FIRST_RETRY_S
                await self._work()
            except ConfigError as error:
                self._refused = error
                self._state(False, str(error))
            except BookkeepingUnavailable as error:
                if self._pool is None:
                    self._state(False, str(error))
            except Exception:
                # this task is the only way back to Postgres: it must outlive its own faults
                log.exception("bookkeeping.fault")
                delay = LAST_RETRY_S
                await asyncio.sleep(delay)
            self._tried.set()
            if self._pool is None:
                await asyncio.sleep(delay)
                delay = min(delay * 2, LAST_RETRY_S)
            else:
                await self._pause()

    async def _get_pool(self) -> None:
        try:
            await self.migrate()
        except ConfigError:
            # a newer version migrated under a process that runs: it goes on, as it must during a roll-out
            if not self._opened_once:
                raise
        pool = AsyncConnectionPool(
            self._dsn, connection_class=Connection, kwargs=_CONNECT, open=False,
            min_size=1, max_size=POOL_SIZE, max_waiting=POOL_WAITING, timeout=CALL_BUDGET_S,
            check=AsyncConnectionPool.check_connection, name="bookkeeping",
        )  # fmt: skip
        await pool.open()
        self._pool, self._opened_once, self._refused = pool, True, None
        self._state(True, "")

    async def _work(self) -> None:
        """What the background task does each time it wakes; here: see whether Postgres answers."""
        async with self.connection():
            pass

    async def _pause(self) -> None:
        await asyncio.sleep(GATHER_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(HEARTBEAT_S):
                await self._wake.wait()
        self._wake.clear()

    def _lost(self, pool: AsyncConnectionPool[Connection], reason: str) -> None:
        if self._pool is pool:
            self._state(False, reason)
            self._discard_pool()
            self._wake.set()

    def _discard_pool(self) -> None:
        if self._pool is not None:
            task = asyncio.create_task(self._pool.close(timeout=CLOSE_BUDGET_S / 2))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            self._pool = None

    def _state(self, healthy: bool, reason: str) -> None:
        if healthy != self.healthy:
            self.since = datetime.now(UTC)
            if healthy:
                log.info("bookkeeping.up")
            else:
                log.warning("bookkeeping.down", reason=reason)
        self.healthy, self.reason = healthy, reason


_CONNECT: Final[dict[str, Any]] = {
    "autocommit": True,
    "row_factory": dict_row,
    "client_encoding": "utf8",  # a server of another encoding would answer in bytes
    "connect_timeout": 2,
    "application_name": "warmstart",
    "prepare_threshold": None,  # so that it works through a transaction pooler
}


def _is_lost(error: psycopg.Error) -> bool:
    connection_error = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    if isinstance(error, TooManyRequests) or not connection_error:
        return False
    return (error.sqlstate or "")[:2] in _LOST_CLASSES


def _line(error: psycopg.Error) -> str:
    """psycopg's message on one line of bounded length; it never holds a password."""
    return " ".join(str(error).split())[:300] or type(error).__name__
