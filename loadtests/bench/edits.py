"""What edits cost in memory and on the disk, before and after a million of them.

    python -m loadtests.bench.edits [--edits 1000000] [--write]

A process with the store, its worker and no HTTP edits some memories of a table
again and again, as many callers at once as one commit takes; a million edits
take a quarter of an hour.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import click

from loadtests.bench.__main__ import Prepared, into_readme, machine, prepare, rss_mb
from warmstart.allocation import limit_allocators
from warmstart.config import load
from warmstart.memory import ListRequest, MemoryPatch
from warmstart.runtime import Runtime, open_runtime
from warmstart.store.writer import MAX_GROUP_ROWS
from warmstart.worker import Worker

MARK: Final = "<!-- edits -->"
ROWS: Final = 10_000
EDITED: Final = 1_000
#: How long old versions stay: the least that the setting allows.
RETENTION_S: Final = 60
OPTIMIZE_AFTER_S: Final = 30
LOOKS: Final = 10


def disk_mb(folder: Path) -> float:
    files = (Path(root) / name for root, _, names in os.walk(folder) for name in names)
    total = 0
    for file in files:
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # removed by the worker meanwhile
            continue
    return total / 2**20


async def edit(runtime: Runtime, user_id: str, count: int) -> list[str]:
    """Makes the edits; the rows of the table."""
    service, lines = runtime.service(user_id), []
    ids: list[str] = []
    cursor: str | None = None
    while len(ids) < EDITED:
        page = await service.list(ListRequest(limit=100, cursor=cursor))
        ids += [memory.id for memory in page.memories]
        cursor = page.next_cursor

    def look(done: int, seconds: float) -> None:
        rate = f"{done / seconds:,.0f}" if seconds else ""
        disk = disk_mb(Path(runtime.settings.lancedb))
        size = f"{disk:.0f} MB | {disk * 1024 / ROWS:.1f} KB"
        lines.append(f"| {done:,} | {rate} | {size} | {rss_mb(os.getpid()):.0f} MB |")
        click.echo(lines[-1], err=True)

    look(0, 0)
    numbers, began = iter(range(count)), time.perf_counter()

    async def caller(dice: random.Random, last: int) -> None:
        for number in numbers:
            patch = MemoryPatch(importance=round(dice.random(), 3), source=f"edit {number}")
            await service.update(dice.choice(ids), patch)
            if number >= last:
                return

    for part in range(1, LOOKS + 1):
        last = count * part // LOOKS - MAX_GROUP_ROWS
        await asyncio.gather(*(caller(random.Random(number), last) for number in range(MAX_GROUP_ROWS)))
        look(min(last + MAX_GROUP_ROWS, count), time.perf_counter() - began)
    await asyncio.sleep(2 * RETENTION_S)
    look(count, 0)
    return lines


async def edited(home: Path, user_id: str, count: int) -> list[str]:
    settings = load(
        {"EMBEDDING_ENABLED": "False"},
        warmstart_home=home,
        version_retention_s=RETENTION_S,
        optimize_after_s=OPTIMIZE_AFTER_S,
    )
    async with open_runtime(settings) as runtime:
        worker = asyncio.create_task(Worker(runtime).run())
        try:
            return await edit(runtime, user_id, count)
        finally:
            worker.cancel()
            await asyncio.wait({worker})


def in_a_process(home: Path, user_id: str, count: int) -> list[str]:
    return asyncio.run(edited(home, user_id, count))


@click.command()
@click.option("--edits", default=1_000_000, show_default=True)
@click.option("--write", is_flag=True, help="Put the figures into the README of this folder.")
def main(edits: int, write: bool) -> None:
    """Measure what edits cost on the disk and in memory."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        prepared: Prepared = asyncio.run(prepare(Path(name) / "home", ROWS, random.Random(7), 1))
        # here for what the new process imports before its own call
        limit_allocators()
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), limit_allocators) as fresh:
            lines = fresh.submit(in_a_process, prepared.home, next(iter(prepared.keys)), edits).result()
    figures = "\n".join(
        [
            machine(),
            "",
            f"| edits of {ROWS:,} memories | a second | disk | a memory | RSS |",
            "|---|---|---|---|---|",
            *lines,
        ]
    )
    click.echo(figures)
    if write:
        into_readme(MARK, figures)


if __name__ == "__main__":
    main()
