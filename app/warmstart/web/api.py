"""The REST operations: one table that routes requests and writes the OpenAPI document."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, Final, Literal

from pydantic import BaseModel, Field
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from warmstart.errors import (
    Conflict,
    DiskFull,
    Duplicate,
    Expired,
    Invalid,
    MalformedRequest,
    Migrating,
    NotFound,
    Problem,
    Stale,
    StoreUnavailable,
    TooLarge,
    UnsupportedMedia,
)
from warmstart.exchange import MAX_CHUNK, Export, ExportQuery, Format, ImportResult
from warmstart.memory import (
    ID_PATTERN,
    NAMESPACE_PATTERN,
    Batch,
    BatchResult,
    ContextRequest,
    ContextResult,
    Counts,
    EventResult,
    Health,
    History,
    HistoryRequest,
    ListRequest,
    Memory,
    MemoryAPI,
    MemoryPatch,
    NamespaceChange,
    Namespaces,
    NewEvent,
    NewMemory,
    Page,
    RecallRequest,
    RenameNamespace,
    Saved,
    SearchRequest,
    SearchResult,
)
from warmstart.memory import Request as RequestModel
from warmstart.web.decode import (
    JSON_TYPE,
    MAX_BATCH_BODY,
    MAX_BODY,
    NDJSON_TYPE,
    read_body,
    read_import,
    read_query,
)
from warmstart.web.problems import method_not_allowed
from warmstart.web.runtime import Runtime

#: Seconds; past it the process counts as not ready.
READY_TIMEOUT_S: Final = 2.0
#: nginx's status for a client that left; it is only ever logged and counted.
CLIENT_CLOSED: Final = 499

PATH_PARAMETERS: Final = {
    "id": (ID_PATTERN, "no memory has this id"),
    "name": (NAMESPACE_PATTERN, "no namespace has this name"),
    "version": (r"^[1-9][0-9]{0,8}$", "no version has this number"),
}
_ETAG = re.compile(r'"[\x21\x23-\x7e]{1,64}"')


class NoQuery(RequestModel):
    """No query parameter is known here."""


class DeleteQuery(RequestModel):
    hard: bool = Field(False, description="Remove for good at once, instead of to the trash.")


class EventQuery(RequestModel):
    retrieve: bool = Field(False, description="Answer an event of the kind `prompt` with a block.")


class Alive(BaseModel):
    status: Literal["ok"] = "ok"


class Ready(BaseModel):
    status: Literal["ok", "degraded", "unavailable"]
    degraded: dict[str, Any] = Field(description="What does not work, and why.")


@dataclass
class Call:
    """One request to an operation, decoded."""

    request: Request
    input: Any
    query: Any

    @property
    def runtime(self) -> Runtime:
        runtime: Runtime = self.request.scope["state"]["runtime"]
        return runtime

    @cached_property
    def api(self) -> MemoryAPI:
        return self.runtime.service(self.request.scope["user"].user_id)

    @property
    def path(self) -> dict[str, str]:
        return self.request.path_params

    @property
    def if_match(self) -> str | None:
        """The ETag the change depends on; None where it depends on none (`*`: that there is one at all)."""
        value = self.request.headers.get("if-match", "*").strip()
        if value == "*":
            return None
        if not _ETAG.fullmatch(value):
            raise MalformedRequest("If-Match takes one ETag in double quotes, as the answer gave it, or *")
        return value


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True)
class Operation:
    method: str
    path: str
    handler: Handler
    summary: str
    answer: type[BaseModel] | None
    status: int = 200
    #: Further statuses that carry the same answer, and when.
    also: dict[int, str] = field(default_factory=dict)
    query: type[RequestModel] = NoQuery
    body: type[RequestModel] | None = None
    max_body: int = MAX_BODY
    problems: tuple[type[Problem], ...] = ()
    etag: bool = False
    #: Of the body, and of the answer.
    takes: tuple[str, ...] = (JSON_TYPE,)
    gives: tuple[str, ...] = (JSON_TYPE,)

    @property
    def authenticated(self) -> bool:
        return self.path.startswith("/v1")

    @property
    def body_problems(self) -> tuple[type[Problem], ...]:
        return (TooLarge, UnsupportedMedia) if self.body else ()


class Resource:
    """One path as an ASGI app: the operation of the method, HEAD and OPTIONS, 405 for the rest."""

    def __init__(self, path: str, operations: list[Operation]) -> None:
        self.path = path
        self.operations = {o.method: o for o in operations}
        if "GET" in self.operations:
            self.operations["HEAD"] = self.operations["GET"]
        self.allowed = sorted([*self.operations, "OPTIONS"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = scope["method"]
        if method == "OPTIONS":
            response = Response(status_code=204, headers={"Allow": ", ".join(self.allowed)})
        elif operation := self.operations.get(method):
            try:
                response = await self._answer(operation, Request(scope, receive))
            except ClientDisconnect:
                response = Response(status_code=CLIENT_CLOSED)
        else:
            raise method_not_allowed(method, self.allowed)
        if method == "HEAD":
            if isinstance(response, StreamingResponse):
                response = Response(status_code=response.status_code, headers=dict(response.headers))
            response.body = b""  # its Content-Length stays that of GET
        await response(scope, receive, send)

    async def _answer(self, operation: Operation, request: Request) -> Response:
        for name, value in request.path_params.items():
            pattern, problem = PATH_PARAMETERS[name]
            if not re.fullmatch(pattern, value):
                raise NotFound(f"{problem}: {value[:100]!r}")
        query = read_query(request.scope["query_string"], operation.query)
        if operation.body is Export:
            body: Any = await read_import(request)
        else:
            body = operation.body and await read_body(request, operation.body, operation.max_body)
        return await operation.handler(Call(request, body, query))


def resources(operations: tuple[Operation, ...]) -> list[Resource]:
    paths: dict[str, list[Operation]] = {}
    for operation in operations:
        paths.setdefault(operation.path, []).append(operation)
    return [Resource(path, ops) for path, ops in paths.items()]


def answer(record: BaseModel, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(record.model_dump_json(), status, headers, "application/json")


def _one(memory: Memory, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return answer(memory, status, {"ETag": memory.etag, **(headers or {})})


async def save(call: Call) -> Response:
    saved = await call.api.save(call.input)
    if saved.duplicate:
        return _one(saved)
    return _one(saved, 201, {"Location": f"/v1/memories/{saved.id}"})


async def save_batch(call: Call) -> Response:
    return answer(await call.api.save_batch(call.input))


async def list_memories(call: Call) -> Response:
    return answer(await call.api.list(call.query))


async def counts(call: Call) -> Response:
    return answer(await call.api.counts())


async def get_memory(call: Call) -> Response:
    return _one(await call.api.get(call.path["id"]))


async def update_memory(call: Call) -> Response:
    return _one(await call.api.update(call.path["id"], call.input, call.if_match))


async def delete_memory(call: Call) -> Response:
    await call.api.delete(call.path["id"], hard=call.query.hard, if_match=call.if_match)
    return Response(status_code=204)


async def restore_memory(call: Call) -> Response:
    return _one(await call.api.restore(call.path["id"]))


async def memory_history(call: Call) -> Response:
    return answer(await call.api.history(call.path["id"], call.query))


async def restore_version(call: Call) -> Response:
    return _one(await call.api.restore_version(call.path["id"], int(call.path["version"]), call.if_match))


async def search(call: Call) -> Response:
    return answer(await call.api.search(call.input))


async def recall(call: Call) -> Response:
    return answer(await call.api.recall(call.query))


async def context(call: Call) -> Response:
    return answer(await call.api.context(call.input))


async def event(call: Call) -> Response:
    return answer(await call.api.event(call.input, retrieve=call.query.retrieve))


async def list_namespaces(call: Call) -> Response:
    return answer(await call.api.namespaces())


async def rename_namespace(call: Call) -> Response:
    return answer(await call.api.rename_namespace(call.path["name"], call.input.name))


async def delete_namespace(call: Call) -> Response:
    return answer(await call.api.delete_namespace(call.path["name"]))


async def export_memories(call: Call) -> Response:
    return await export_answer(call.api, call.query.format)


async def export_answer(api: MemoryAPI, form: Format) -> Response:
    chunks = api.export(form)
    first = await anext(chunks)  # what can't be exported is said before the answer begins

    async def body() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(chunks):  # type: ignore[type-var]
            yield first
            async for chunk in chunks:
                yield chunk

    name = f"warmstart-export-{datetime.now(UTC):%Y-%m-%d}.{form}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(body(), 200, headers, NDJSON_TYPE if form == "ndjson" else JSON_TYPE)


async def import_memories(call: Call) -> Response:
    return answer(await call.api.import_memories(call.input))


async def health(call: Call) -> Response:
    return answer(await call.api.health())


async def alive(call: Call) -> Response:
    return JSONResponse({"status": "ok"})


async def ready(call: Call) -> Response:
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            can_serve, degraded = await call.runtime.ready()
    except TimeoutError:
        can_serve, degraded = False, {"service": f"no answer within {READY_TIMEOUT_S:g} s"}
    status: Any = "unavailable" if not can_serve else "degraded" if degraded else "ok"
    return answer(Ready(status=status, degraded=degraded), 200 if can_serve else 503)


READS: Final = (StoreUnavailable,)
WRITES: Final = (StoreUnavailable, Migrating, DiskFull)

OPERATIONS: Final = (
    Operation(
        "POST", "/v1/memories", save, "Save one memory", Saved, 201,
        also={200: "Its content is there already; `duplicate` is true."},
        body=NewMemory, problems=(Conflict, *WRITES), etag=True,
    ),
    Operation(
        "GET", "/v1/memories", list_memories, "List memories, newest first", Page,
        query=ListRequest, problems=READS,
    ),
    Operation(
        "POST", "/v1/memories/batch", save_batch, "Save up to 100 memories; known ones are skipped", BatchResult,
        body=Batch, max_body=MAX_BATCH_BODY, problems=(Conflict, *WRITES),
    ),
    Operation(
        "GET", "/v1/memories/counts", counts, "Counts by state, namespace and type", Counts, problems=READS
    ),
    Operation(
        "GET", "/v1/memories/{id}", get_memory, "Read one memory", Memory,
        problems=(NotFound, *READS), etag=True,
    ),
    Operation(
        "PATCH", "/v1/memories/{id}", update_memory, "Edit a memory in place", Memory,
        body=MemoryPatch, problems=(NotFound, Duplicate, Conflict, Stale, *WRITES), etag=True,
    ),
    Operation(
        "DELETE", "/v1/memories/{id}", delete_memory, "Put a memory in the trash, or remove it for good", None, 204,
        query=DeleteQuery, problems=(NotFound, Stale, *WRITES),
    ),
    Operation(
        "POST", "/v1/memories/{id}/restore", restore_memory, "Take a memory out of the trash", Memory,
        problems=(NotFound, Duplicate, Conflict, Expired, *WRITES), etag=True,
    ),
    Operation(
        "GET", "/v1/memories/{id}/history", memory_history, "What a memory was before its edits, newest first", History,
        query=HistoryRequest, problems=(NotFound, *READS),
    ),
    Operation(
        "POST", "/v1/memories/{id}/history/{version}/restore", restore_version,
        "Edit a memory back to what it was", Memory,
        problems=(NotFound, Duplicate, Conflict, Stale, *WRITES), etag=True,
    ),
    Operation(
        "POST", "/v1/search", search, "Search by meaning and by words", SearchResult,
        body=SearchRequest, problems=READS,
    ),
    Operation(
        "GET", "/v1/recall", recall, "Browse without a query", Page, query=RecallRequest, problems=READS
    ),
    Operation(
        "POST", "/v1/context", context, "A markdown block for a prompt", ContextResult, body=ContextRequest
    ),
    Operation(
        "POST", "/v1/events", event, "Record an event; answer a prompt with a block", EventResult,
        query=EventQuery, body=NewEvent,
    ),
    Operation(
        "GET", "/v1/namespaces", list_namespaces, "Namespaces with counts", Namespaces, problems=READS
    ),
    Operation(
        "PATCH", "/v1/namespaces/{name}", rename_namespace, "Rename a namespace", NamespaceChange,
        body=RenameNamespace, problems=(NotFound, Conflict, Duplicate, *WRITES),
    ),
    Operation(
        "DELETE", "/v1/namespaces/{name}", delete_namespace, "Put a namespace's memories in the trash",
        NamespaceChange, problems=(NotFound, *WRITES),
    ),
    Operation(
        "GET", "/v1/export", export_memories, "Everything, in a documented format", Export,
        query=ExportQuery, problems=(Migrating, *READS), gives=(JSON_TYPE, NDJSON_TYPE),
    ),
    Operation(
        "POST", "/v1/import", import_memories,
        "Memories of an export as they were: a small export whole, or up to 1,000 lines of a large one", ImportResult,
        body=Export, max_body=MAX_CHUNK, takes=(JSON_TYPE, NDJSON_TYPE), problems=WRITES,
    ),
    Operation("GET", "/v1/health", health, "State of each dependency, the rung, the queue", Health, problems=READS),
    Operation("GET", "/healthz", alive, "Whether the process lives", Alive),
    Operation(
        "GET", "/readyz", ready, "Whether it can serve, and what is degraded", Ready,
        also={503: "It can't serve."},
    ),
)  # fmt: skip

#: What any operation with input may answer.
INPUT_PROBLEMS: Final = (MalformedRequest, Invalid)
