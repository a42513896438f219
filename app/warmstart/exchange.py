"""The export's format, version 1: what a memory looks like in it, read as strictly as a save.

NDJSON: a header, then one memory a line. JSON: the header's object with the memories in `memories`.
docs/export.schema.json is made from these models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import ConfigDict, Field, model_validator

from warmstart.memory import (
    Content,
    Facts,
    Importance,
    Instant,
    MemoryId,
    MemoryType,
    Metadata,
    Namespace,
    Record,
    Request,
    Source,
    Tags,
    Title,
)

SCHEMA: Final = "warmstart/export/1"
#: Earlier texts kept of a memory. With all of them at their largest a memory still fits into one chunk of an import.
MAX_VERSIONS: Final = 50
#: Of one request of an import: bytes, and memories.
MAX_CHUNK: Final = 8 << 20
MAX_CHUNK_MEMORIES: Final = 1_000
#: What became of a memory is told one by one up to here; the counts have the rest.
MAX_NOTES: Final = 100

Format = Literal["json", "ndjson"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Text(Request):
    """What an edit can change."""

    namespace: Namespace
    type: MemoryType
    title: Title
    content: Content
    facts: Facts
    tags: Tags
    entities: Tags
    importance: Importance
    source: Source
    metadata: Metadata
    content_hash: Sha256 = Field(description="SHA-256 of `content` in UTF-8, in hex.")
    occurred_at: Instant
    updated_at: Instant

    @model_validator(mode="after")
    def _whole(self) -> _Text:
        if hashlib.sha256(self.content.encode()).hexdigest() != self.content_hash:
            raise ValueError("content_hash is not that of content: the file was changed or damaged")
        return self


class ExportedVersion(_Text):
    """What a memory was, from `updated_at` until an edit."""

    version: Annotated[int, Field(ge=1, le=1_000_000_000, description="Counts from 1, the oldest.")]


class ExportedMemory(_Text):
    """One memory. Vectors aren't carried: they are made anew."""

    id: MemoryId
    created_at: Instant
    deleted_at: Instant | None = Field(None, description="Since when it is in the trash; left out where it is not.")
    expires_at: Instant | None = Field(None, description="Until when it can be restored from there.")
    supersedes: MemoryId | None = Field(None, description="The memory that this one replaced.")
    superseded_by: MemoryId | None = Field(None, description="The memory that replaces this one in search.")
    history: Annotated[list[ExportedVersion], Field(max_length=MAX_VERSIONS)] = Field(
        default_factory=list, description="What it was before its edits, newest first; left out where there were none."
    )

    @model_validator(mode="after")
    def _consistent(self) -> ExportedMemory:
        if (self.deleted_at is None) != (self.expires_at is None):
            raise ValueError("deleted_at and expires_at go together: a memory is in the trash or it is not")
        if self.deleted_at and self.expires_at and self.expires_at < self.deleted_at:
            raise ValueError("expires_at must not be before deleted_at")
        if self.id in (self.supersedes, self.superseded_by):
            raise ValueError("a memory can't supersede itself")
        numbers = [version.version for version in self.history]
        if numbers != sorted(set(numbers), reverse=True):
            raise ValueError("history must have each version once, newest first")
        return self


class Header(Request):
    """The first line of an NDJSON export."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, populate_by_name=True)

    schema_: Literal["warmstart/export/1"] = Field(alias="schema")
    exported_at: Instant
    count: Annotated[int, Field(ge=0)] = Field(description="How many memories follow: fewer, and it was cut short.")


class Export(Header):
    """A JSON export."""

    memories: Annotated[list[ExportedMemory], Field(max_length=MAX_CHUNK_MEMORIES)]


class ExportQuery(Request):
    format: Format = Field("json", description="One JSON object, or a header and one memory a line.")


class ImportNote(Record):
    id: str = Field(description="In the export.")
    outcome: Literal["renamed", "duplicate", "differs"]
    other: str | None = Field(None, description="The new id, or that of the memory that has the content already.")


class ImportResult(Record):
    """What became of the memories of one request; each is in one of the first four counts."""

    created: int = 0
    unchanged: int = Field(0, description="Were there already, as they are in the export.")
    duplicates: int = Field(0, description="Left out: another active memory has the content already.")
    differing: int = Field(0, description="Left as they are: edited, deleted or restored here since the export.")
    renamed: int = Field(0, description="Of those created: with a new id, since another tenant has theirs.")
    notes: list[ImportNote] = Field(default_factory=list, description=f"The first {MAX_NOTES} that need a word.")

    def add(self, other: ImportResult) -> None:
        for name in ("created", "unchanged", "duplicates", "differing", "renamed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes += other.notes[: MAX_NOTES - len(self.notes)]


def lines_of(memories: Sequence[ExportedMemory]) -> bytes:
    """NDJSON without a header."""
    return b"".join(memory.model_dump_json(exclude_none=True).encode() + b"\n" for memory in memories)


def json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of both forms."""
    schema = Export.model_json_schema(by_alias=True)
    header = Header.model_json_schema(by_alias=True)
    definitions = schema.pop("$defs")
    del schema["properties"]["memories"]["maxItems"]  # a limit of one request, not of the format
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://warmstart.invalid/schemas/export-1.json",
        "title": "Warmstart export, version 1",
        "description": (
            "A JSON export is one `document`. An NDJSON export has a `header` as its first line and one `memory` on "
            "each further line. Times are ISO 8601 in UTC, with microseconds where they have any."
        ),
        "anyOf": [{"$ref": "#/$defs/document"}, {"$ref": "#/$defs/header"}, {"$ref": "#/$defs/memory"}],
        "$defs": {
            **definitions,
            "document": schema,
            "header": header,
            "memory": {"$ref": "#/$defs/ExportedMemory"},
        },
    }
