"""basic-memory: a folder of Markdown notes with front matter, observations and relations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

from warmstart.errors import Invalid
from warmstart.importers.items import Item, Report, instant, slug
from warmstart.importers.markdown import files, front_matter, prose, read_text

_ITEM: Final = re.compile(r"\s*[-*+]\s+(.*)")
#: `[category] text #tag (context)`; a check box or a time in the brackets is none.
_OBSERVATION: Final = re.compile(r"\[([^\[\]()]+)\]\s+(.+)")
_NO_CATEGORY: Final = re.compile(r"[xX]?|\W|\d{1,3}:\d{2}(:\d{2})?([.,]\d{1,3})?( - .*)?")
_RELATION: Final = re.compile(r"(\"[^\"]+\"|'[^']+'|\S+)\s+\[\[([^\[\]]+)\]\]\s*(\(.*\))?\s*")
_LINK: Final = re.compile(r"\[\[([^\[\]]+)\]\]")
_TAG: Final = re.compile(r"(?:^|\s)#([^\s#]+)")
#: In the memory's own fields, so not in its metadata again.
_TAKEN: Final = frozenset({"title", "tags"})


def read(path: Path, namespace: str | None, report: Report) -> Iterator[Item]:
    """A note is one memory, with its whole text; observations are its facts, and what it links to its entities."""
    if not path.is_dir():
        raise Invalid(f"{path} is no folder: name the project's folder, with the notes in it")
    space = namespace or slug(path.resolve().name)
    notes = 0
    for file in files(path):
        if file.suffix != ".md":
            report.leave("files that are no Markdown")
            continue
        try:
            text = read_text(file)
        except Invalid:
            report.leave("notes that are no UTF-8 text, or too large")
            continue
        notes += 1
        yield _note(file, file.relative_to(path).as_posix(), text, space, report)
    if not notes:
        raise Invalid(f"{path} has no Markdown notes in it")


def _note(file: Path, name: str, text: str, namespace: str, report: Report) -> Item:
    fields, body = front_matter(text)
    facts, tags, entities, relations = _semantics(body)
    title = str(fields.get("title") or Path(name).stem)
    created = fields.get("created") or fields.get("date")
    if isinstance(created, date) and not isinstance(created, datetime):
        created = datetime(created.year, created.month, created.day, tzinfo=UTC)
    return Item(
        id=str(fields.get("permalink") or name),
        content=body.strip() or title,
        title=title,
        kind=str(fields.get("type") or "note"),
        namespace=namespace,
        facts=facts,
        tags=[*_tags(fields.get("tags")), *tags],
        entities=entities,
        metadata={k: v for k, v in fields.items() if k not in _TAKEN} | {"file": name, "relations": relations},
        at=instant(created) or instant(file.stat().st_mtime),
    )


def _tags(value: Any) -> list[str]:
    if isinstance(value, str):
        value = value.split(",")
    return [str(tag).strip().lstrip("#") for tag in value] if isinstance(value, list) else []


def _semantics(body: str) -> tuple[list[str], list[str], list[str], list[str]]:
    """Facts, tags, entities and relations. All of them stay in the text, too."""
    facts: list[str] = []
    tags: list[str] = []
    entities: list[str] = []
    relations: list[str] = []
    for line, outside in prose(body):
        if not outside:
            continue
        entities += [target.split("|")[0].strip() for target in _LINK.findall(line)]
        item = _ITEM.match(line.rstrip())
        if item is None:
            continue
        if relation := _RELATION.fullmatch(item[1]):
            relations.append(f"{relation[1].strip(chr(34) + chr(39))} {relation[2]}")
            continue
        observation = _OBSERVATION.match(item[1])
        if observation and not _NO_CATEGORY.fullmatch(observation[1].strip()):
            facts.append(item[1])
            tags += _TAG.findall(observation[2])
    return facts, tags, entities, relations
