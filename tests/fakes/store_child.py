"""Processes that write to a store until they are killed, made by forking one that has everything imported.

    python store_child.py

Reads lines from stdin, answers each with the pid of a new writer:

    write <directory> <log> <name>   saves and edits without a pause; each answer goes to <log>, fsynced
    batch <directory> <log> <name>   saves one batch of 100 that every name shares, then ends
    hold <directory> <log> <name>    takes the write lock and keeps it
    hammer <directory> <log> <name>  takes the write lock, again and again, without a pause
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from fakes.store import Store, etag, open_store, row
from warmstart.store.lock import FileLock

#: Writers of one process; each waits for its answers.
CALLERS = 4


class Log:
    """What was answered; a line is on the disk before the next write begins."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, **entry: Any) -> None:
        os.write(self._fd, json.dumps(entry).encode() + b"\n")
        os.fsync(self._fd)


async def write(store: Store, log: Log, name: str) -> None:
    async def caller(number: int) -> None:
        mine: list[str] = []
        for step in itertools.count():
            # every third content is one that other processes write too
            contents = [f"{name} {number} {step}", f"shared {step}"] if step % 3 == 0 else [f"{name} {number} {step}"]
            rows = [row(c) for c in contents]
            for content, answer in zip(contents, await store.writer.insert(rows), strict=True):
                log.note(op="insert", id=answer.id, content=content)
                if not answer.duplicate:
                    mine.append(answer.id)
            edited = mine[step % len(mine)]
            await store.tenant().edit(edited, {"source": str(step + 1)}, None, etag)
            log.note(op="edit", id=edited, source=step + 1)

    await asyncio.gather(*(caller(n) for n in range(CALLERS)))


async def batch(store: Store, log: Log, name: str) -> None:
    for step in range(4):
        contents = [f"batch {step} {i}" for i in range(25)] + [f"{name} {step} {i}" for i in range(5)]
        answers = await store.writer.insert([row(c) for c in contents])
        for content, answer in zip(contents, answers, strict=True):
            log.note(op="insert", id=answer.id, content=content)


async def run(mode: str, directory: Path, log: Log, name: str) -> None:
    if mode == "hold":
        async with FileLock(directory).hold():
            log.note(op="held")
            await asyncio.sleep(3600)
    elif mode == "hammer":
        while True:
            async with FileLock(directory).hold():
                log.note(op="held")
                time.sleep(0.005)  # noqa: ASYNC251  a writer at work
    else:
        async with open_store(directory) as store:
            await {"write": write, "batch": batch}[mode](store, log, name)
    log.note(op="done")


def main() -> None:
    # the engine starts anew in a forked process; here it was never used before
    warnings.filterwarnings("ignore", "lancedb fork support", RuntimeWarning)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are buried by the kernel
    for line in sys.stdin:
        mode, directory, log, name = line.split()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                asyncio.run(run(mode, Path(directory), Log(Path(log)), name))
                code = 0
            finally:
                os._exit(code)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
