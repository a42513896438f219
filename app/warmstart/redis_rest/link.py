"""Commands to Redis and its replies as they are, without redis-py's conversions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Final

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from warmstart.errors import ConfigError

Command = tuple[bytes, ...]
#: None, int, bytes (bulk and status alike), ResponseError, or a list of these.
Reply = Any

MAX_CONNECTIONS: Final = 32
CONNECT_TIMEOUT_S: Final = 0.5
#: Redis takes SCRIPT KILL only after its busy-reply-threshold (5 s where not set).
KILL_TIMEOUT_S: Final = 10.0

SCRIPT_COMMANDS: Final = frozenset({b"EVAL", b"EVALSHA", b"EVAL_RO", b"EVALSHA_RO"})

log = logging.getLogger(__name__)


class RedisUnavailable(Exception):
    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        self.timed_out = timed_out
        super().__init__(message)


class RedisLink:
    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._up = True
        self._kill: asyncio.Task[None] | None = None
        try:
            self._pool = redis.asyncio.BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=timeout_s,
                protocol=2,
                socket_timeout=timeout_s,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigError([f"REDIS_URL: {error}"]) from None

    async def exchange(self, commands: Sequence[Command]) -> list[Reply]:
        """All commands in one write, and a reply each; RedisUnavailable past the time or without a server."""
        try:
            async with asyncio.timeout(self._timeout_s):
                replies = await self._exchange(commands)
        except (TimeoutError, redis.exceptions.TimeoutError):
            self._note(up=False, why="no answer in time")
            if any(command[0].upper() in SCRIPT_COMMANDS for command in commands):
                self._kill_script()
            raise RedisUnavailable(f"redis gave no answer within {self._timeout_s} s", timed_out=True) from None
        except (RedisError, OSError) as error:
            self._note(up=False, why=str(error))
            raise RedisUnavailable("redis is unavailable") from error
        self._note(up=True)
        return replies

    async def close(self) -> None:
        if self._kill:
            self._kill.cancel()
        await self._pool.disconnect()

    async def _exchange(self, commands: Sequence[Command]) -> list[Reply]:
        connection = await self._pool.get_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.send_packed_command(connection.pack_commands(commands))
            return [await _read(connection) for _ in commands]
        except BaseException:
            # replies may still be on their way: nobody may read them as his own
            await connection.disconnect(nowait=True)
            raise
        finally:
            await self._pool.release(connection)

    def _kill_script(self) -> None:
        """A script that hangs blocks the whole server, and ends only by being killed."""
        if self._kill is None or self._kill.done():
            self._kill = asyncio.create_task(self._send_kill())

    async def _send_kill(self) -> None:
        client = redis.asyncio.Redis.from_url(self._url, socket_timeout=KILL_TIMEOUT_S, retry=Retry(NoBackoff(), 0))
        try:
            await client.script_kill()
            log.warning("a script that ran past its time was killed")
        except (RedisError, OSError) as error:
            log.warning("a script ran past its time and could not be killed: %s", error)
        finally:
            await client.aclose()

    def _note(self, *, up: bool, why: str = "") -> None:
        if up != self._up:
            self._up = up
            log.warning("redis answers again" if up else f"redis does not answer: {why}")


async def _read(connection: Any) -> Reply:
    try:
        return await connection.read_response(disable_decoding=True)
    except ResponseError as error:
        return error
