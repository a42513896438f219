"""The symbols of many files, by several processes where that pays."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Final, Literal

from warmstart.indexer.sections import sections
from warmstart.indexer.symbols import Symbol, extract
from warmstart.indexer.text import decode
from warmstart.indexer.walk import Found, is_generated, read

#: Fewer files are done sooner than processes start.
MIN_FILES_FOR_POOL: Final = 150
MAX_PROCESSES: Final = 8
CHUNK: Final = 16

Outcome = Literal["symbols", "too-large", "binary", "generated", "unreadable"]


@dataclass(frozen=True, slots=True)
class Looked:
    """What became of one file."""

    path: str
    language: str
    outcome: Outcome
    sha256: str = ""
    text: str = ""
    symbols: Sequence[Symbol] = ()
    #: Whether the whole of it was.
    parsed: bool = True
    #: What ended the look at it.
    problem: str = ""


def look(found: Found) -> Looked:
    try:
        data = read(found.file)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return Looked(found.path, found.language, "unreadable", problem=f"can't be read: {reason}")
    if data is None:
        return Looked(found.path, found.language, "too-large")
    text = decode(data)
    if text is None:
        return Looked(found.path, found.language, "binary")
    if is_generated(found.language, text):
        return Looked(found.path, found.language, "generated")
    source = text.encode()
    try:
        extraction = sections(source) if found.language == "markdown" else extract(found.language, source)
    except Exception as error:  # a file must never end the run
        problem = f"its symbols can't be found: {type(error).__name__}: {str(error)[:200]}"
        return Looked(found.path, found.language, "symbols", digest(data), text, parsed=False, problem=problem)
    return Looked(found.path, found.language, "symbols", digest(data), text, extraction.symbols, extraction.parsed)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def look_at_all(files: Sequence[Found]) -> Iterator[Looked]:
    """In the order of `files`."""
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    if len(files) < MIN_FILES_FOR_POOL or processes < 2:
        yield from map(look, files)
        return
    chunks = deque(files[at : at + CHUNK] for at in range(0, len(files), CHUNK))
    pending: deque[tuple[Sequence[Found], Future[list[Looked]]]] = deque()
    with _pool(processes) as pool:
        while chunks or pending:
            while chunks and len(pending) < 2 * processes:
                chunk = chunks.popleft()
                pending.append((chunk, pool.submit(_look_at, chunk)))
            chunk, future = pending.popleft()
            try:
                yield from future.result()
            except BrokenProcessPool:
                # a file ended a process, with all that it had before it: the rest goes on one by one
                rest = [*chunk, *(f for c, _ in pending for f in c), *(f for c in chunks for f in c)]
                yield from _one_by_one(rest)
                return


def _one_by_one(files: Sequence[Found]) -> Iterator[Looked]:
    pool = _pool(1)
    try:
        for found in files:
            try:
                yield pool.submit(look, found).result()
            except BrokenProcessPool:
                pool.shutdown()
                pool = _pool(1)
                yield Looked(found.path, found.language, "unreadable", problem="ended the process that parsed it")
    finally:
        pool.shutdown()


def _look_at(files: Sequence[Found]) -> list[Looked]:
    return [look(found) for found in files]


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _end_with_parent)


def _end_with_parent() -> None:
    """A killed parent can't end its children, so they look after it."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            wait([parent.sentinel])
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
