"""The `memories` table: its 21 columns, its indices, and a row's derived values; the columns of `memory_history`."""

from __future__ import annotations

import hashlib
import os
import time
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from warmstart.config import Space
from warmstart.memory import MAX_TITLE, NewMemory
from warmstart.store import links
from warmstart.store.links import Links, links_of
from warmstart.store.stop_words import STOP_WORDS
from warmstart.terms import search_text

TABLE: Final = "memories"
#: The name that the engine gives the full-text index.
TEXT_INDEX: Final = "search_text_idx"
#: The table of earlier texts.
HISTORY: Final = "memory_history"
#: The table's own setting: the space its vectors belong to.
SPACE_KEY: Final = b"warmstart.space"
TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_STRINGS: Final = pa.list_(pa.string())
_CROCKFORD: Final = "0123456789abcdefghjkmnpqrstvwxyz"

Row = dict[str, Any]


@lru_cache(maxsize=8)
def schema(space: Space) -> pa.Schema:
    """The Arrow schema for vectors of `space`, which is kept in the schema's metadata."""

    def required(name: str, kind: pa.DataType) -> pa.Field:
        return pa.field(name, kind, nullable=False)

    return pa.schema(
        [
            required("id", pa.string()),
            required("user_id", pa.string()),
            required("namespace", pa.string()),
            required("type", pa.string()),
            required("title", pa.string()),
            required("content", pa.string()),
            required("facts", _STRINGS),
            required("tags", _STRINGS),
            required("entities", _STRINGS),
            required("importance", pa.float32()),
            required("source", pa.string()),
            required("metadata", pa.string()),
            required("search_text", pa.string()),
            required("content_hash", pa.string()),
            pa.field("embedding", pa.list_(pa.float32(), space.dim)),
            required("embedding_status", pa.string()),
            required("occurred_at", TIMESTAMP),
            required("created_at", TIMESTAMP),
            required("updated_at", TIMESTAMP),
            pa.field("deleted_at", TIMESTAMP),
            pa.field("expires_at", TIMESTAMP),
        ],
        metadata={SPACE_KEY: space.to_json().encode()},
    )


COLUMNS: Final = tuple(schema(Space("", "", 1, "", "")).names)
#: What a caller may see of a row, and the tenant it is checked by.
SHOWN: Final = [c for c in COLUMNS if c not in ("search_text", "embedding")]
#: What an edit can change, and so what history keeps of a memory.
EDITABLE: Final = (
    "namespace", "type", "title", "content", "facts", "tags", "entities", "importance", "source", "metadata",
    "occurred_at",
)  # fmt: skip
BTREE_COLUMNS: Final = ("user_id", "id", "content_hash")
#: `icu` keeps identifiers whole and segments Chinese, Japanese and Thai; the parts are in `search_text`.
FTS_OPTIONS: Final[dict[str, Any]] = {
    "base_tokenizer": "icu",
    "language": "English",
    "stem": True,
    "remove_stop_words": True,
    "custom_stop_words": sorted(STOP_WORDS),
    "ascii_folding": True,
    "lower_case": True,
    "max_token_length": 128,
    "with_position": False,
}


@lru_cache(maxsize=1)
def history_schema() -> pa.Schema:
    """A row is what a memory was until an edit: `updated_at` is when it became so, `version` counts from 1."""
    memories = schema(Space("", "", 1, "", ""))
    return pa.schema(
        [
            pa.field("memory_id", pa.string(), nullable=False),
            memories.field("user_id"),
            pa.field("version", pa.int64(), nullable=False),
            *(memories.field(name) for name in (*EDITABLE, "content_hash", "updated_at")),
        ]
    )


HISTORY_COLUMNS: Final = tuple(history_schema().names)


def now() -> datetime:
    return datetime.now(UTC)


def at_us(microseconds: int) -> datetime:
    """The time so long after 1970, exactly. Raises OverflowError."""
    return _EPOCH + timedelta(microseconds=microseconds)


def new_id() -> str:
    """`mem_` and a UUIDv7 in Crockford base32: ids of later milliseconds sort later."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return "mem_" + "".join(_CROCKFORD[value >> shift & 31] for shift in range(125, -5, -5))


def content_hash(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def title_of(content: str) -> str:
    """The first line that says something, cut to a title's length."""
    line = next((stripped for raw in content.splitlines() if (stripped := raw.strip())), "")
    return (line or content.strip() or content)[:MAX_TITLE]


def derived(row: Row) -> dict[str, str]:
    """The columns that follow from the others; what another memory replaces has nothing to be found by."""
    hashed = content_hash(row["content"])
    if links_of(row["metadata"]).superseded_by is not None:
        return {"content_hash": hashed, "search_text": ""}
    text = search_text(row["title"], row["content"], row["facts"], row["tags"], row["entities"], row["type"])
    return {"content_hash": hashed, "search_text": text}


def as_float32(value: float) -> float:
    """`value` as the table keeps it, so that what is compared is what is stored."""
    return float(np.float32(value))


def row_of(new: NewMemory, user_id: str, at: datetime) -> Row:
    """A new row without a vector."""
    row: Row = {
        "id": new_id(),
        "user_id": user_id,
        "namespace": new.namespace,
        "type": new.type,
        "title": new.title or title_of(new.content),
        "content": new.content,
        "facts": list(new.facts),
        "tags": list(new.tags),
        "entities": list(new.entities),
        "importance": as_float32(new.importance),
        "source": new.source,
        "metadata": links.join(new.metadata, Links(supersedes=new.supersedes)),
        "embedding": None,
        "embedding_status": "queued",
        "occurred_at": new.occurred_at or at,
        "created_at": at,
        "updated_at": at,
        "deleted_at": None,
        "expires_at": None,
    }
    return row | derived(row)
