"""When a prompt gets a block, and when silence: false silence, false speech, and what a block costs.

    python -m loadtests.quality.silence [--json]

The questions of this folder have an answer among its notes; the prompts of
`off-topic.jsonl` and `off-topic-confirm.jsonl` have none (the second was
written after the thresholds were set). Each is asked of a real service with
its embedded parts, with time enough.
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

from loadtests.quality.__main__ import EXTRA, SETS, lines, service
from warmstart.context import count_tokens
from warmstart.logs import configure
from warmstart.memory import MAX_BATCH, Batch, ContextRequest, NewMemory, SearchRequest, parse
from warmstart.service import MemoryService

OFF_TOPIC = {"off-topic": "off-topic.jsonl", "off-topic, confirming": "off-topic-confirm.jsonl"}
BUDGET_MS = 5_000
TRIES = 5
#: What is found is measured, on however busy a machine; how fast is another question.
PATIENT = {
    "context_embed_budget_ms": 5_000,
    "embed_query_budget_ms": 5_000,
    "arm_budget_ms": 5_000,
    "search_budget_ms": 9_000,
}


@dataclass
class Asked:
    kind: str
    #: Of what was given; 0: silence.
    memories: int
    tokens: int
    #: Whether the answer was among it, and among the first ten that a search finds.
    answered: bool = False
    findable: bool = False


async def ask(memory: MemoryService, query: dict[str, Any], keys: dict[str, str]) -> Asked:
    for _ in range(TRIES):
        given = await memory.context(ContextRequest(query=query["query"], budget_ms=BUDGET_MS))
        if given.mode == "hybrid":
            break
    asked = Asked(query["kind"], len(given.ids), count_tokens(given.context) if given.context else 0)
    assert given.mode == "hybrid", given
    if "answer" in query:
        found = await memory.search(SearchRequest(query=query["query"]))
        asked.answered = query["answer"] in [keys[i] for i in given.ids]
        asked.findable = query["answer"] in [keys[h.id] for h in found.hits]
    return asked


async def save(memory: MemoryService, notes: Sequence[dict[str, Any]]) -> dict[str, str]:
    """id → key of each note, once all have their vectors."""
    keys = {}
    for start in range(0, len(notes), MAX_BATCH):
        some = notes[start : start + MAX_BATCH]
        new = [parse(NewMemory, {k: v for k, v in note.items() if k not in EXTRA}) for note in some]
        saved = await memory.save_batch(Batch(memories=new))
        keys |= {result.id: note["key"] for result, note in zip(saved.results, some, strict=True)}
    while (await memory.health()).queued:
        await asyncio.sleep(0.2)
    return keys


async def run() -> dict[str, list[Asked]]:
    count_tokens("")  # loads its vocabulary
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o711)  # the embedded Postgres may run as another user
        async with service(Path(directory) / "home", **PATIENT) as (runtime, _, _):
            memory = runtime.service("quality")
            keys = await save(memory, lines("notes.jsonl"))
            return {
                name: [await ask(memory, query, keys) for query in lines(file)]
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
    rows += [
        "",
        "| prompts without one | n | answered with a block | tokens a prompt, the silent ones too |",
        "|---|---|---|---|",
    ]
    for name in OFF_TOPIC:
        asked = results[name]
        rows.append(_spoken(name, asked))
        for kind in dict.fromkeys(a.kind for a in asked):
            rows.append(_spoken(f"{name}: {kind}", [a for a in asked if a.kind == kind]))
    tokens = sorted(a.tokens for name in SETS for a in results[name] if a.memories)
    median, p90 = tokens[len(tokens) // 2], tokens[len(tokens) * 9 // 10]
    rows += ["", f"Tokens a block (cl100k_base): median {median}, p90 {p90}, most {tokens[-1]}."]
    return "\n".join(rows)


def _spoken(name: str, asked: Sequence[Asked]) -> str:
    mean = sum(a.tokens for a in asked) / len(asked)
    return f"| {name} | {len(asked)} | {share(asked, True):.3f} | {mean:.0f} |"


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
