"""The write lock: one writer at a time on a table, over all processes of a host.

The interface is one async context manager, so that a store shared by several
hosts can take it from Postgres instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final, Protocol

from warmstart.errors import StoreUnavailable

#: A writer that waits longer gives up; compaction of a large table is the longest holder.
LOCK_TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.002


class WriteLock(Protocol):
    def hold(self) -> AbstractAsyncContextManager[None]:
        """Held until the context ends; raises StoreUnavailable where it can't be had in time."""
        ...


class FileLock:
    """A lock between processes over two files.

    Who waits for `write.lock` holds `turn.lock`, so a process that writes
    without a pause must queue behind the one that waits, and can't starve it.
    The kernel frees both when their holder dies.
    """

    def __init__(self, directory: Path, timeout_s: float = LOCK_TIMEOUT_S) -> None:
        self._turn = directory / "turn.lock"
        self._write = directory / "write.lock"
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        with contextlib.ExitStack() as held:
            try:
                async with asyncio.timeout(self._timeout_s):
                    with contextlib.ExitStack() as turn:
                        await _flock(self._turn, turn)
                        await _flock(self._write, held)
            except TimeoutError:
                raise StoreUnavailable(
                    f"another process has held the write lock for over {self._timeout_s:.0f} s; "
                    "nothing was written, try again",
                    retry_after=5,
                ) from None
            yield


async def _flock(path: Path, stack: contextlib.ExitStack) -> None:
    # polled: a thread blocked in flock can be neither timed out nor cancelled
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(_POLL_S)
    except BaseException:
        os.close(fd)
        raise
    stack.callback(os.close, fd)


def sync_filesystem(directory: Path) -> None:
    """Everything written below `directory` so far is on the disk when this returns.

    LanceDB syncs nothing itself; one call covers a whole group of writes.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if sys.platform == "linux":
            if _libc.syncfs(fd) != 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), str(directory))
        else:
            os.sync()
    finally:
        os.close(fd)


_libc: Final = ctypes.CDLL(None, use_errno=True)
