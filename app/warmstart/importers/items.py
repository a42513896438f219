"""From what other memories keep to what this one saves, with a count of what does not fit."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from warmstart.errors import Invalid
from warmstart.memory import (
    DEFAULT_NAMESPACE,
    MAX_CONTENT,
    MAX_FACT,
    MAX_FACTS,
    MAX_TAG,
    MAX_TAGS,
    MAX_TITLE,
    MEMORY_TYPES,
    NewMemory,
    parse,
)

#: The key of `metadata` that says where a memory came from: `id` there, and a `hash` of what was carried.
ORIGIN: Final = "import"
_UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
#: What other memories call their kinds.
_KINDS: Final = {
    "observation": "fact", "note": "fact", "reference": "fact", "learning": "insight", "pattern": "insight",
    "error": "gotcha", "bug": "gotcha", "task": "goal", "requirement": "goal", "person": "relationship",
}  # fmt: skip


@dataclass(slots=True)
class Report:
    """What was not carried over, by reason."""

    left: Counter[str] = field(default_factory=Counter)

    def leave(self, reason: str, count: int = 1) -> None:
        if count > 0:
            self.left[reason] += count


@dataclass(frozen=True, slots=True)
class Item:
    """One thing of the source: `id` is its name there, the same each time it is read."""

    id: str
    content: str
    title: str = ""
    kind: str = "fact"
    namespace: str = DEFAULT_NAMESPACE
    facts: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    entities: list[str] = field(default_factory=list)
    importance: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    at: datetime | None = None


def memories(items: Iterable[Item], source: str, report: Report) -> Iterator[NewMemory]:
    """What is to be saved: a text that is too long in parts, all else within its limits."""
    for item in items:
        parts = split_text(_clean(item.content, report))
        if not parts:
            report.leave("nothing in it")
            continue
        if len(parts) > 1:
            report.leave(f"longer than {MAX_CONTENT} characters: carried in parts")
        for number, part in enumerate(parts, 1):
            yield _memory(item, part, number, len(parts), source, report)


def _memory(item: Item, content: str, number: int, parts: int, source: str, report: Report) -> NewMemory:
    title = " ".join(_clean(item.title, report).split())
    suffix = f" ({number} of {parts})" if title and parts > 1 else ""
    fields: dict[str, Any] = {
        "content": content,
        "title": title[: MAX_TITLE - len(suffix)].rstrip() + suffix or None,
        "namespace": item.namespace,
        "type": kind_of(item.kind),
        "facts": _words(item.facts, MAX_FACTS, MAX_FACT, "facts", report) if number == 1 else [],
        "tags": _words(item.tags, MAX_TAGS, MAX_TAG, "tags", report),
        "entities": _words(item.entities, MAX_TAGS, MAX_TAG, "entities", report),
        "source": source,
        "metadata": _metadata(item, f"{item.id}#{number}" if parts > 1 else item.id, content, report),
    }
    if item.importance is not None:
        fields["importance"] = min(1.0, max(0.0, float(item.importance)))
    if item.at is not None:
        fields["occurred_at"] = item.at.isoformat()
    return parse(NewMemory, {name: value for name, value in fields.items() if value is not None})


def _metadata(item: Item, source_id: str, content: str, report: Report) -> dict[str, Any]:
    digest = hashlib.sha256(f"{item.title}\0{content}".encode()).hexdigest()[:16]
    # a name of any length may be one; the same name gives the same id
    if len(source_id) > 200:
        source_id = source_id[:150] + hashlib.sha256(source_id.encode()).hexdigest()[:32]
    origin = {ORIGIN: {"id": source_id, "hash": digest}}
    rest = {name: value for name, value in item.metadata.items() if value not in (None, "", [], {})}
    if kind_of(item.kind) != item.kind:
        rest["type"] = item.kind[:MAX_TAG]
    try:
        rest = json.loads(_clean(json.dumps(rest, ensure_ascii=False, allow_nan=False, default=str), Report()))
        return dict(parse(NewMemory, {"content": "-", "metadata": origin | rest}).metadata)
    except (Invalid, ValueError):
        report.leave("its own metadata: too large, or no JSON")
        return origin


def kind_of(kind: str) -> str:
    found = _KINDS.get(kind.lower(), kind.lower())
    return found if found in MEMORY_TYPES else "other"


def slug(name: str) -> str:
    """`name` as a namespace."""
    found = re.sub(r"[^a-z0-9._-]+", "-", name.lower()).strip("-._")[:64].rstrip("-")
    return found or DEFAULT_NAMESPACE


def instant(value: Any) -> datetime | None:
    """Seconds since 1970, or ISO 8601; None for what is neither."""
    try:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except (ValueError, OverflowError, OSError):
        pass
    return None


def split_text(text: str) -> list[str]:
    """`text` in parts of at most MAX_CONTENT characters, cut at paragraphs, else lines, else blanks, else anywhere."""
    parts = []
    while len(text) > MAX_CONTENT:
        cut = MAX_CONTENT
        for mark in ("\n\n", "\n", " "):
            at = text.rfind(mark, MAX_CONTENT // 2, MAX_CONTENT)
            if at > 0:
                cut = at + len(mark)
                break
        parts.append(text[:cut])
        text = text[cut:]
    return [part for part in [*parts, text] if part.strip()]


def _words(values: Iterable[str], most: int, longest: int, what: str, report: Report) -> list[str]:
    """At most so many, each at most so long; those that are cut, or too many, are in the content as well or lost."""
    words = list(dict.fromkeys(word for value in values if (word := " ".join(_clean(str(value), report).split()))))
    report.leave(f"{what} over the {most} a memory has", len(words) - most)
    kept = words[:most]
    report.leave(f"{what} cut to {longest} characters", sum(len(word) > longest for word in kept))
    return list(dict.fromkeys(word[:longest] for word in kept))


def _clean(text: str, report: Report) -> str:
    """Without what no memory may hold."""
    found, count = _UNSTORABLE.subn("", text)
    report.leave("characters that can't be kept (NUL, lone surrogates)", count)
    return found
