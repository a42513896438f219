"""The main job on real input: save the notes and ask the questions through an MCP client; hybrid beside each arm,
and beside the rung of the ladder that is left when the query gets no vector.

    python -m loadtests.quality [--json] [--misses]

Everything runs for real: the service with its embedded parts on a fresh home,
over HTTP, asked by the MCP SDK's own client. The arms alone are read from the
same table after the questions.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import bpe_openai
import click
import httpx2
import uvicorn
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from warmstart.config import load
from warmstart.logs import configure
from warmstart.memory import SearchRequest
from warmstart.runtime import Runtime, open_runtime
from warmstart.search import Budget
from warmstart.store.reads import Reader, filters_of
from warmstart.web.app import create_app
from warmstart.worker import Worker

HERE = Path(__file__).parent
SETS = {"everyday": "queries-everyday.jsonl", "hard": "queries.jsonl"}
ARMS = ("hybrid", "keyword", "vector", "text")
DEPTHS = (1, 5, 10)
DEPTH = max(DEPTHS)
EXTRA = ("key", "lang")
#: What is found is measured here, not how soon: a busy machine must not take an arm away.
PATIENT = {
    "EMBED_QUERY_BUDGET_MS": "20000",
    "ARM_BUDGET_MS": "20000",
    "SEARCH_BUDGET_MS": "40000",
    "EMBED_BATCH_SIZE": "8",
}


def lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


@dataclass
class Asked:
    """The rank at which each arm has the answer (None: not at all), and what the answer cost."""

    query: dict[str, Any]
    ranks: dict[str, int | None] = field(default_factory=dict)
    tokens: int = 0


@asynccontextmanager
async def service(home: Path, **changes: Any) -> AsyncIterator[tuple[Runtime, str, str]]:
    """(runtime, url, key) of a service on `home` with `changes` to its settings, over a real socket."""
    settings = load(PATIENT, warmstart_home=home, **changes)
    async with open_runtime(settings) as runtime:
        while not runtime.bookkeeping.healthy:
            await asyncio.sleep(0.05)
        tenant = await runtime.bookkeeping.create_tenant("quality")
        key = await runtime.bookkeeping.create_key(tenant, "quality", unlimited=True)

        @asynccontextmanager
        async def opened() -> AsyncIterator[Runtime]:
            yield runtime

        with socket.create_server(("127.0.0.1", 0)) as listener:
            server = uvicorn.Server(uvicorn.Config(create_app(opened), log_level="warning", lifespan="on"))
            running = asyncio.create_task(server.serve([listener]))
            worker = asyncio.create_task(Worker(runtime).run())
            yield runtime, f"http://127.0.0.1:{listener.getsockname()[1]}/mcp", key
            worker.cancel()
            with suppress(asyncio.CancelledError):
                await worker
            server.should_exit = True
            await running


@asynccontextmanager
async def mcp_client(url: str, key: str) -> AsyncIterator[Client]:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            httpx2.AsyncClient(headers={"Authorization": f"Bearer {key}"}, timeout=30)
        )
        yield await stack.enter_async_context(Client(streamable_http_client(url, http_client=http)))


async def save_notes(client: Client, notes: Sequence[dict[str, Any]]) -> dict[str, str]:
    """id → key of each note."""
    keys = {}
    for note in notes:
        saved = await client.call_tool("memory_save", {k: v for k, v in note.items() if k not in EXTRA})
        assert saved.structured_content is not None, saved
        keys[saved.structured_content["id"]] = note["key"]
    return keys


async def ask(client: Client, runtime: Runtime, tenant: str, query: dict[str, Any], keys: dict[str, str]) -> Asked:
    asked = Asked(query)
    for arm, ids in (await beside(runtime, tenant, SearchRequest(query=query["query"]))).items():
        asked.ranks[arm] = rank(ids, query, keys)
    found = await client.call_tool("memory_search", {"query": query["query"]})
    assert found.structured_content is not None, found
    assert found.structured_content["mode"] == "hybrid", found.structured_content
    text = "".join(part.text for part in found.content if part.type == "text")
    asked.tokens = len(bpe_openai.get_encoding("o200k_base").encode_ordinary(text))
    asked.ranks["hybrid"] = rank([h["id"] for h in found.structured_content["hits"]], query, keys)
    return asked


async def beside(runtime: Runtime, tenant: str, request: SearchRequest) -> dict[str, list[str]]:
    """The ids that each arm finds without the other: LanceDB's BM25, and plain cosine; and those of the rung
    `keyword`, which is our search when the query's vector is late; asked for first, while no cache has it."""
    search, reader, depth = runtime.search, Reader(runtime.table, tenant), runtime.settings.fetch_depth
    budget = Budget.of(runtime.settings)
    lower = await search.run(tenant, request, replace(budget, embedding=0.0))
    assert lower.mode in ("keyword", "scan"), lower.mode
    filters = filters_of(request)
    words = await search._words(tenant, request.query)
    text = await reader.text_arm(words, filters, depth) if words else []
    values = await runtime.embedder.embed_query(request.query, budget.embedding)
    vector = await reader.vector_arm(values, filters, depth, exact=True)
    return {
        "keyword": [one.id for one in lower.ranked],
        "vector": [c.id for c in vector],
        "text": [c.id for c in text],
    }


def rank(ids: Sequence[str], query: dict[str, Any], keys: dict[str, str]) -> int | None:
    found = [keys.get(i) for i in ids]
    return found.index(query["answer"]) + 1 if query["answer"] in found else None


def hit(asked: Sequence[Asked], arm: str, depth: int) -> float:
    """The share of questions whose answer is among the first `depth`: recall, since each has one answer."""
    return sum((r := a.ranks[arm]) is not None and r <= depth for a in asked) / len(asked)


def mrr(asked: Sequence[Asked], arm: str) -> float:
    """Mean of 1/rank within the first ten."""
    return sum(1 / r for a in asked if (r := a.ranks[arm]) and r <= DEPTH) / len(asked)


def ndcg(asked: Sequence[Asked], arm: str) -> float:
    """nDCG@10 where each question has one answer."""
    return sum(1 / math.log2(1 + r) for a in asked if (r := a.ranks[arm]) and r <= DEPTH) / len(asked)


def figures(asked: Sequence[Asked]) -> dict[str, dict[str, float]]:
    """By arm, by measure."""
    return {
        arm: {f"recall@{d}": hit(asked, arm, d) for d in DEPTHS} | {"MRR": mrr(asked, arm), "nDCG@10": ndcg(asked, arm)}
        for arm in ARMS
    }


def report(results: dict[str, list[Asked]]) -> str:
    """A markdown table, by set and by kind of question."""
    rows = ["| questions | n | arm | recall@1 | @5 | @10 | MRR | nDCG@10 |", "|---|---|---|---|---|---|---|---|"]
    for name, asked in results.items():
        kinds = sorted({a.query["kind"] for a in asked})
        more = [] if len(kinds) < 2 else [(f"{name}: {k}", [a for a in asked if a.query["kind"] == k]) for k in kinds]
        for label, some in [(name, asked), *more]:
            for arm, measured in figures(some).items():
                shown = " | ".join(f"{value:.3f}" for value in measured.values())
                rows.append(f"| {label} | {len(some)} | {arm} | {shown} |")
    every = [a for asked in results.values() for a in asked]
    costs = sorted(a.tokens for a in every)
    rows += ["", f"Tokens a search (o200k, text form, 10 hits): median {costs[len(costs) // 2]}, most {costs[-1]}."]
    return "\n".join(rows)


def as_json(results: dict[str, list[Asked]]) -> str:
    tokens = {name: sum(a.tokens for a in asked) / len(asked) for name, asked in results.items()}
    return json.dumps({"figures": {name: figures(asked) for name, asked in results.items()}, "tokens_a_search": tokens})


async def answers(
    memories: Sequence[dict[str, Any]], sets: Mapping[str, Sequence[dict[str, Any]]]
) -> dict[str, list[Asked]]:
    """What becomes of each set's questions, in a service that has these memories alone."""
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)  # the embedded Postgres may run as another user
        async with service(Path(directory) / "home") as (runtime, url, key), mcp_client(url, key) as client:
            tenant = (await runtime.keys.identify(key)).user_id
            keys = await save_notes(client, memories)
            while (await runtime.service(tenant).health()).queued:
                await asyncio.sleep(0.2)
            return {
                name: [await ask(client, runtime, tenant, question, keys) for question in questions]
                for name, questions in sets.items()
            }


async def run() -> dict[str, list[Asked]]:
    return await answers(lines("notes.jsonl"), {name: lines(file) for name, file in SETS.items()})


def show(results: dict[str, list[Asked]], *, program: bool, misses: bool) -> None:
    if program:
        print(as_json(results))
        return
    print(report(results))
    for name, asked in results.items() if misses else ():
        for a in asked:
            if (a.ranks["hybrid"] or 99) > 5:
                print(f"{name} {a.ranks} {a.query['query']!r} → {a.query['answer']}")


@click.command()
@click.option("--json", "program", is_flag=True, help="The figures as one JSON object.")
@click.option("--misses", is_flag=True, help="List the questions whose answer is not among the first five.")
def main(program: bool, misses: bool) -> None:
    """Measure retrieval on the notes of this folder."""
    configure("error", "console")
    show(asyncio.run(run()), program=program, misses=misses)


if __name__ == "__main__":
    main()
