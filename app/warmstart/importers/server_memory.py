"""@modelcontextprotocol/server-memory: a graph as JSONL, one entity or relation a line."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from warmstart.errors import Invalid
from warmstart.importers.items import Item, Report
from warmstart.memory import DEFAULT_NAMESPACE

#: The server itself holds its whole file in memory; a larger one is something else.
MAX_FILE: Final = 256 << 20


def read(path: Path, namespace: str | None, report: Report) -> Iterator[Item]:
    """An entity with its observations and what it relates to is one memory; so is a relation from nowhere."""
    entities, relations = _graph(path, report)
    space = namespace or DEFAULT_NAMESPACE
    for name, entity in entities.items():
        outgoing = relations.pop(name, [])
        observations = [str(o) for o in entity.get("observations") or []]
        kind = str(entity.get("entityType") or "")
        lines = [f"{name} ({kind})" if kind else name]
        lines += [f"- {observation}" for observation in observations]
        lines += [f"- {name} {relation} {to}" for relation, to in outgoing]
        yield Item(
            id=f"entity/{name}",
            content="\n".join(lines),
            title=name,
            namespace=space,
            facts=[o for o in observations if len(o) <= 300][:20],
            tags=[kind] if kind else [],
            entities=[name, *(to for _, to in outgoing)][:20],
        )
    for name, outgoing in relations.items():
        for relation, to in outgoing:
            yield Item(
                id=f"relation/{name}/{relation}/{to}",
                content=f"{name} {relation} {to}",
                kind="relationship",
                namespace=space,
                entities=[name, to],
            )


def _graph(path: Path, report: Report) -> tuple[dict[str, Any], dict[str, list[tuple[str, str]]]]:
    if not path.is_file():
        raise Invalid(f"{path} is no file: name the graph's file (memory.jsonl, MEMORY_FILE_PATH)")
    if path.stat().st_size > MAX_FILE:
        raise Invalid(f"{path} is over {MAX_FILE} bytes")
    entities: dict[str, Any] = {}
    relations: dict[str, list[tuple[str, str]]] = defaultdict(list)
    known = 0
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            kind = found.get("type") if isinstance(found, dict) else None
            if kind == "entity" and isinstance(found.get("name"), str):
                if found["name"] in entities:
                    report.leave("entities of a name that was there before")
                entities.setdefault(found["name"], found)
            elif kind == "relation" and all(isinstance(found.get(k), str) for k in ("from", "to", "relationType")):
                relations[found["from"]].append((found["relationType"], found["to"]))
            else:
                report.leave("lines that are no entity and no relation")
                continue
            known += 1
    if not known and report.left:
        raise Invalid(f"{path} has no entity and no relation: expected a graph as JSONL")
    return entities, dict(relations)
