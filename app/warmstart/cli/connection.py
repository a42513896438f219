"""A client command's way to the memory: find or start the server, run, close."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from warmstart.client import MemoryClient
from warmstart.home import Home, Target, connect

T = TypeVar("T")


def run(work: Callable[[MemoryClient], Awaitable[T]]) -> T:
    """What `work` answers for a client of the memory."""
    log_to_files("cli")
    target = find()

    async def session() -> T:
        async with MemoryClient(target.url, target.api_key) as client:
            return await work(client)

    return asyncio.run(session())


def find() -> Target:
    """As `connect`, with a spinner on a terminal while a server starts."""
    if os.environ.get("WARMSTART_URL") or Home.from_environ().server() is not None:
        return connect()
    with _spinner("Starting the memory's server…"):
        return connect()


def log_to_files(name: str) -> None:
    """Rotating files in ~/.warmstart/logs, warnings to stderr, nothing to stdout."""
    from warmstart import logs

    level = os.environ.get("WARMSTART_LOG_LEVEL", "").lower()
    logs.configure_client(level if level in ("debug", "info", "warning", "error") else "info", name)


@contextmanager
def _spinner(text: str) -> Iterator[None]:
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
