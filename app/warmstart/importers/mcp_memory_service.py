"""mcp-memory-service: its SQLite database, or the JSON that its exporter writes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import ijson

from warmstart.errors import Invalid
from warmstart.importers.items import Item, Report, instant, slug
from warmstart.importers.own import fault

_SQLITE: Final = b"SQLite format 3\x00"
_BATCH: Final = 200


def read(path: Path, namespace: str | None, report: Report) -> Iterator[Item]:
    if not path.is_file():
        raise Invalid(f"{path} is no file: name the database (sqlite_vec.db), or a JSON export of it")
    with path.open("rb") as file:
        is_database = file.read(len(_SQLITE)) == _SQLITE
    rows = _of_database(path, report) if is_database else _of_json(path)
    for row in rows:
        if not isinstance(row.get("content"), str) or not row.get("content_hash"):
            report.leave("no memory: without content or content_hash")
            continue
        yield _item(row, namespace)


def _item(row: dict[str, Any], namespace: str | None) -> Item:
    store = row.get("store") or "default"
    metadata = row.get("metadata")
    metadata = dict(metadata) if isinstance(metadata, dict) else {}
    importance = metadata.get("importance", metadata.get("importance_score"))
    return Item(
        id=f"{store}/{row['content_hash']}" if store != "default" else str(row["content_hash"]),
        content=row["content"],
        kind=str(row.get("memory_type") or "fact"),
        namespace=namespace or slug(str(store)),
        tags=_tags(row.get("tags")),
        importance=importance if isinstance(importance, int | float) and 0 <= importance <= 1 else None,
        metadata=metadata,
        at=instant(row.get("created_at")),
    )


def _tags(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(tag) for tag in value]
    return [tag.strip() for tag in value.split(",") if tag.strip()] if isinstance(value, str) else []


def _of_database(path: Path, report: Report) -> Iterator[dict[str, Any]]:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            database.row_factory = sqlite3.Row
            yield from _rows(database, report)
    except sqlite3.Error as error:
        raise Invalid(f"{path} can't be read as a database of mcp-memory-service: {error}") from None


def _rows(database: sqlite3.Connection, report: Report) -> Iterator[dict[str, Any]]:
    have = {row["name"] for row in database.execute("PRAGMA table_info(memories)")}
    if not {"content", "content_hash"} <= have:
        raise sqlite3.DatabaseError("it has no table of memories")
    if "deleted_at" in have:
        [gone] = database.execute("SELECT count(*) FROM memories WHERE deleted_at IS NOT NULL").fetchone()
        report.leave("deleted there", gone)
    if database.execute("SELECT 1 FROM sqlite_master WHERE name = 'memory_graph'").fetchone():
        [edges] = database.execute("SELECT count(*) FROM memory_graph").fetchone()
        report.leave("associations between memories (its graph)", edges)
    wanted = ["content", "content_hash", "tags", "memory_type", "metadata", "created_at", "store"]
    columns = ", ".join(name for name in wanted if name in have)  # names of our own list
    alive = "WHERE deleted_at IS NULL" if "deleted_at" in have else ""
    for row in database.execute(f"SELECT {columns} FROM memories {alive} ORDER BY rowid"):  # noqa: S608
        found = dict(row)
        try:
            found["metadata"] = json.loads(found.get("metadata") or "{}")
        except ValueError:
            report.leave("its own metadata: too large, or no JSON")
            found["metadata"] = {}
        yield found


def _of_json(path: Path) -> Iterator[dict[str, Any]]:
    some = False
    try:
        with path.open("rb") as file:
            for row in ijson.items(file, "memories.item", use_float=True):
                some = True
                yield row if isinstance(row, dict) else {}
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} can't be read as an export of mcp-memory-service: {fault(error)}") from None
    if not some:
        raise Invalid(f"{path} has no memories: expected {{'export_metadata': …, 'memories': […]}}")
