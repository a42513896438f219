"""The client of the embedding provider: any OpenAI-compatible `/v1/embeddings`.

Vectors come back with unit length and the precision of float32, so that one
from the cache is the very same as one from the provider.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import struct
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import httpx

from warmstart.circuit import Circuit
from warmstart.config import Settings
from warmstart.embedding_wire import request_body, unit, vectors_of
from warmstart.errors import CacheUnavailable, EmbeddingError
from warmstart.upstash import Cache

#: Requests under way at once, for queries and for documents each; further ones wait.
MAX_REQUESTS: Final = 16
#: An honest answer is smaller: some 25 bytes a number, 8,192 numbers a text, 32 texts in a request.
MAX_RESPONSE_BYTES: Final = 64 * 2**20
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

Result = list[float] | EmbeddingError


@dataclass(slots=True)
class _Lane:
    """Queries and documents fail apart: a queue of long documents says nothing about a short query."""

    prefix: str
    circuit: Circuit
    slots: asyncio.Semaphore


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[list[float]]
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
    ) -> None:
        self.space = settings.space
        self._settings = settings
        self._cache = cache
        self._url = base_url.rstrip("/") + "/embeddings"
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        if key := settings.openai_api_key.get_secret_value():
            headers["authorization"] = f"Bearer {key}"
        # No timeouts of httpx's own: each request stands under the caller's one budget.
        self._http = httpx.AsyncClient(headers=headers, transport=transport, timeout=None)  # noqa: S113
        self._queries = _Lane(
            self.space.query_prefix, Circuit("embeddings.query"), asyncio.Semaphore(MAX_REQUESTS)
        )
        self._documents = _Lane(
            self.space.doc_prefix, Circuit("embeddings.document"), asyncio.Semaphore(MAX_REQUESTS)
        )
        self._flights: dict[str, _Flight] = {}
        self._writes: set[asyncio.Task[None]] = set()
        self._closed = False
        self._trouble: tuple[str, datetime] | None = None

    @property
    def healthy(self) -> bool:
        """Whether the provider's last answer was of use."""
        return self._trouble is None

    @property
    def reason(self) -> str:
        """Why not healthy, as the last error's stable word."""
        return self._trouble[0] if self._trouble else ""

    @property
    def since(self) -> datetime | None:
        """When the trouble began."""
        return self._trouble[1] if self._trouble else None

    async def close(self) -> None:
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [flight.task for flight in self._flights.values()]
        tasks.extend(self._writes)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    async def embed_query(self, query: str, timeout_s: float) -> list[float]:
        """The query's vector, from the cache where it is there. Raises EmbeddingError.

        Hand the budget over in `timeout_s` instead of cancelling from outside:
        only so can a slow provider be told from a caller who left.
        """
        deadline = _now() + timeout_s
        key = _cache_key("ws:q:", [*self._identity, self._queries.prefix, query])
        joined = key in self._flights
        try:
            return await self._share(key, query, timeout_s)
        except EmbeddingError as error:
            if not (joined and error.reason == "timeout" and _now() < deadline):
                raise
        # The request that was joined began earlier and ran out of its time, not of ours.
        return await self._share(key, query, deadline - _now())

    async def embed_documents(self, texts: Sequence[str], timeout_s: float) -> list[list[float]]:
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
        prefix = self._documents.prefix
        keys = [_cache_key("ws:e:", [*self._identity, prefix, _sha256(text)]) for text in texts]
        results: dict[str, Result] = {**await self._cached(list(dict.fromkeys(keys)), deadline)}
        missing = {key: text for key, text in zip(keys, texts, strict=True) if key not in results}
        fresh = dict(
            zip(
                missing,
                await self._in_parts(
                    self._documents, list(missing.values()), self._settings.embed_batch_size, deadline
                ),
                strict=True,
            )
        )
        results.update(fresh)
        self._store(
            {key: vector for key, vector in fresh.items() if isinstance(vector, list)},
            self._settings.embedding_cache_ttl_s,
        )
        return [results[key] for key in keys]

    # One request for all who ask the same at the same time.

    async def _share(self, key: str, query: str, timeout_s: float) -> list[float]:
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
            raise
        finally:
            flight.waiters -= 1
        if not flight.task.done():
            raise EmbeddingError("timeout", f"no vector within {timeout_s:.3f} s")
        if flight.task.cancelled():
            raise EmbeddingError("closed", "the request was given up")
        return flight.task.result()

    def _landed(self, key: str, task: asyncio.Task[list[float]]) -> None:
        flight = self._flights.get(key)
        if flight is not None and flight.task is task:
            del self._flights[key]
        if not task.cancelled():
            task.exception()  # seen, even where nobody waits any more

    async def _query_vector(self, key: str, query: str, deadline: float) -> list[float]:
        if vector := (await self._cached([key], deadline)).get(key):
            return vector
        [result] = await self._embed(self._queries, [query], deadline)
        if isinstance(result, EmbeddingError):
            raise result
        self._store({key: result}, self._settings.query_cache_ttl_s)
        return result

    # Batches, and finding the text at fault in one.

    async def _in_parts(self, lane: _Lane, texts: list[str], size: int, deadline: float) -> list[Result]:
        results: list[Result] = []
        for start in range(0, len(texts), size):
            part = texts[start : start + size]
            last = results[-1] if results else None
            if isinstance(last, EmbeddingError) and not last.text_at_fault:
                results += [last] * len(part)  # the provider is down: the rest needs no asking
            else:
                results += await self._embed(lane, part, deadline)
        return results

    async def _embed(
        self, lane: _Lane, texts: list[str], deadline: float, *, again: bool = False
    ) -> list[Result]:
        try:
            return await self._request(lane, texts, deadline)
        except EmbeddingError as error:
            failure = error
        if failure.reason not in _SUSPECT or not await self._answers(lane, failure, deadline):
            return [failure] * len(texts)
        died = failure.reason == "reset"
        if len(texts) > 1:
            # Each death costs a restart, a refusal only a request.
            size = 1 if died else (len(texts) + 1) // 2
            return await self._in_parts(lane, texts, size, deadline)
        if died and not again:
            return await self._embed(lane, texts, deadline, again=True)
        return [EmbeddingError(failure.reason, "the provider fails on this text alone", text_at_fault=True)]

    async def _answers(self, lane: _Lane, failure: EmbeddingError, deadline: float) -> bool:
        """Whether the provider is well; one that died is given until the deadline to come back."""
        while True:
            try:
                await self._request(lane, [PROBE], deadline, harmless=frozenset())
            except EmbeddingError as error:
                if failure.reason != "reset" or error.reason not in _AWAY or _now() + RETRY_S >= deadline:
                    return False
            else:
                return True
            await asyncio.sleep(RETRY_S)

    async def _request(
        self, lane: _Lane, texts: list[str], deadline: float, *, harmless: frozenset[str] = _REFUSED
    ) -> list[Result]:
        """One request. Raises EmbeddingError where no text got a vector; `harmless` ones leave the circuit be."""
        with self._attempt(lane, harmless):
            try:
                async with asyncio.timeout_at(deadline), lane.slots:
                    body = await self._post(request_body(self.space.model, [lane.prefix + t for t in texts]))
            except TimeoutError:
                raise EmbeddingError("timeout", "no answer within its time") from None
            results: list[Result] = []
            for found in vectors_of(body, len(texts), self.space.dim):
                try:
                    results.append(unit(found))
                except EmbeddingError as error:
                    results.append(EmbeddingError(error.reason, str(error), text_at_fault=True))
            if all(isinstance(result, EmbeddingError) for result in results):
                raise EmbeddingError(str(getattr(results[0], "reason", "malformed")), "in every vector")
            return results
