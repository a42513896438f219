"""The client of the embedding provider: any OpenAI-compatible `/v1/embeddings`.

Vectors come back with unit length and in half precision, so that one from the
cache is the very same as one from the provider.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import httpx

from warmstart.circuit import Circuit
from warmstart.config import Settings
from warmstart.embedding_wire import Result, Throttled, Vector, fetch, pack, unpack
from warmstart.errors import CacheUnavailable, EmbeddingError
from warmstart.metrics import EmbeddingKind, Metrics
from warmstart.portion import Portion
from warmstart.upstash import Cache

#: Requests under way at once, for queries and for documents each; further ones wait.
MAX_REQUESTS: Final = 16
#: Few enough that a slow provider finishes a request in seconds: what it finished is kept, whatever comes after.
MAX_REQUEST_CHARS: Final = 32_000
#: A cache notes by itself that it is slow; cut off by us it would not, and be asked for ever.
CACHE_GRACE_S: Final = 0.05
#: Writes to the cache under way at once; further ones are left out.
MAX_CACHE_WRITES: Final = 64
#: Between tries to reach a provider that has just died.
RETRY_S: Final = 0.25
#: Any provider can embed this: where it does, a failure was another text's fault.
PROBE: Final = "memory"

#: The provider refused the request, and is well.
_REFUSED: Final = frozenset({"status-400", "status-413", "status-422"})
#: Failures that one text among others can cause.
_SUSPECT: Final = _REFUSED | {"status-500", "reset", "not-finite", "zero-norm"}
_AWAY: Final = frozenset({"unreachable", "reset", "circuit-open"})


@dataclass(slots=True)
class _Lane:
    """Queries and documents fail apart: a queue of long documents says nothing about a short query."""

    kind: EmbeddingKind
    prefix: str
    circuit: Circuit
    slots: asyncio.Semaphore

    @classmethod
    def of(cls, kind: EmbeddingKind, prefix: str) -> _Lane:
        return cls(kind, prefix, Circuit(kind), asyncio.Semaphore(MAX_REQUESTS))


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[Vector]
    waiters: int = 0


class Embedder:
    """Embeds queries and documents within a time budget; every failure is an EmbeddingError."""

    def __init__(
        self,
        settings: Settings,
        cache: Cache,
        *,
        base_url: str,
        transport: httpx.AsyncBaseTransport | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._metrics = metrics or Metrics()
        self.space = space = settings.space
        self._settings = settings
        self._cache = cache
        self._cache_wait_s = settings.cache_budget_ms / 1000 + CACHE_GRACE_S
        self._url = base_url.rstrip("/") + "/embeddings"
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key := settings.openai_api_key.get_secret_value():
            headers["authorization"] = f"Bearer {key}"
        # No timeouts of httpx's own: each request stands under the caller's one budget.
        self._http = httpx.AsyncClient(headers=headers, transport=transport, timeout=None)  # noqa: S113
        self._queries = _Lane.of("query", space.query_prefix)
        self._documents = _Lane.of("document", space.doc_prefix)
        self._portion = Portion(settings.embed_batch_size)
        self._flights: dict[str, _Flight] = {}
        self._writes: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._trouble: tuple[str, datetime] | None = None

    @property
    def healthy(self) -> bool:
        """Whether the provider's last answer was of use."""
        return self._trouble is None

    @property
    def reason(self) -> str:
        """The stable word of what is wrong, or nothing."""
        return self._trouble[0] if self._trouble else ""

    @property
    def since(self) -> datetime | None:
        """When the trouble began."""
        return self._trouble[1] if self._trouble else None

    async def close(self) -> None:
        self._closed = True
        tasks = [*(flight.task for flight in self._flights.values()), *self._writes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    async def embed_query(self, query: str, timeout_s: float) -> Vector:
        """The query's vector, from the cache where it is there. Raises EmbeddingError.

        Hand the budget over in `timeout_s` instead of cancelling from outside:
        only so can a slow provider be told from a caller who left.
        """
        deadline = _now() + timeout_s
        key = self._key("ws:q:", self._queries.prefix, query)
        joined = key in self._flights
        try:
            return await self._share(key, query, timeout_s)
        except EmbeddingError as error:
            if not (joined and error.reason == "timeout" and _now() < deadline):
                raise
        # The request that was joined began earlier and ran out of its time, not of ours.
        return await self._share(key, query, deadline - _now())

    async def embed_documents(self, texts: Sequence[str], timeout_s: float) -> list[Vector]:
        """A vector for each text, in order. Raises the first text's EmbeddingError where any has one."""
        vectors = []
        for result in await self.embed_each(texts, timeout_s):
            if isinstance(result, EmbeddingError):
                raise result
            vectors.append(result)
        return vectors

    async def embed_each(self, texts: Sequence[str], timeout_s: float) -> list[Result]:
        """A vector or its own error for each text, in order; never raises EmbeddingError."""
        deadline = _now() + timeout_s
        keys = [self._key("ws:e:", self._documents.prefix, _sha256(text)) for text in texts]
        known: dict[str, Result] = {**await self._cached(list(dict.fromkeys(keys)), deadline)}
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in known}
        parts = _parts(list(missing.values()), lambda: self._portion.size)
        results = await self._in_parts(self._documents, parts, deadline)
        fresh = dict(zip(missing, results, strict=True))
        self._store(fresh.items(), self._settings.embedding_cache_ttl_s)
        known.update(fresh)
        return [known[key] for key in keys]

    # One request for all who ask the same at the same time.

    async def _share(self, key: str, query: str, timeout_s: float) -> Vector:
        flight = self._flights.get(key)
        if flight is None:
            # It may outlive a caller with less time: the vector still serves the next one.
            budget_s = max(timeout_s, self._settings.embed_query_budget_ms / 1000)
            task = asyncio.create_task(self._query_vector(key, query, _now() + budget_s))
            flight = self._flights[key] = _Flight(task)
            task.add_done_callback(lambda task: self._landed(key, task))
        flight.waiters += 1
        try:
            await asyncio.wait({flight.task}, timeout=timeout_s)
        except asyncio.CancelledError:
            if flight.waiters == 1:
                flight.task.cancel()
                self._flights.pop(key, None)
            raise
        finally:
            flight.waiters -= 1
        if not flight.task.done():
            raise EmbeddingError("timeout", f"no vector within {timeout_s:.3f} s")
        if flight.task.cancelled():
            raise EmbeddingError("closed", "the embedder was closed meanwhile")
        return flight.task.result()

    def _landed(self, key: str, task: asyncio.Task[Vector]) -> None:
        if (flight := self._flights.get(key)) and flight.task is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # seen, even where nobody waits any more

    async def _query_vector(self, key: str, query: str, deadline: float) -> Vector:
        if vector := (await self._cached([key], deadline)).get(key):
            return vector
        [result] = await self._embed(self._queries, [query], deadline)
        if isinstance(result, EmbeddingError):
            raise result
        self._store([(key, result)], self._settings.query_cache_ttl_s)
        return result

    # Batches, and finding the text at fault in one.

    async def _in_parts(self, lane: _Lane, parts: Iterable[list[str]], deadline: float) -> list[Result]:
        results: list[Result] = []
        for part in parts:
            last = results[-1] if results else None
            if isinstance(last, EmbeddingError) and not last.text_at_fault:
                results += [last] * len(part)  # the provider is down: the rest needs no asking
            else:
                results += await self._embed(lane, part, deadline)
        return results

    async def _embed(self, lane: _Lane, texts: list[str], deadline: float, *, again: bool = False) -> list[Result]:
        try:
            return await self._request(lane, texts, deadline)
        except EmbeddingError as error:
            failure = error
        if failure.reason not in _SUSPECT or not await self._answers(lane, failure, deadline):
            return [failure] * len(texts)
        died = failure.reason == "reset"
        if len(texts) > 1:
            # A death costs a restart, a refusal only one more request.
            size = 1 if died else (len(texts) + 1) // 2
            return await self._in_parts(lane, _parts(texts, lambda: size), deadline)
        if died and not again:
            return await self._embed(lane, texts, deadline, again=True)
        return [EmbeddingError(failure.reason, "the provider fails on this text alone", text_at_fault=True)]

    async def _answers(self, lane: _Lane, failure: EmbeddingError, deadline: float) -> bool:
        """Whether the provider is well; one that died is given until the deadline to come back."""
        while True:
            try:
                await self._request(lane, [PROBE], deadline, harmless=frozenset())
            except EmbeddingError as error:
                patient = failure.reason == "reset" and error.reason in _AWAY
                if not patient or _now() + RETRY_S >= deadline:
                    return False
            else:
                return True
            await asyncio.sleep(RETRY_S)

    # One request, under the circuit and the deadline.

    async def _request(
        self, lane: _Lane, texts: list[str], deadline: float, *, harmless: frozenset[str] = _REFUSED
    ) -> list[Result]:
        """Raises EmbeddingError where no text got a vector; `harmless` ones don't count as failures."""
        async with self._attempt(lane, harmless):
            try:
                async with asyncio.timeout_at(deadline), lane.slots:
                    prefixed = [lane.prefix + text for text in texts]
                    began = time.perf_counter()
                    results = await fetch(self._http, self._url, self.space.model, prefixed, self.space.dim)
                    if lane is self._documents:
                        self._portion.took(len(texts), time.perf_counter() - began)
            except TimeoutError:
                raise EmbeddingError("timeout", "no answer within its time") from None
            if all(isinstance(result, EmbeddingError) for result in results):
                raise EmbeddingError(getattr(results[0], "reason", "malformed"), "no vector is usable")
            return results

    @asynccontextmanager
    async def _attempt(self, lane: _Lane, harmless: frozenset[str]) -> AsyncIterator[None]:
        if self._closed:
            raise EmbeddingError("closed", "the embedder is closed")
        admission = lane.circuit.admit()
        if admission is None:
            raise EmbeddingError("circuit-open", f"the provider is left alone after {self.reason}")
        began = time.perf_counter()
        try:
            yield
        except EmbeddingError as error:
            self._metrics.embedding_failed(lane.kind, error.reason)
            if error.reason in harmless:
                lane.circuit.released(admission)
                raise
            if self._trouble is None or self._trouble[0] != error.reason:
                self._trouble = (error.reason, self.since or datetime.now(UTC))
            lane.circuit.failed(admission, error.reason)
            if isinstance(error, Throttled):
                for each in (self._queries, self._documents):
                    each.circuit.hold(error.reason, error.hold_s)
            raise
        except BaseException:
            lane.circuit.released(admission)
            raise
        self._metrics.embedded(lane.kind, time.perf_counter() - began)
        self._trouble = None
        lane.circuit.succeeded()

    # The cache: whatever goes wrong with it, the provider is asked instead.

    def _key(self, kind: str, prefix: str, text: str) -> str:
        space = self.space
        return kind + _sha256(json.dumps([space.model, space.revision, space.dim, prefix, text]))

    async def _cached(self, keys: list[str], deadline: float) -> dict[str, Vector]:
        if not keys:
            return {}
        try:
            async with asyncio.timeout_at(min(_now() + self._cache_wait_s, deadline)):
                [values] = await self._cache.pipeline(("MGET", *keys))
        except (CacheUnavailable, TimeoutError, ValueError):
            return {}
        if not isinstance(values, list) or len(values) != len(keys):
            return {}
        found = ((key, self._read(value)) for key, value in zip(keys, values, strict=True))
        return {key: vector for key, vector in found if vector}

    def _read(self, value: Any) -> Vector | None:
        """The vector in a cached value; None, a miss, where it is not one of this width and unit length."""
        if not isinstance(value, str):
            return None
        try:
            vector = unpack(base64.b64decode(value, validate=True))
        except (ValueError, struct.error):
            return None
        usable = len(vector) == self.space.dim and abs(math.hypot(*vector) - 1) < 1e-3
        return vector if usable else None

    def _store(self, results: Iterable[tuple[str, Result]], ttl_s: int) -> None:
        """In the background: nobody waits for a write to the cache."""
        commands = [
            ("SET", key, base64.b64encode(pack(result)).decode(), "EX", ttl_s)
            for key, result in results
            if isinstance(result, list)
        ]
        if commands and not self._closed and len(self._writes) < MAX_CACHE_WRITES:
            task = asyncio.create_task(self._write(commands))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def _write(self, commands: Sequence[tuple[str | int | float, ...]]) -> None:
        try:
            async with asyncio.timeout(self._cache_wait_s):
                await self._cache.pipeline(*commands)
        except (CacheUnavailable, TimeoutError):
            pass


def _parts(texts: list[str], size: Callable[[], int]) -> Iterator[list[str]]:
    """In order, at most `size` texts, as it is then, and MAX_REQUEST_CHARS each, but at least one text."""
    part: list[str] = []
    chars = 0
    for text in texts:
        if part and (len(part) >= size() or chars + len(text) > MAX_REQUEST_CHARS):
            yield part
            part, chars = [], 0
        part.append(text)
        chars += len(text)
    if part:
        yield part


def _now() -> float:
    return asyncio.get_running_loop().time()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
