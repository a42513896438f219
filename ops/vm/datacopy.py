"""A copy of the data volume that opens, taken under writers, compaction and clean-up.

The store's own write lock is held while its files are linked: nobody writes, compacts or removes a version meanwhile,
so the copy is exactly one version of the table with everything that was answered by then. Writers wait for some
milliseconds; readers don't notice. What the engine writes under these endings never changes once it is there, so that
a hard link is a copy; all else on the volume is small and may be written in place: a link would change with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from . import locks
from .stack import VmError

#: Longer than any compaction; who can't have the lock by then has found a migration, or a process that hangs.
LOCK_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.005
#: In the order in which the store takes them: who waits for the second holds the first, and so can't be starved.
LOCKS: Final = ("turn.lock", "write.lock")
#: Folders of the engine end with this.
_TABLE: Final = ".lance"
_NEVER_WRITTEN_AGAIN: Final = frozenset({".lance", ".manifest", ".txn", ".idx", ".arrow", ".bin"})


@dataclass(frozen=True)
class Copied:
    files: int
    bytes: int
    #: for how long writers were held
    held_s: float


def copy_data(volume: Path, store: Path, target: Path) -> Copied:
    """All of `volume` into `target`, which must not exist yet and be on the same file system."""
    with write_lock(store):
        began = time.monotonic()
        try:
            files, size = _copy_folder(volume, target, linked=False)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise VmError(
                f"{volume} is a file system of its own, so files of it can't be linked from {target.parent}: "
                "leave the data volume where docker makes it, or move all of docker's folder"
            ) from None
        return Copied(files, size, time.monotonic() - began)


@contextlib.contextmanager
def write_lock(store: Path) -> Iterator[None]:
    """The write lock of the memory store; the kernel frees it should this process be killed."""
    if not store.is_dir():
        yield
        return
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    with contextlib.ExitStack() as held:
        for name in LOCKS:
            _flock(store / name, held, deadline)
        yield


def _flock(path: Path, held: contextlib.ExitStack, deadline: float) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    held.callback(os.close, fd)
    owner = path.parent.stat()
    os.fchown(fd, owner.st_uid, owner.st_gid)  # made here it would be root's, and the service locked out
    if not locks.wait(fd, deadline - time.monotonic(), _POLL_S):
        raise VmError(
            f"the memory store has been locked for over {LOCK_TIMEOUT_S:.0f} s: a migration is under way "
            "(`warmstart-vm status`), or a process hangs. Try again when it has ended"
        )


def _copy_folder(source: Path, target: Path, *, linked: bool) -> tuple[int, int]:
    """Files and bytes. What goes away meanwhile is a temporary file of other parts: a table, being locked, has none."""
    target.mkdir(mode=0o700)
    files = size = 0
    with os.scandir(source) as entries:
        for entry in entries:
            to = target / entry.name
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(status.st_mode):
                below, bytes_below = _copy_folder(Path(entry.path), to, linked=linked or entry.name.endswith(_TABLE))
                files, size = files + below, size + bytes_below
                continue
            if not stat.S_ISREG(status.st_mode) or entry.name.endswith(".lock"):
                continue
            if linked and Path(entry.name).suffix in _NEVER_WRITTEN_AGAIN:
                os.link(entry.path, to)
            else:
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy2(entry.path, to)
                    os.chown(to, status.st_uid, status.st_gid)
            files, size = files + 1, size + status.st_size
    status = source.stat()
    os.chown(target, status.st_uid, status.st_gid)
    shutil.copystat(source, target)
    return files, size
