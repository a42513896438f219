"""How answers look: a short text for the model, and the structured content beside it.

What counts: hosts send the model either the text or the structured content.
The text of a search with ten hits stays within `SEARCH_TOKENS`; an id alone
takes 26 of them, so titles are cut and excerpts share what is left, the best
hits first. The structured content repeats the same excerpts, so it costs the
same and its field names. `memory_get` gives a memory whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from pydantic import BaseModel, Field

from warmstart.memory import (
    MAX_CONTENT,
    TEXT_FORM_CHARS,
    DependencyHealth,
    Health,
    History,
    Memory,
    Mode,
    Namespaces,
    Page,
    Ranks,
    Record,
    Saved,
    SearchResult,
    Version,
)

#: What the text of ten hits may cost; a page of more hits gets a tenth of it for each.
SEARCH_TOKENS: Final = 500
#: A title in a list, in any script; `memory_get` shows it whole.
LIST_TITLE_CHARS: Final = 80
LIST_TITLE_TOKENS: Final = 22
#: Earlier texts that one answer gives.
MAX_SHOWN_VERSIONS: Final = 10
#: An excerpt shorter than this tells nothing.
_LEAST_EXCERPT_TOKENS: Final = 4
_ID_TOKENS: Final = 27
#: Characters a token, on the cautious side of what o200k gives for prose and code.
_ASCII_CHARS_PER_TOKEN: Final = 3.6
_OTHER_CHARS_PER_TOKEN: Final = 1.8
_LONGEST_WORD: Final = 20
_ELLIPSIS: Final = "…"


class HitForm(Record):
    id: str
    title: str
    type: str
    namespace: str
    excerpt: str | None = None
    score: float | None = None
    ranks: Ranks


class SearchForm(Record):
    hits: list[HitForm]
    mode: Mode
    degraded: list[str]


class BriefForm(Record):
    id: str
    title: str
    type: str
    namespace: str
    excerpt: str | None = None
    created_at: datetime


class PageForm(Record):
    memories: list[BriefForm]
    next_cursor: str | None = None


class SavedForm(Record):
    id: str
    namespace: str
    duplicate: bool
    embedding_status: str


class UpdatedForm(Record):
    id: str
    updated_at: datetime
    embedding_status: str


class DeletedForm(Record):
    id: str
    hard: bool


class Answer(BaseModel):
    text: str
    structured: Record


def plain(record: Record) -> dict[str, Any]:
    """`record` as JSON without fields that are null; what a user put into `metadata` stays as it is."""
    return record.model_dump(mode="json", exclude_none=True)


def tokens(text: str) -> float:
    """A cautious estimate: a CJK character is a token, other letters share one."""
    ascii_chars = sum(c < "\x80" for c in text)
    wide = sum(c >= "\u2e80" for c in text)
    other = len(text) - ascii_chars - wide
    return ascii_chars / _ASCII_CHARS_PER_TOKEN + other / _OTHER_CHARS_PER_TOKEN + wide


def cut(text: str, chars: int, budget: float = float("inf")) -> str:
    """`text` on one line, at most `chars` characters (the ellipsis is one more) and `budget` tokens."""
    line = " ".join(text.split())
    short = line[:chars]
    while short and tokens(short) > budget:
        short = short[: min(len(short) - 1, int(len(short) * budget / tokens(short)))]
    if short == line:
        return line
    if line[len(short)] != " ":
        short = _whole_words(short)
    return short.rstrip() + _ELLIPSIS


def _whole_words(text: str) -> str:
    """`text` without the start of a word at its end; scripts without blanks are cut anywhere."""
    blank = text.rfind(" ", -_LONGEST_WORD)
    return text[:blank] if blank > 0 else text


def _title(memory: Memory) -> str:
    return cut(memory.title, LIST_TITLE_CHARS, LIST_TITLE_TOKENS)


def excerpts(memories: Sequence[Memory]) -> list[str]:
    """The start of each content, within one token budget for all; better places get more.

    A title that was cut from the content isn't said twice: the excerpt goes on after it.
    """
    budget = SEARCH_TOKENS / 10 * max(10, len(memories)) - 10
    budget -= sum(_ID_TOKENS + tokens(_title(m)) for m in memories)
    weights = [1 / (place + 2) for place in range(len(memories))]
    result = []
    for place, memory in enumerate(memories):
        share = budget * weights[place] / sum(weights[place:])
        text = cut(_after_title(memory), TEXT_FORM_CHARS, share) if share >= _LEAST_EXCERPT_TOKENS else ""
        budget -= tokens(text)
        result.append(text)
    return result


def _after_title(memory: Memory) -> str:
    return memory.content.removeprefix(_title(memory).removesuffix(_ELLIPSIS)).lstrip()


def _block(memory: Memory, excerpt: str, note: str = "") -> str:
    head = f"{memory.id}{note} {_title(memory)}"
    return f"{head}\n{excerpt}" if excerpt else head


def search(result: SearchResult) -> Answer:
    parts = excerpts(result.hits)
    head = f"{len(result.hits) or 'no'} hits, mode {result.mode}"
    if result.degraded:
        head += f", degraded: {', '.join(result.degraded)}"
    if result.migrated is not None:
        head += f" ({result.migrated:.0%} of the memories are back)"
    blocks = [_block(hit, part) for hit, part in zip(result.hits, parts, strict=True)]
    forms = [
        HitForm(
            id=hit.id,
            title=_title(hit),
            type=hit.type,
            namespace=hit.namespace,
            excerpt=part or None,
            score=None if hit.score is None else round(hit.score, 5),
            ranks=hit.ranks,
        )
        for hit, part in zip(result.hits, parts, strict=True)
    ]
    return Answer(
        text="\n".join([head, *blocks]),
        structured=SearchForm(hits=forms, mode=result.mode, degraded=result.degraded),
    )


def page(result: Page) -> Answer:
    parts = excerpts(result.memories)
    listed = list(zip(result.memories, parts, strict=True))
    lines = [_block(m, part, f" {m.created_at:%Y-%m-%d}") for m, part in listed] or ["No memories here."]
    if result.next_cursor:
        lines.append(f"More with cursor {result.next_cursor}")
    forms = [
        BriefForm(
            id=m.id,
            title=_title(m),
            type=m.type,
            namespace=m.namespace,
            excerpt=part or None,
            created_at=m.created_at.replace(microsecond=0),
        )
        for m, part in listed
    ]
    return Answer(text="\n".join(lines), structured=PageForm(memories=forms, next_cursor=result.next_cursor))


def whole(memory: Memory) -> Answer:
    """Everything of a memory that says something: its words first, then what is set."""
    head = f"{memory.id} {memory.type} in {memory.namespace}: {memory.title}"
    facts = "\n".join(f"- {fact}" for fact in memory.facts)
    fields = plain(memory)
    shown = ("id", "type", "namespace", "title", "content", "facts", "content_hash", "embedding_status")
    rest = "\n".join(f"{name}: {value}" for name, value in fields.items() if value and name not in shown)
    text = "\n\n".join(part for part in (head, memory.content, facts, rest) if part)
    return Answer(text=text, structured=memory)


class MemoryWithHistory(Memory):
    history: list[Version]
    more: bool = Field(description="Whether there are older ones.")


def with_history(memory: Memory, history: History) -> Answer:
    """A memory and what it was, newest first: no more words of those than one memory may have."""
    shown: list[Version] = []
    for version in history.versions:
        if shown and sum(len(v.content) for v in [*shown, version]) > MAX_CONTENT:
            break
        shown.append(version)
    more = history.next_cursor is not None or len(shown) < len(history.versions)
    parts = [whole(memory).text] + [
        f"Version {v.version} of {v.updated_at:%Y-%m-%d %H:%M}: {v.title}\n\n{v.content}" for v in shown
    ]
    if not shown:
        parts.append("It was never edited.")
    if more:
        parts.append("Older versions are left out.")
    structured = MemoryWithHistory(**dict(memory), history=shown, more=more)
    return Answer(text="\n\n".join(parts), structured=structured)


def saved(memory: Saved) -> Answer:
    text = f"Already there as {memory.id}." if memory.duplicate else f"Saved as {memory.id}."
    if memory.superseded_by:
        text += f" {memory.superseded_by} superseded it."
    return Answer(text=text, structured=SavedForm.model_validate(memory.model_dump()))


def updated(memory: Memory) -> Answer:
    return Answer(text=f"Updated {memory.id}.", structured=UpdatedForm.model_validate(memory.model_dump()))


def deleted(memory_id: str, hard: bool) -> Answer:
    text = f"Deleted {memory_id} for good." if hard else f"Moved {memory_id} to the trash."
    return Answer(text=text, structured=DeletedForm(id=memory_id, hard=hard))


def namespaces(result: Namespaces) -> Answer:
    lines = [f"{n.name}: {n.active} active, {n.trashed} in the trash" for n in result.namespaces]
    return Answer(text="\n".join(lines) or "No namespaces yet.", structured=result)


def health(result: Health) -> Answer:
    head = f"{result.status}, mode {result.mode}, version {result.version}"
    if result.degraded:
        head += f", degraded: {', '.join(result.degraded)}"
    counts = f"{result.queued} queued, {result.failed} failed, {result.unindexed_rows} not indexed"
    return Answer(text="\n".join([head, *map(_dependency, result.dependencies), counts]), structured=result)


def _dependency(part: DependencyHealth) -> str:
    detail = f" ({part.detail})" if part.detail else ""
    since = f" since {part.since.isoformat(timespec='seconds')}" if part.since else ""
    return f"{part.name}: {part.status}{since}{detail}"
