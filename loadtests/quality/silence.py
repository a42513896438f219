"""When a prompt gets a block, and when silence: false silence, false speech, and what a block costs.

    python -m loadtests.quality.silence [--json]

The questions of this folder have an answer among its notes; the prompts of
`off-topic.jsonl` and `off-topic-confirm.jsonl` have none (the second was
written after the thresholds were set). Each is asked of a real service over
HTTP, as a hook does, without its time budget.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from loadtests.quality.__main__ import SETS, lines, mcp_client, save_notes, service
from warmstart.context import count_tokens
from warmstart.logs import configure

OFF_TOPIC = {"off-topic": "off-topic.jsonl", "off-topic, confirming": "off-topic-confirm.jsonl"}
BUDGET_MS = 5_000


@dataclass
class Asked:
    kind: str
    #: Of what was given; 0: silence.
    memories: int
    tokens: int
    #: Whether the answer was among it, and among the first ten that a search finds.
    answered: bool = False
    findable: bool = False


async def ask(client: httpx.AsyncClient, query: dict[str, Any], keys: dict[str, str]) -> Asked:
    given = (await client.post("/v1/context", json={"query": query["query"], "budget_ms": BUDGET_MS})).json()
    asked = Asked(query["kind"], len(given["ids"]), count_tokens(given["context"]) if given["context"] else 0)
    if "answer" in query:
        found = (await client.post("/v1/search", json={"query": query["query"]})).json()
        asked.answered = query["answer"] in [keys[i] for i in given["ids"]]
        asked.findable = query["answer"] in [keys[h["id"]] for h in found["hits"]]
    return asked


async def run() -> dict[str, list[Asked]]:
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)  # the embedded Postgres may run as another user
        async with service(Path(directory) / "home") as (runtime, url, key):
            tenant = (await runtime.keys.identify(key)).user_id
            async with mcp_client(url, key) as client:
                keys = await save_notes(client, lines("notes.jsonl"))
            while (await runtime.service(tenant).health()).queued:
                await asyncio.sleep(0.2)
            headers = {"Authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=url.removesuffix("/mcp"), headers=headers, timeout=30) as http:
                return {
                    name: [await ask(http, query, keys) for query in lines(file)]
                    for name, file in (SETS | OFF_TOPIC).items()
                }


def share(asked: Sequence[Asked], spoke: bool) -> float:
    return sum(bool(a.memories) is spoke for a in asked) / len(asked)


def report(results: dict[str, list[Asked]]) -> str:
    rows = ["| questions with an answer | n | silent | of answers a search finds, given | memories a block |"]
    rows.append("|---|---|---|---|---|")
    for name in SETS:
        asked = results[name]
        findable = [a for a in asked if a.findable]
        kept = sum(a.answered for a in findable)
        spoke = [a for a in asked if a.memories]
        mean = sum(a.memories for a in spoke) / len(spoke)
        rows.append(f"| {name} | {len(asked)} | {share(asked, False):.3f} | {kept} of {len(findable)} | {mean:.1f} |")
    rows += ["", "| prompts without one | n | answered with a block |", "|---|---|---|"]
    for name in OFF_TOPIC:
        asked = results[name]
        rows.append(f"| {name} | {len(asked)} | {share(asked, True):.3f} |")
        for kind in dict.fromkeys(a.kind for a in asked):
            some = [a for a in asked if a.kind == kind]
            rows.append(f"| {name}: {kind} | {len(some)} | {share(some, True):.3f} |")
    tokens = sorted(a.tokens for name in SETS for a in results[name] if a.memories)
    median, p90 = tokens[len(tokens) // 2], tokens[len(tokens) * 9 // 10]
    rows += ["", f"Tokens a block (cl100k_base): median {median}, p90 {p90}, most {tokens[-1]}."]
    return "\n".join(rows)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Every answer as one JSON object.")
def main(as_json: bool) -> None:
    """Measure when the memory speaks at a prompt."""
    configure("warning", "console")
    results = asyncio.run(run())
    print(
        json.dumps({name: [vars(a) for a in asked] for name, asked in results.items()}) if as_json else report(results)
    )


if __name__ == "__main__":
    main()
