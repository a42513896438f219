"""The memory of a server, over HTTP: the same methods, the same problems.

For what runs on a client's machine (CLI, hooks, indexer, MCP over stdio), so
nothing of the server is imported here.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from ipaddress import ip_address
from types import TracebackType
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from warmstart.errors import PROBLEM_BASE, PROBLEMS, Problem, ServerUnreachable, Unauthorized
from warmstart.exchange import ExportedMemory, Format, ImportResult, lines_of
from warmstart.memory import (
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

CONNECT_TIMEOUT_S: Final = 5.0
_ADVICE: Final = "start it with `warmstart serve`, or set WARMSTART_URL to where it runs"
_KEY = re.compile(r"[\x21-\x7e]+")
#: The connection broke under way; a server that was not there at all is no case for another try.
_BROKEN: Final = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
_GATEWAY: Final = (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)

A = TypeVar("A", bound=BaseModel)


class MemoryClient:
    """An async context manager; keeps its connections between calls.

    Raises the `Problem` the server answered with, or `ServerUnreachable`.
    """

    def __init__(
        self,
        url: str,
        api_key: str,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        key = api_key.strip()
        if not _KEY.fullmatch(key):
            # the HTTP library would name the whole header in its complaint
            raise Unauthorized("the API key is empty or holds blanks or letters outside ASCII: copy it again")
        base = _server_url(url)
        self.url = str(base.copy_with(userinfo=b"")).rstrip("/")
        self._timeout_s = timeout_s
        self._http = httpx.AsyncClient(
            base_url=base,
            headers={"Authorization": f"Bearer {key}", "Accept": "application/json"},
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S)),
            transport=transport,
            # a proxy of the environment can't reach this machine's own loopback
            trust_env=not _is_loopback(base.host),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def save(self, new: NewMemory) -> Saved:
        return await self._post("/v1/memories", new, Saved)

    async def save_batch(self, batch: Batch) -> BatchResult:
        return await self._post("/v1/memories/batch", batch, BatchResult)

    async def search(self, request: SearchRequest) -> SearchResult:
        return await self._post("/v1/search", request, SearchResult)

    async def recall(self, request: RecallRequest) -> Page:
        return await self._get("/v1/recall", Page, request)

    async def context(self, request: ContextRequest) -> ContextResult:
        return await self._post("/v1/context", request, ContextResult)

    async def event(self, event: NewEvent, *, retrieve: bool = False) -> EventResult:
        params = {"retrieve": "true"} if retrieve else {}
        return _read(EventResult, await self._send("POST", "/v1/events", body=event, params=params), self.url)

    async def get(self, memory_id: str) -> Memory:
        return await self._get(_path("memories", memory_id), Memory)

    async def list(self, request: ListRequest) -> Page:
        return await self._get("/v1/memories", Page, request)

    async def update(self, memory_id: str, patch: MemoryPatch, if_match: str | None = None) -> Memory:
        headers = {"If-Match": if_match} if if_match else {}
        answer = await self._send("PATCH", _path("memories", memory_id), body=patch, headers=headers)
        return _read(Memory, answer, self.url)

    async def delete(self, memory_id: str, *, hard: bool = False, if_match: str | None = None) -> None:
        headers = {"If-Match": if_match} if if_match else {}
        params = {"hard": "true"} if hard else {}
        await self._send("DELETE", _path("memories", memory_id), params=params, headers=headers)

    async def restore(self, memory_id: str) -> Memory:
        return _read(Memory, await self._send("POST", _path("memories", memory_id, "restore")), self.url)

    async def history(self, memory_id: str, request: HistoryRequest) -> History:
        return await self._get(_path("memories", memory_id, "history"), History, request)

    async def restore_version(self, memory_id: str, version: int, if_match: str | None = None) -> Memory:
        headers = {"If-Match": if_match} if if_match else {}
        path = _path("memories", memory_id, "history", str(version), "restore")
        return _read(Memory, await self._send("POST", path, headers=headers), self.url)

    async def counts(self) -> Counts:
        return await self._get("/v1/memories/counts", Counts)

    async def namespaces(self) -> Namespaces:
        return await self._get("/v1/namespaces", Namespaces)

    async def rename_namespace(self, name: str, to: str) -> NamespaceChange:
        answer = await self._send("PATCH", _path("namespaces", name), body=RenameNamespace(name=to))
        return _read(NamespaceChange, answer, self.url)

    async def delete_namespace(self, name: str) -> NamespaceChange:
        return _read(NamespaceChange, await self._send("DELETE", _path("namespaces", name)), self.url)

    async def export(self, form: Format) -> AsyncIterator[bytes]:
        request = self._http.build_request("GET", "/v1/export", params={"format": form})
        try:
            response = await self._http.send(request, stream=True)
            try:
                if not response.is_success:
                    await response.aread()
                    raise _problem(response, self.url)
                async for chunk in response.aiter_bytes():
                    yield chunk
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise self._unreachable(error, repeatable=True) from error

    async def import_memories(self, memories: Sequence[ExportedMemory]) -> ImportResult:
        return await self.import_lines(lines_of(memories))

    async def import_lines(self, lines: bytes) -> ImportResult:
        """Lines of an NDJSON export, at most MAX_CHUNK bytes; sending them again changes nothing."""
        headers = {"Content-Type": "application/x-ndjson"}
        answer = await self._send("POST", "/v1/import", content=lines, headers=headers, repeatable=True)
        return _read(ImportResult, answer, self.url)

    async def health(self) -> Health:
        return await self._get("/v1/health", Health)

    async def _get(self, path: str, answer: type[A], query: BaseModel | None = None) -> A:
        params = query.model_dump(mode="json", exclude_unset=True, exclude_none=True) if query else {}
        return _read(answer, await self._send("GET", path, params=params, repeatable=True), self.url)

    async def _post(self, path: str, body: BaseModel, answer: type[A]) -> A:
        """For searches, and for saves: these are idempotent by the hash of their content."""
        return _read(answer, await self._send("POST", path, body=body, repeatable=True), self.url)

    async def _send(
        self,
        method: str,
        path: str,
        *,
        params: dict[str, Any] | None = None,
        body: BaseModel | None = None,
        content: bytes | None = None,
        headers: dict[str, str] | None = None,
        repeatable: bool = False,
    ) -> httpx.Response:
        if body is not None:
            content = body.model_dump_json(exclude_unset=True).encode()
            headers = {**(headers or {}), "Content-Type": "application/json"}
        request = self._http.build_request(method, path, params=params, headers=headers, content=content)
        try:
            try:
                response = await self._http.send(request)
            except _BROKEN:
                if not repeatable:
                    raise
                response = await self._http.send(request)
        except httpx.TransportError as error:
            raise self._unreachable(error, repeatable) from error
        if not response.is_success:
            raise _problem(response, self.url)
        return response

    def _unreachable(self, error: httpx.TransportError, repeatable: bool) -> ServerUnreachable:
        if isinstance(error, _BROKEN) and not repeatable:
            return ServerUnreachable(
                f"the connection to {self.url} broke before it answered, so the change may or may not have been made: "
                "look before you repeat it"
            )
        if isinstance(error, _BROKEN):
            return ServerUnreachable(f"the connection to {self.url} broke twice; {_ADVICE}")
        if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
            return ServerUnreachable(f"{self.url} gave no answer within {self._timeout_s:g} s; try again")
        if "CERTIFICATE" in str(error).upper():
            return ServerUnreachable(
                f"the certificate of {self.url} is not trusted here: "
                "set SSL_CERT_FILE to the authority that signed it, or use the name it was made for"
            )
        return ServerUnreachable(f"nothing answers at {self.url}; {_ADVICE}")


def _server_url(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url.strip())
    except httpx.InvalidURL:
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ServerUnreachable("WARMSTART_URL must be a URL such as http://127.0.0.1:8484")
    return parsed


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _read(model: type[A], response: httpx.Response, url: str) -> A:
    try:
        return model.model_validate_json(response.content)
    except ValidationError:
        raise ServerUnreachable(
            f"{url} answered {response.status_code}, but not as a Warmstart server of this version does: "
            "check WARMSTART_URL, and that client and server are of one version"
        ) from None


def _problem(response: httpx.Response, url: str) -> Problem | ServerUnreachable:
    """The problem the server answered with; what stands before it answers in other forms."""
    status = response.status_code
    try:
        found = response.json() if "problem+json" in response.headers.get("content-type", "") else None
    except ValueError:
        found = None
    if isinstance(found, dict):
        return _rebuilt(found)
    if response.is_redirect:
        target = response.headers.get("location", "elsewhere")
        return ServerUnreachable(f"{url} points to {target[:200]}: set WARMSTART_URL to the server itself")
    if status in _GATEWAY:
        return ServerUnreachable(f"the proxy at {url} answered {status}: the server behind it is down")
    return ServerUnreachable(f"{url} answered {status}, which is no answer of Warmstart's: check WARMSTART_URL")


def _rebuilt(found: dict[str, Any]) -> Problem:
    """The same class as in the server; a type of a newer server is a plain Problem."""
    cls = PROBLEMS.get(str(found.pop("type", "")).removeprefix(PROBLEM_BASE), Problem)
    detail = str(found.pop("detail", cls.title))
    # not through the constructor: subclasses ask for fields of their own, which come in `extra` here
    problem = cls.__new__(cls)
    Problem.__init__(problem, detail)
    problem.extra = {name: value for name, value in found.items() if name not in ("title", "status")}
    return problem
