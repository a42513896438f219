"""What a memory is: the records that travel, their limits, and the API they travel through.

Requests are strict: an unknown field or a wrong JSON type is refused, never
coerced. `parse` turns pydantic's findings into one `Invalid` problem.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from warmstart.errors import Invalid

if TYPE_CHECKING:
    from warmstart.exchange import ExportedMemory, Format, ImportResult

MAX_CONTENT: Final = 8_000
MAX_TITLE: Final = 200
MAX_FACTS: Final = 20
MAX_FACT: Final = 300
MAX_TAGS: Final = 20
MAX_TAG: Final = 64
MAX_SOURCE: Final = 200
MAX_METADATA_BYTES: Final = 4_096
MAX_METADATA_DEPTH: Final = 31
#: The one key of `metadata` that is not its user's.
LINKS_KEY: Final = "warmstart:links"
MAX_BATCH: Final = 100
MAX_QUERY: Final = 16_384
MAX_TURNS: Final = 1_000
MAX_CURSOR: Final = 512
MAX_CONTEXT_CHARS: Final = 10_000
DEFAULT_LIMIT: Final = 10
MAX_LIMIT: Final = 50
MAX_PAGE: Final = 200
DEFAULT_PAGE: Final = 50
RRF_K: Final = 60
#: First in both arms: no score can be higher.
MAX_SCORE: Final = 2 / (RRF_K + 1)
TEXT_FORM_CHARS: Final = 400

NAMESPACE_PATTERN: Final = r"^[a-z0-9][a-z0-9._-]{0,63}$"
#: A namespace, or the beginning of several: `code-*`.
NAMESPACES_PATTERN: Final = r"^[a-z0-9][a-z0-9._-]{0,63}\*?$"
ID_PATTERN: Final = r"^mem_[0-9a-hjkmnp-tv-z]{26}$"
DEFAULT_NAMESPACE: Final = "default"

MemoryType = Literal[
    "fact", "decision", "gotcha", "preference", "event",
    "goal", "insight", "relationship", "code", "other",
]  # fmt: skip
MEMORY_TYPES: Final[tuple[str, ...]] = get_args(MemoryType)
EmbeddingStatus = Literal["queued", "ready", "failed"]
Mode = Literal["hybrid", "vector", "keyword", "scan"]

_SURROGATES = re.compile("[\ud800-\udfff]")


def clean_query(value: Any) -> Any:
    """Queries lose NUL and lone surrogates instead of being refused for them."""
    return _SURROGATES.sub("", value).replace("\x00", "") if isinstance(value, str) else value


def _storable(value: str) -> str:
    if "\x00" in value:
        raise ValueError("must not contain NUL characters")
    if _SURROGATES.search(value):
        raise ValueError("must not contain lone surrogates")
    return value


def _instant(value: Any) -> Any:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            raise ValueError("must be an ISO 8601 date and time, such as 2025-06-01T12:00:00Z") from None
    elif not isinstance(value, datetime):
        raise ValueError("must be an ISO 8601 date and time in a string")
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise ValueError("must lie between the years 1 and 9999 in UTC") from None


def _depth(value: Any, most: int = MAX_METADATA_DEPTH) -> int:
    """Levels of nesting, counted to one above `most`."""
    if most < 0 or not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max((_depth(v, most - 1) for v in inner), default=0)


def _metadata(value: dict[str, Any]) -> dict[str, Any]:
    if LINKS_KEY in value:
        raise ValueError(f"must not have the key {LINKS_KEY!r}: `supersedes` is a field of its own")
    if _depth(value) > MAX_METADATA_DEPTH:
        raise ValueError(f"must be nested at most {MAX_METADATA_DEPTH} levels deep")
    try:
        encoded = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ValueError("must be JSON without NaN or infinity") from None
    if _SURROGATES.search(encoded):
        raise ValueError("must not contain lone surrogates")
    size = len(encoded.encode())
    if size > MAX_METADATA_BYTES:
        raise ValueError(f"must be at most {MAX_METADATA_BYTES} bytes of JSON; this has {size}")
    if "\\u0000" in encoded:
        raise ValueError("must not contain NUL characters")
    return value


Storable = AfterValidator(_storable)
Instant = Annotated[datetime, BeforeValidator(_instant), WithJsonSchema({"type": "string", "format": "date-time"})]
Namespace = Annotated[str, Field(pattern=NAMESPACE_PATTERN)]
NamespaceFilter = Annotated[str, Field(pattern=NAMESPACES_PATTERN)]
MemoryId = Annotated[str, Field(pattern=ID_PATTERN)]
Content = Annotated[str, Field(min_length=1, max_length=MAX_CONTENT), Storable]
Title = Annotated[str, Field(min_length=1, max_length=MAX_TITLE), Storable]
Fact = Annotated[str, Field(min_length=1, max_length=MAX_FACT), Storable]
Facts = Annotated[list[Fact], Field(max_length=MAX_FACTS)]
Tag = Annotated[str, Field(min_length=1, max_length=MAX_TAG), Storable]
Tags = Annotated[list[Tag], Field(max_length=MAX_TAGS)]
Importance = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Source = Annotated[str, Field(max_length=MAX_SOURCE), Storable]
Metadata = Annotated[dict[str, Any], AfterValidator(_metadata)]
Query = Annotated[str, BeforeValidator(clean_query), Field(min_length=1, max_length=MAX_QUERY)]
#: As long as a body may be: what goes beyond a query is cut, not refused.
Prompt = Annotated[str, BeforeValidator(clean_query)]
Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT)]
PageLimit = Annotated[int, Field(ge=1, le=MAX_PAGE)]
Cursor = Annotated[str, Field(max_length=MAX_CURSOR)]


class Request(BaseModel):
    """A request: strict types, no unknown field."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class NewMemory(Request):
    content: Content = Field(description="1 to 8,000 characters. One fact, decision or gotcha each.")
    title: Title | None = Field(None, description="The first line where not given.")
    namespace: Namespace = Field(DEFAULT_NAMESPACE, description="Project or topic.")
    type: MemoryType = "fact"
    facts: Facts = Field(default_factory=list, description="Bullets that stand on their own.")
    tags: Tags = Field(default_factory=list)
    entities: Tags = Field(default_factory=list, description="People, services, files, functions.")
    importance: Importance = 0.5
    source: Source = ""
    metadata: Metadata = Field(default_factory=dict)
    occurred_at: Instant | None = Field(None, description="When it happened; now where not given.")
    supersedes: MemoryId | None = Field(None, description="Outdated memory it replaces.")


class Batch(Request):
    memories: Annotated[list[NewMemory], Field(min_length=1, max_length=MAX_BATCH)]

    @model_validator(mode="after")
    def _each_replaced_once(self) -> Batch:
        replaced = [new.supersedes for new in self.memories if new.supersedes is not None]
        if len(replaced) != len(set(replaced)):
            raise ValueError("two memories can't supersede the same one")
        return self


class MemoryPatch(Request):
    content: Content | None = None
    title: Title | None = None
    namespace: Namespace | None = None
    type: MemoryType | None = None
    facts: Facts | None = None
    tags: Tags | None = None
    entities: Tags | None = None
    importance: Importance | None = None
    source: Source | None = None
    metadata: Metadata | None = None
    occurred_at: Instant | None = None

    @model_validator(mode="after")
    def _something(self) -> MemoryPatch:
        if not self.changes():
            raise ValueError("needs at least one field to change")
        return self

    def changes(self) -> dict[str, Any]:
        """The fields given with a value; null means: leave as it is."""
        return {name: value for name in self.model_fields_set if (value := getattr(self, name)) is not None}


def _score_possible(value: float) -> float:
    if value > MAX_SCORE:
        raise ValueError(
            f"can't be above {MAX_SCORE:.5f} (2/61, first in both arms), since no hit ever scores higher; "
            "0.016 keeps every two-arm hit and single-arm hits ranked first or second"
        )
    return value


class SearchRequest(Request):
    query: Query = Field(description="Free text, any language: words, an identifier, an error code.")
    namespace: NamespaceFilter | None = Field(
        None, description="Only this one (code-*: all that begin so); all where not given."
    )
    type: MemoryType | Annotated[list[MemoryType], Field(min_length=1, max_length=len(MEMORY_TYPES))] | None = None
    tags: Tags | None = Field(None, description="Those with all of these.")
    entities: Tags | None = Field(None, description="Those with all of these.")
    source: Source | None = None
    min_importance: Importance | None = None
    occurred_from: Instant | None = Field(None, description="Inclusive.")
    occurred_to: Instant | None = Field(None, description="Exclusive.")
    limit: Limit = DEFAULT_LIMIT
    min_score: Annotated[float, Field(ge=0, allow_inf_nan=False), AfterValidator(_score_possible)] | None = Field(
        None, description="Scores lie between 0.00909 and 0.03279."
    )

    @model_validator(mode="after")
    def _window(self) -> SearchRequest:
        if self.occurred_from and self.occurred_to and self.occurred_from >= self.occurred_to:
            raise ValueError("occurred_from must be before occurred_to")
        return self

    @property
    def types(self) -> list[str]:
        if self.type is None:
            return []
        return [self.type] if isinstance(self.type, str) else list(self.type)


class ListRequest(Request):
    namespace: NamespaceFilter | None = None
    type: MemoryType | None = None
    tag: Tag | None = None
    source: Source | None = None
    occurred_from: Instant | None = Field(None, description="Inclusive.")
    occurred_to: Instant | None = Field(None, description="Exclusive.")
    include_deleted: bool = False
    only_deleted: bool = False
    limit: PageLimit = DEFAULT_PAGE
    cursor: Cursor | None = None


class RecallRequest(Request):
    namespace: NamespaceFilter | None = None
    order: Literal["recency", "importance"] = "recency"
    since: Instant | None = Field(None, description="Created at or after.")
    limit: Limit = DEFAULT_LIMIT
    cursor: Cursor | None = None


class ContextRequest(Request):
    query: Annotated[str, BeforeValidator(clean_query), Field(max_length=MAX_QUERY)]
    namespace: NamespaceFilter | None = None
    token_budget: Annotated[int, Field(ge=1, le=4_000)] = 1_500
    budget_ms: Annotated[int, Field(ge=1, le=5_000)] | None = None
    conversation_id: Annotated[str, Field(min_length=1, max_length=200), Storable] | None = None


class TextBody(Request):
    type: Literal["text"]
    content: Prompt


class Turn(Request):
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Prompt


class MessageBody(Request):
    type: Literal["message"]
    turns: Annotated[list[Turn], Field(max_length=MAX_TURNS)] = Field(description="The last one is the query.")


class JsonBody(Request):
    type: Literal["json"]
    data: Any = Field(description="Its JSON is the query.")


class NewEvent(Request):
    """What happened in a conversation. Its body is used for the retrieval, and not kept."""

    event_id: Annotated[str, Field(min_length=1, max_length=200), Storable] = Field(
        description="Same id, same event: it is recorded once."
    )
    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")] = Field(
        description="Only the kind `prompt` is answered with a block."
    )
    body: Annotated[TextBody | MessageBody | JsonBody, Field(discriminator="type")]
    namespace: NamespaceFilter | None = None
    token_budget: Annotated[int, Field(ge=1, le=4_000)] = 1_500
    budget_ms: Annotated[int, Field(ge=1, le=5_000)] | None = None
    conversation_id: Annotated[str, Field(min_length=1, max_length=200), Storable] | None = None


class HistoryRequest(Request):
    limit: PageLimit = DEFAULT_PAGE
    cursor: Cursor | None = None


class RenameNamespace(Request):
    name: Namespace


class Record(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="ignore")


def _none(value: Any) -> bool:
    return value is None


class Memory(Record):
    id: str
    namespace: str
    type: str
    title: str
    content: str
    facts: list[str]
    tags: list[str]
    entities: list[str]
    importance: float
    source: str
    metadata: dict[str, Any]
    content_hash: str
    embedding_status: EmbeddingStatus
    occurred_at: datetime
    created_at: datetime
    updated_at: datetime
    deleted_at: datetime | None = Field(None, exclude_if=_none)
    expires_at: datetime | None = Field(None, exclude_if=_none)
    supersedes: str | None = Field(None, exclude_if=_none, description="The memory that this one replaces.")
    superseded_by: str | None = Field(
        None, exclude_if=_none, description="The memory that replaces this one: search gives that instead."
    )

    @property
    def etag(self) -> str:
        return f'"{int(self.updated_at.timestamp() * 1_000_000):x}"'


class Version(Record):
    """What a memory was, from `updated_at` until an edit."""

    version: int = Field(description="Counts from 1, the oldest.")
    namespace: str
    type: str
    title: str
    content: str
    facts: list[str]
    tags: list[str]
    entities: list[str]
    importance: float
    source: str
    metadata: dict[str, Any]
    content_hash: str
    occurred_at: datetime
    updated_at: datetime


class History(Record):
    versions: list[Version] = Field(description="Newest first; the memory as it is now is not among them.")
    next_cursor: str | None = None


class Saved(Memory):
    duplicate: bool = False


class BatchItem(Record):
    status: Literal["created", "duplicate"]
    id: str


class BatchResult(Record):
    results: list[BatchItem]
    created: int
    duplicates: int


class Ranks(Record):
    vector: int | None = None
    text: int | None = None


class Hit(Memory):
    score: float | None = None
    ranks: Ranks


class Partial(Record):
    """An answer of what is back so far, where a migration runs."""

    migrated: float | None = Field(
        None,
        exclude_if=_none,
        description="Only while a migration runs: the share of all memories that are back, 0 to 1.",
    )


class SearchResult(Partial):
    hits: list[Hit]
    mode: Mode
    degraded: list[str]
    took_ms: float


class Listing(Partial):
    degraded: list[str] = Field(
        default_factory=list,
        exclude_if=lambda reasons: not reasons,
        description="Only where something is missing: why.",
    )


class Page(Listing):
    memories: list[Memory]
    next_cursor: str | None = None


class Counts(Listing):
    active: int
    trashed: int
    namespaces: dict[str, int] = Field(description="Active memories by namespace.")
    types: dict[str, int] = Field(description="Active memories by type.")


class NamespaceInfo(Record):
    name: str
    active: int
    trashed: int


class Namespaces(Listing):
    namespaces: list[NamespaceInfo]


class NamespaceChange(Record):
    name: str
    memories: int = Field(description="How many memories were renamed or put in the trash.")


class ContextResult(Record):
    context: str
    ids: list[str]
    mode: Mode | None
    latency_ms: float


class EventResult(Record):
    event_id: str
    stored: bool = Field(description="False where the id is known already, or nothing could take it.")
    retrieval: ContextResult | None = Field(description="Null where none was asked for, or the kind has none.")


class DependencyHealth(Record):
    name: str
    status: Literal["ok", "down", "off"]
    detail: str = ""
    since: datetime | None = None


class Health(Record):
    status: Literal["ok", "degraded"]
    mode: Mode = Field(description="The rung a search would be answered from now.")
    degraded: list[str]
    dependencies: list[DependencyHealth]
    queued: int = Field(description="Memories of this tenant that wait for their vector.")
    failed: int
    unindexed_rows: int = Field(description="Rows the full-text index has not folded in; they are found all the same.")
    version: str


class MemoryAPI(Protocol):
    """What a tenant can do: MemoryService in the server, MemoryClient over HTTP."""

    async def save(self, new: NewMemory) -> Saved: ...
    async def save_batch(self, batch: Batch) -> BatchResult: ...
    async def search(self, request: SearchRequest) -> SearchResult: ...
    async def recall(self, request: RecallRequest) -> Page: ...
    async def context(self, request: ContextRequest) -> ContextResult: ...
    async def event(self, event: NewEvent, *, retrieve: bool = False) -> EventResult: ...
    async def get(self, memory_id: str) -> Memory: ...
    async def list(self, request: ListRequest) -> Page: ...
    async def update(self, memory_id: str, patch: MemoryPatch, if_match: str | None = None) -> Memory: ...
    async def delete(self, memory_id: str, *, hard: bool = False, if_match: str | None = None) -> None: ...
    async def restore(self, memory_id: str) -> Memory: ...
    async def history(self, memory_id: str, request: HistoryRequest) -> History: ...
    async def restore_version(self, memory_id: str, version: int, if_match: str | None = None) -> Memory: ...
    async def counts(self) -> Counts: ...
    async def namespaces(self) -> Namespaces: ...
    async def rename_namespace(self, name: str, to: str) -> NamespaceChange: ...
    async def delete_namespace(self, name: str) -> NamespaceChange: ...
    def export(self, form: Format) -> AsyncIterator[bytes]: ...
    async def import_memories(self, memories: Sequence[ExportedMemory]) -> ImportResult: ...
    async def health(self) -> Health: ...


R = TypeVar("R", bound=BaseModel)

#: Faults of form: over MCP these are InvalidParams; all others are results a model can correct.
FORM_FAULTS: Final = frozenset({"missing", "extra_forbidden", "type"})


def parse(model: type[R], data: Any) -> R:
    """`data` (parsed JSON) as `model`, or one `Invalid` that names every fault.

    Each entry of its `errors` has `field`, `problem`, `fault` (`missing`,
    `extra_forbidden`, `type` or `value`) and, where they apply, `limit` and `size`.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = [_fault(e) for e in error.errors(include_url=False)]
        # a union reports each of its branches: keep one line a field
        seen: dict[str, dict[str, Any]] = {}
        for fault in faults:
            kept = seen.setdefault(fault["field"], fault)
            if kept["fault"] == "type" and fault["fault"] == "value":
                seen[fault["field"]] = fault
        # a list was the right branch where the fault lies inside it
        errors = [f for f in seen.values() if not any(other.startswith(f["field"] + ".") for other in seen)]
        first = errors[0]
        detail = "; ".join(f"{e['field'] or 'body'}: {e['problem']}" for e in errors[:5])
        raise Invalid(detail, field=first["field"], errors=errors) from None


def _fault(error: Any) -> dict[str, Any]:
    kind, ctx, value = error["type"], error.get("ctx", {}), error.get("input")
    field = ".".join(str(p) for p in error["loc"] if not (isinstance(p, str) and ("[" in p or p == "literal")))
    fault: dict[str, Any] = {"field": field, "problem": error["msg"].removeprefix("Value error, ")}
    if kind in ("missing", "extra_forbidden"):
        fault["fault"] = kind
    elif (
        kind.endswith("_type")
        or kind == "int_from_float"
        or (kind == "value_error" and "in a string" in error["msg"])
        or (kind == "literal_error" and not isinstance(value, str))
    ):
        fault["fault"] = "type"
    else:
        fault["fault"] = "value"
    for name in ("max_length", "min_length", "le", "ge", "lt", "gt", "pattern", "expected"):
        if name in ctx:
            fault["limit"] = ctx[name]
    if isinstance(value, str | list | dict) and kind != "missing":
        fault["size"] = len(value)
    return fault


def fold(text: str) -> str:
    """NFKC without combining marks, so that "résumé" and "resume" are one word; CJK stays whole."""
    if text.isascii():
        return text
    decomposed = unicodedata.normalize("NFKD", text)
    kept = "".join(c for c in decomposed if not ("\u0300" <= c <= "\u036f"))
    return unicodedata.normalize("NFKC", kept)
