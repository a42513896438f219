"""The key database, for commands that work on it beside a server or without one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from warmstart.cli.serve import is_embedded
from warmstart.config import Settings
from warmstart.home import POLL_S, Holder, Home, refuse_root
from warmstart.postgres import EmbeddedPostgres, running_dsn
from warmstart.store.bookkeeping import Bookkeeping

#: How long to wait for a server that starts, or for another command on the home.
PATIENCE_S: Final = 20.0


@asynccontextmanager
async def database(settings: Settings, *, allow_root: bool) -> AsyncIterator[str]:
    """A DSN: DATABASE_URL, that of the home's running server, or of a Postgres started for this while."""
    if not is_embedded(settings):
        yield settings.database_url.get_secret_value()
        return
    home = Home(settings.warmstart_home)
    home.check_version()
    data = home.path / "postgres"
    loop = asyncio.get_running_loop()
    deadline = loop.time() + PATIENCE_S
    # a server that starts has none yet, another command's ends with it
    while (holder := home.holder()) and not (holder.url and running_dsn(data)):
        if loop.time() > deadline:
            raise home.in_use(holder)
        await asyncio.sleep(POLL_S)
    if holder and (dsn := running_dsn(data)):
        yield dsn
        return
    refuse_root(allow_root)
    with home.lock(Holder(os.getpid()), PATIENCE_S):
        postgres = EmbeddedPostgres(data)
        try:
            yield await postgres.start()
        finally:
            await postgres.stop()


@asynccontextmanager
async def bookkeeping(settings: Settings, *, allow_root: bool) -> AsyncIterator[Bookkeeping]:
    async with database(settings, allow_root=allow_root) as dsn:
        opened = Bookkeeping(dsn)
        await opened.open()
        try:
            yield opened
        finally:
            await opened.close()
