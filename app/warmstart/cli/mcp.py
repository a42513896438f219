"""mcp: the Model Context Protocol over stdio."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

import click

from warmstart.cli.connection import log_to_files
from warmstart.client import MemoryClient
from warmstart.errors import ServerUnreachable, Unauthorized, WarmstartError
from warmstart.home import Target, connect
from warmstart.memory import MemoryAPI

#: The home's server ends when unused, so a client that is connected says that it is there.
HEARTBEAT_S: Final = 60.0

logger = logging.getLogger(__name__)


@click.command()
def mcp() -> None:
    """Serve MCP over stdin and stdout.

    Goes to the server of WARMSTART_URL; without one, to the memory of WARMSTART_HOME, whose server
    it starts where none runs (on the home's own parts: DATABASE_URL and the like are not used).
    """
    log_to_files("mcp")
    asyncio.run(_serve())


async def _serve() -> None:
    from warmstart.mcp_server.stdio import run_stdio

    memory = HomeMemory(connect)
    # at once, so that the server is there when the first question comes
    beating = asyncio.create_task(memory.keep_alive(HEARTBEAT_S))
    try:
        await run_stdio(cast(MemoryAPI, memory))
    finally:
        beating.cancel()
        await asyncio.wait({beating})
        await memory.close()


class HomeMemory:
    """A MemoryAPI that finds its server at the first call, and again when that was restarted elsewhere."""

    def __init__(self, find: Callable[[], Target]) -> None:
        self._find = find
        self._client: MemoryClient | None = None
        self._target: Target | None = None
        self._finding = asyncio.Lock()

    def __getattr__(self, name: str) -> Any:
        if name not in MemoryAPI.__dict__:
            raise AttributeError(name)

        async def call(*args: Any, **kwargs: Any) -> Any:
            client = await self._attached(None)
            try:
                return await getattr(client, name)(*args, **kwargs)
            except (ServerUnreachable, Unauthorized):
                again = await self._attached(client)
                if again is client:
                    raise
                return await getattr(again, name)(*args, **kwargs)

        return call

    async def keep_alive(self, every_s: float) -> None:
        while True:
            try:
                await self.health()
                if self._target is not None and not self._target.local:
                    return
            except WarmstartError as error:
                logger.warning("the memory can't be reached: %s", error)
            await asyncio.sleep(every_s)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _attached(self, lost: MemoryClient | None) -> MemoryClient:
        """The client; where `lost` failed, one of the server that is there now, or `lost` itself."""
        async with self._finding:
            if self._client is not None and self._client is not lost:
                return self._client
            if self._target is not None and not self._target.local:
                return cast(MemoryClient, self._client)
            try:
                target = await asyncio.to_thread(self._find)
            except ServerUnreachable:
                raise
            except WarmstartError as error:
                raise ServerUnreachable(str(error)) from None
            if target == self._target:
                return cast(MemoryClient, self._client)
            old, self._client, self._target = self._client, MemoryClient(target.url, target.api_key), target
            if old is not None:
                with suppress(Exception):
                    await old.close()
            return self._client
