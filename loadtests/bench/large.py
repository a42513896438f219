"""Tenants of very unequal size in one table, asked alone and while others write.

    python -m loadtests.bench.large [--rows 10000,1000000] [--write]

A million memories take some minutes to make, 5 GB of memory meanwhile, and 6 GB of disk.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import click
import httpx
import lancedb

from loadtests.bench.__main__ import (
    TENANTS,
    Times,
    into_readme,
    machine,
    prepare,
    raw_arms,
    rss_mb,
    server,
    timed,
    vectors_of,
)
from loadtests.bench.wide import three
from loadtests.data import Generator, zipf
from warmstart.store import predicates as where
from warmstart.store.schema import TABLE
from warmstart.terms import query_text

MARK: Final = "<!-- large -->"
#: By rank, the largest first: each takes 1/rank of what the first has.
ASKED: Final = {"the largest": 0, "the tenth": 9, "the smallest": TENANTS - 1}
ROUNDS: Final = 100
#: What another tenant saves meanwhile.
SAVES_A_SECOND: Final = 2.0


#: Words by Zipf's law, without the hundred most frequent ones, which are no search terms: the first that is left is in
#: some 7 % of the memories.
VOCABULARY: Final = 20_000
STOP_WORDS: Final = 100
_SYLLABLES: Final = [consonant + vowel for consonant in "bcdfghjklmnprstvwxyz" for vowel in "aeiou"]
_WORDS: Final = ["".join(_SYLLABLES[n // 100**place % 100] for place in range(3)) for n in range(VOCABULARY)]
_WEIGHTS: Final = list(itertools.accumulate(zipf(VOCABULARY + STOP_WORDS)[STOP_WORDS:]))


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, cum_weights=_WEIGHTS, k=words))


def client(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60)


@asynccontextmanager
async def writing(http: httpx.AsyncClient) -> AsyncIterator[None]:
    """Saves at an even rate, whatever each takes, until the block ends."""
    items, pending = Generator("others", "others"), set[asyncio.Task[Any]]()

    async def run() -> None:
        while True:
            save = asyncio.create_task(http.post("/v1/memories", json=items.item().memory))
            pending.add(save)
            save.add_done_callback(pending.discard)
            await asyncio.sleep(1 / SAVES_A_SECOND)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        for answer in await asyncio.gather(*pending):
            answer.raise_for_status()


async def unequal(rows: int, directory: Path) -> list[str]:
    prepared = await prepare(directory / f"home-{rows}", rows, random.Random(rows), TENANTS, zipf(TENANTS), sentence)
    tenants, queries = list(prepared.keys), prepared.queries
    vectors, dice, lines = await vectors_of(queries), random.Random(3), []
    table = await (
        await lancedb.connect_async(str(prepared.home / "lancedb"), read_consistency_interval=timedelta(0))
    ).open_table(TABLE)
    began = time.perf_counter()
    async with server(prepared.home, "--no-worker") as (url, pid):
        ready = time.perf_counter() - began
        for name, rank in ASKED.items():
            tenant = tenants[rank]
            memories = await table.count_rows(where.tenant(tenant).sql)
            async with client(url, prepared.keys[tenant]) as http, client(url, prepared.keys[tenants[1]]) as other:

                async def ask(query: str, http: httpx.AsyncClient = http) -> None:
                    answer = await http.post("/v1/search", json={"query": query})
                    assert answer.status_code == 200, answer.text[:300]

                async def round_(query: str, tenant: str = tenant) -> tuple[float, float]:
                    mine, _ = await timed(lambda: ask(query))
                    theirs, _ = await timed(lambda: raw_arms(table, tenant, vectors[query], query_text(query)))
                    return mine, theirs

                for query in queries:
                    await round_(query)
                alone = [await round_(dice.choice(queries)) for _ in range(ROUNDS)]
                async with writing(other):
                    busy = [(await timed(lambda: ask(dice.choice(queries))))[0] for _ in range(ROUNDS)]
            mine, raw = Times([m for m, _ in alone]), Times([r for _, r in alone])
            ratios = " / ".join(f"{mine.quantile(q) / raw.quantile(q):.2f}" for q in (0.5, 0.95))
            lines.append(
                f"| {rows:,} | {name}, {memories:,} | {three(mine)} | {three(raw)} | {ratios} | {three(Times(busy))} "
                f"| {rss_mb(pid):.0f} MB | {ready:.1f} s |"
            )
    return lines


async def report(rows: Sequence[int]) -> str:
    lines = [
        machine(),
        "",
        "| memories | tenant | p50 / p95 / p99 ms | raw arms | ratio p50 / p95 | while others write | RSS | start |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        os.chmod(directory, 0o711)
        for size in rows:
            lines += await unequal(size, directory)
    return "\n".join(lines)


@click.command()
@click.option("--rows", default="10000,1000000", show_default=True, help="Table sizes, comma-separated.")
@click.option("--write", is_flag=True, help="Put the figures into the README of this folder.")
def main(rows: str, write: bool) -> None:
    """Measure unequal tenants in large tables."""
    figures = asyncio.run(report([int(size) for size in rows.split(",")]))
    click.echo(figures)
    if write:
        into_readme(MARK, figures)


if __name__ == "__main__":
    main()
