"""A process's memory: how much there may be, and bounds on what the engine takes of it beside its caches.

A process that compacts 100,000 memories for the third time: 871 MB, and 835 are kept; with few arenas 617 and 371; with
the read-ahead and what is given back 490 and 227. A server of 10,000 memories after a minute of edits and searches: 287
MB of its own, with the allocator of all else for Arrow 180.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Final

#: From malloc.h.
_M_ARENA_MAX: Final = -8
_ARENAS: Final = 2
_CONTAINER: Final = Path("/sys/fs/cgroup/memory.max")
_ARROW_ALLOCATOR: Final = "ARROW_DEFAULT_MEMORY_POOL"
_READ_AHEAD: Final = "LANCE_DEFAULT_IO_BUFFER_SIZE"
_READ_AHEAD_BYTES: Final = 32 << 20


def limit_allocators() -> None:
    """Before Arrow is imported. Each allocator keeps what it got: glibc for each of the engine's threads, Arrow in one
    of its own beside glibc."""
    _glibc("mallopt", _M_ARENA_MAX, _ARENAS)
    os.environ.setdefault(_ARROW_ALLOCATOR, "system")


def limit_read_ahead() -> None:
    """Before the first read; LanceDB's own limit is 2 GB. For processes that compact: searches are slowed by it."""
    os.environ.setdefault(_READ_AHEAD, str(_READ_AHEAD_BYTES))


def give_back() -> None:
    """What is freed goes back to the system, after work that took much of it for a moment."""
    _glibc("malloc_trim", 0)


def allowed_memory() -> int:
    """Bytes that this process may take: what its container or the machine has."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(machine, int(_CONTAINER.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit: "max"
        return machine


def _glibc(name: str, *arguments: int) -> None:
    """Nothing where the C library is another."""
    if sys.platform == "linux" and (function := getattr(ctypes.CDLL(None), name, None)):
        function(*arguments)
