"""How long each page of the dashboard takes, of one tenant with all the memories: from sending to the last byte.

python -m loadtests.bench.pages [--rows 100000] [--rounds 20]
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from pathlib import Path

import click
import httpx

from loadtests.bench.__main__ import Times, machine, prepare, server
from loadtests.users.reader import FORM, MEMORY_LINK

PAGES = {
    "the newest": "/",
    "filtered by type and tag": "/?type=fact&tag=worker",
    "search": "/?q={query}",
    "one memory": "{memory}",
    "its form": "{memory}/edit",
    "trash": "/trash",
    "namespaces": "/namespaces",
    "keys": "/keys",
    "activity": "/activity",
    "health": "/health",
    "export and import": "/transfer",
}


async def measured(rows: int, rounds: int, directory: Path) -> str:
    prepared = await prepare(directory / "home", rows, random.Random(rows), 1)
    lines = [
        f"{machine()}; {rows:,} memories of one tenant",
        "",
        "| page | first, ms | p50 | p95 | KB |",
        "|---|---|---|---|---|",
    ]
    async with (
        server(prepared.home, "--no-worker") as (url, _),
        httpx.AsyncClient(base_url=url, timeout=60, follow_redirects=True) as http,
    ):
        [key] = prepared.keys.values()
        answer = await http.post("/login", data={"key": key, "next": "/"}, headers=FORM)
        found = MEMORY_LINK.search(answer.text)
        assert found, answer.text[:500]
        for name, path in PAGES.items():
            took, size = [], 0
            for number in range(rounds + 1):
                query = prepared.queries[number % len(prepared.queries)]
                began = time.perf_counter()
                answer = await http.get(path.format(memory=found[1], query=query))
                took.append((time.perf_counter() - began) * 1000)
                assert answer.status_code == 200, answer.text[:300]
                assert 'action="/login"' not in answer.text
                size = len(answer.content)
            times = Times(took[1:])
            lines.append(
                f"| {name} | {took[0]:.0f} | {times.quantile(0.5):.0f} | {times.quantile(0.95):.0f} "
                f"| {size / 1000:.0f} |"
            )
    return "\n".join(lines)


@click.command()
@click.option("--rows", default=100_000, show_default=True, help="Memories of the tenant.")
@click.option("--rounds", default=20, show_default=True, help="Times each page is asked for.")
def main(rows: int, rounds: int) -> None:
    """Measure the pages of the dashboard."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        click.echo(asyncio.run(measured(rows, rounds, Path(name))))


if __name__ == "__main__":
    main()
