"""What one search over HTTP does not tell: more clients, MCP, filters, every other operation, starting.

    python -m loadtests.bench.wide [--rows 1000,10000,100000] [--write]

One server process for each size and number of tenants, without its worker, on
a table with vectors. Every figure stands beside another of the same run.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import click
import httpx
import lancedb
import pyarrow as pa

from loadtests.bench.__main__ import (
    TENANTS,
    Prepared,
    Times,
    into_readme,
    machine,
    prepare,
    rss_mb,
    sentence,
    server,
    timed,
)
from loadtests.bench.peers.__main__ import model
from loadtests.users.agent import MODERN
from warmstart.config import load
from warmstart.memory import NewMemory
from warmstart.store.schema import TABLE, row_of, schema

MARK: Final = "<!-- wide -->"
CLIENTS: Final = (1, 8, 32)
ROUNDS: Final = 200
FEW: Final = 60
#: Of the largest tenant's memories, those whose tags hold what is asked for.
SELECTIVITIES: Final = (1.0, 0.1, 0.01, 0.001, 0.0001)


@dataclass
class Asking:
    """A server, and one tenant's way to it."""

    http: httpx.AsyncClient
    queries: list[str]
    dice: random.Random
    #: Asked for the first time, each of them.
    fresh: bool = False
    #: Answers, and those of them that lacked an arm.
    answers: int = 0
    degraded: int = 0

    def query(self) -> str:
        chosen = self.dice.choice(self.queries)
        return f"{chosen} {self.dice.randrange(10**9)}" if self.fresh else chosen

    async def search(self, **more: Any) -> None:
        answer = await self.http.post("/v1/search", json={"query": self.query(), **more})
        assert answer.status_code == 200, answer.text[:300]
        self.answers += 1
        self.degraded += answer.json()["mode"] != "hybrid"

    async def over_mcp(self, number: int) -> None:
        params = {
            "name": "memory_search",
            "arguments": {"query": self.query()},
            "_meta": {
                "io.modelcontextprotocol/protocolVersion": MODERN,
                "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1"},
                "io.modelcontextprotocol/clientCapabilities": {},
            },
        }
        headers = {
            "Accept": "application/json, text/event-stream", "MCP-Protocol-Version": MODERN,
            "Mcp-Method": "tools/call", "Mcp-Name": "memory_search",
        }  # fmt: skip
        body = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
        answer = await self.http.post("/mcp", json=body, headers=headers)
        assert answer.status_code == 200, answer.text[:300]
        assert '"hits"' in answer.text, answer.text[:300]


@asynccontextmanager
async def asking(url: str, prepared: Prepared) -> AsyncIterator[Asking]:
    """As the first tenant, whose queries were all asked once: their vectors are in the cache."""
    headers = {"Authorization": f"Bearer {next(iter(prepared.keys.values()))}"}
    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, limits=limits) as http:
        for query in prepared.queries:
            await http.post("/v1/search", json={"query": query})
        yield Asking(http, prepared.queries, random.Random(1))


async def each(call: Callable[[], Awaitable[Any]], rounds: int) -> Times:
    return Times([(await timed(call))[0] for _ in range(rounds)])


async def at_once(call: Callable[[], Awaitable[Any]], clients: int, rounds: int) -> tuple[Times, float]:
    """Latencies of so many clients that ask without a pause, and answers a second of all of them."""
    began = time.perf_counter()
    parts = await asyncio.gather(*(each(call, max(5, rounds // clients)) for _ in range(clients)))
    seconds = time.perf_counter() - began
    values = [value for part in parts for value in part.values]
    return Times(values), len(values) / seconds


def three(times: Times) -> str:
    return " / ".join(f"{times.quantile(q):.1f}" for q in (0.5, 0.95, 0.99))


async def size(rows: int, tenants: int, directory: Path) -> list[str]:
    """The rows of the tables for one server."""
    prepared = await prepare(directory / f"home-{rows}-{tenants}", rows, random.Random(rows), tenants)
    began = time.perf_counter()
    async with server(prepared.home, "--no-worker") as (url, pid):
        ready = time.perf_counter() - began
        async with asking(url, prepared) as tenant:
            cells, rates = [], []
            for clients in CLIENTS:
                times, rate = await at_once(tenant.search, clients, ROUNDS)
                cells.append(three(times))
                rates.append(rate)
            # turn and turn about, so that both see the same machine
            rest, mcp = [], []
            for number in range(FEW):
                rest += (await each(tenant.search, 1)).values
                mcp += (await each(lambda n=number: tenant.over_mcp(n), 1)).values
            ratio = Times(mcp).quantile(0.5) / Times(rest).quantile(0.5)
        memory = rss_mb(pid)
    return [
        f"| {rows:,} in {tenants} | {' | '.join(cells)} | {rates[0]:.0f} / {rates[1]:.0f} / {rates[2]:.0f} "
        f"| {min(rates[2] / max(rates), 1):.2f} | {tenant.degraded / tenant.answers:.1%} | {ratio:.2f} "
        f"| {ready:.1f} s | {memory:.0f} MB |"
    ]


async def vectors(rows: int, directory: Path) -> list[str]:
    """Where a query's vector comes from, over REST and over MCP."""
    prepared, lines = await prepare(directory / "home-vectors", rows, random.Random(9), TENANTS), []
    async with model() as url:
        for source, settings in (
            ("the cache", {}),
            ("the local model, a child process", {}),
            # the vectors that are there are of the local model's space
            ("the same model, a provider over HTTP", {"OPENAI_BASE_URL": url, "EMBED_REVISION": load({}).revision}),
        ):
            async with (
                server(prepared.home, "--no-worker", settings=settings) as (base, _),
                asking(base, prepared) as tenant,
            ):
                tenant.fresh = source != "the cache"
                for protocol, call in (("REST", tenant.search), ("MCP", lambda t=tenant: t.over_mcp(1))):
                    tenant.answers = tenant.degraded = 0
                    cells = [three((await at_once(call, clients, ROUNDS))[0]) for clients in CLIENTS]
                    late = f"{tenant.degraded / tenant.answers:.1%}" if protocol == "REST" else ""
                    lines.append(f"| {source} | {protocol} | {' | '.join(cells)} | {late} |")
    return lines


async def mark(prepared: Prepared) -> None:
    """Tags by which a share of the only tenant's memories can be asked for."""
    settings = load({}, warmstart_home=prepared.home)
    table = await (await lancedb.connect_async(settings.lancedb)).open_table(TABLE)
    ids = (await table.query().select(["id"]).to_arrow())["id"].to_pylist()
    for number, share in enumerate(SELECTIVITIES[1:], 1):
        some = ids[number :: round(1 / share)]
        for start in range(0, len(some), 1_000):
            listed = ", ".join(f"'{i}'" for i in some[start : start + 1_000])
            await table.update(where=f"id IN ({listed})", updates_sql={"source": f"'share-{share:g}'"})
    await table.optimize(cleanup_older_than=timedelta(0))


async def filters(rows: int, directory: Path) -> list[str]:
    prepared = await prepare(directory / "home-filters", rows, random.Random(3), 1)
    await mark(prepared)
    lines = []
    async with server(prepared.home, "--no-worker") as (url, _), asking(url, prepared) as tenant:
        for share in SELECTIVITIES:
            wanted = {} if share == 1 else {"source": f"share-{share:g}"}
            lines.append(f"| {share:.2%} | {three(await each(lambda w=wanted: tenant.search(**w), FEW))} |")
    return lines


async def operations(rows: int, directory: Path) -> list[str]:
    """Without a model: what is left is ours, and the raw call beside it is LanceDB's."""
    prepared = await prepare(directory / "home-operations", rows, random.Random(5), TENANTS)
    key, dice = next(iter(prepared.keys.values())), random.Random(2)
    settings = load({}, warmstart_home=prepared.home)
    made: list[str] = []
    async with (
        server(prepared.home, "--no-worker", settings={"EMBEDDING_ENABLED": "False"}) as (url, _),
        httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=60) as http,
    ):

        async def call(method: str, path: str, body: Any = None) -> Any:
            answer = await http.request(method, path, json=body)
            assert answer.status_code < 300, answer.text[:300]
            return answer.json() if answer.content else None

        async def save() -> None:
            made.append(
                (await call("POST", "/v1/memories", {"content": sentence(dice, 30) + f" {dice.random()}"}))["id"]
            )

        async def batch() -> None:
            await call("POST", "/v1/memories/batch", {
                "memories": [{"content": f"{sentence(dice, 30)} {dice.random()}"} for _ in range(100)]
            })  # fmt: skip

        calls: dict[str, Callable[[], Awaitable[Any]]] = {
            "save": save,
            "edit": lambda: call("PATCH", f"/v1/memories/{dice.choice(made)}", {"content": f"{dice.random()} again"}),
            "get": lambda: call("GET", f"/v1/memories/{dice.choice(made)}"),
            "list, 20": lambda: call("GET", "/v1/memories?limit=20"),
            "recall": lambda: call("GET", "/v1/recall"),
            "context": lambda: call("POST", "/v1/context", {"query": sentence(dice, 6)}),
            "search, words alone": lambda: call("POST", "/v1/search", {"query": sentence(dice, 6)}),
            "delete": lambda: call("DELETE", f"/v1/memories/{made.pop()}"),
            # last: no worker folds so many into the index here, and a search after them reads each
            "batch of 100": batch,
        }
        table = await (await lancedb.connect_async(str(directory / "raw"))).create_table(
            TABLE, schema=schema(settings.space)
        )

        async def raw_add() -> None:
            row = row_of(NewMemory(content=sentence(dice, 30)), "t", datetime.now(UTC))
            await table.add(pa.Table.from_pylist([row], schema=schema(settings.space)))

        await save()
        found = {name: await each(one, FEW if name != "batch of 100" else 10) for name, one in calls.items()}
        raw = await each(raw_add, FEW)
    lines = [f"| {name} | {three(times)} |" for name, times in found.items()]
    ratio = found["save"].quantile(0.5) / raw.quantile(0.5)
    return [
        *lines,
        f"| a raw LanceDB add of one row, not synced | {three(raw)} |",
        f"| **save / raw add, p50** | **{ratio:.1f}** (goal 5) |",
    ]


async def report(rows: Sequence[int]) -> str:
    lines = [
        machine(),
        "",
        "| memories in tenants | 1 client: p50 / p95 / p99 ms | 8 clients | 32 clients | answers a second "
        "| rate at 32 / best (goal 0.9) | an arm late | MCP / REST, p50 (goal 1.3) | start to ready | RSS |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o711)
        for count in rows:
            for tenants in (1, TENANTS):
                lines += await size(count, tenants, Path(name))
        most = max(rows)
        some = min(most, 10_000)
        lines += [
            "",
            f"| the query's vector is from, {some:,} memories in {TENANTS} | over | 1 client: p50 / p95 / p99 ms "
            "| 8 clients | 32 clients | an arm late |",
            "|---|---|---|---|---|---|",
        ]
        lines += await vectors(some, Path(name))
        lines += ["", f"| filter passes, of {most:,} memories of one tenant | p50 / p95 / p99 ms |", "|---|---|"]
        lines += await filters(most, Path(name))
        lines += [
            "",
            f"| operation, without a model, {some:,} memories | p50 / p95 / p99 ms |",
            "|---|---|",
        ]
        lines += await operations(some, Path(name))
    return "\n".join(lines)


@click.command()
@click.option("--rows", default="1000,10000,100000", show_default=True, help="Table sizes, comma-separated.")
@click.option("--write", is_flag=True, help="Put the figures into the README of this folder.")
def main(rows: str, write: bool) -> None:
    """Measure search at more clients, over MCP and with filters, the other operations, and starting."""
    figures = asyncio.run(report([int(n) for n in rows.split(",")]))
    click.echo(figures)
    if write:
        into_readme(MARK, figures)


if __name__ == "__main__":
    main()
