"""What a hook sends: recorded once, without its body, and answered with a block where it is a prompt.

Nothing of it is embedded, stored or logged before secrets are out of it; where
that fails, nothing of it is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import structlog

from warmstart.errors import BookkeepingUnavailable, CacheUnavailable, TenantAssertion
from warmstart.given import is_block
from warmstart.memory import (
    MAX_QUERY,
    ContextRequest,
    ContextResult,
    EventResult,
    JsonBody,
    MessageBody,
    NewEvent,
    TextBody,
    clean_query,
)
from warmstart.metrics import Metrics
from warmstart.scrub import scrub, scrub_names
from warmstart.store.bookkeeping import EVENT_DAYS, Bookkeeping
from warmstart.store.outbox import Event
from warmstart.upstash import Cache

log = structlog.get_logger(__name__)

PROMPT: Final = "prompt"
#: What Postgres is waited for; an event that is not written by then is written behind.
RECORD_S: Final = 0.2
#: Read beyond a query's length, so that no secret is cut in half where the query ends.
MARGIN: Final = 8_192

Retrieve = Callable[[ContextRequest], Awaitable[ContextResult]]


class Events:
    """Of one tenant."""

    def __init__(
        self, user_id: str, bookkeeping: Bookkeeping, cache: Cache, metrics: Metrics, retrieve: Retrieve, budget_ms: int
    ) -> None:
        self._user_id = user_id
        self._bookkeeping = bookkeeping
        self._cache = cache
        self._metrics = metrics
        self._retrieve = retrieve
        self._budget_s = budget_ms / 1000

    async def receive(self, event: NewEvent, *, retrieve: bool) -> EventResult:
        """Never an error but a failed tenant check."""
        started = time.perf_counter()
        budget_s = event.budget_ms / 1000 if event.budget_ms else self._budget_s
        text = await self._scrubbed(event, budget_s)
        recording = asyncio.create_task(self._record(event, text))
        try:
            retrieval = (
                await self._answer(event, text, started + budget_s, started)
                if retrieve and event.kind == PROMPT
                else None
            )
        finally:
            stored = await recording
        log.info("event.received", kind=event.kind, stored=stored, retrieved=bool(retrieval and retrieval.ids))
        return EventResult(event_id=event.event_id, stored=stored, retrieval=retrieval)

    async def _scrubbed(self, event: NewEvent, budget_s: float) -> str | None:
        """What the event says, without secrets; None where they could not be taken out in time."""
        try:
            async with asyncio.timeout(budget_s):
                return await asyncio.to_thread(_text_without_secrets, event)
        except Exception as error:
            reason = "budget" if isinstance(error, TimeoutError) else "scrub"
            self._metrics.degraded("event", reason)
            # the error of a scanner may quote what it scanned
            log.warning("event.not_scrubbed", reason=reason, error=type(error).__name__)
            return None

    async def _answer(self, event: NewEvent, text: str | None, deadline: float, started: float) -> ContextResult:
        left_ms = int((deadline - time.perf_counter()) * 1000)
        found = None
        if text and text.strip() and left_ms > 0 and not is_block(text):
            request = ContextRequest(
                query=text,
                namespace=event.namespace,
                token_budget=event.token_budget,
                budget_ms=min(left_ms, 5_000),
                conversation_id=event.conversation_id,
            )
            try:
                found = await self._retrieve(request)
            except TenantAssertion:
                raise
            except Exception as error:
                log.warning("event.retrieval.failed", error=type(error).__name__)
        found = found or ContextResult(context="", ids=[], mode=None, latency_ms=0)
        return found.model_copy(update={"latency_ms": round((time.perf_counter() - started) * 1000, 3)})

    async def _record(self, event: NewEvent, text: str | None) -> bool:
        """Whether it is new, and will be in Postgres; while that is down the cache knows what came."""
        digest = "" if text is None else hashlib.sha256(text.encode()).hexdigest()
        entry = Event(event.event_id, self._user_id, event.kind, digest, datetime.now(UTC))
        known, new = await asyncio.gather(self._is_known(event.event_id), self._write(entry))
        if new is not None:
            return new
        return self._bookkeeping.note_event(entry) and not known

    async def _write(self, entry: Event) -> bool | None:
        """Whether it is new to Postgres; None where that does not answer."""
        try:
            return await self._bookkeeping.record_event(entry, RECORD_S)
        except BookkeepingUnavailable:
            return None

    async def _is_known(self, event_id: str) -> bool:
        key = "ws:e:" + hashlib.sha256(f"{self._user_id} {event_id}".encode()).hexdigest()
        try:
            [first] = await self._cache.pipeline(("SET", key, "1", "NX", "EX", EVENT_DAYS * 86_400))
        except CacheUnavailable:
            return False
        return first is None


def _text_without_secrets(event: NewEvent) -> str:
    """What an event asks: a text's content, a message's last turn, the JSON of data."""
    return str(clean_query(scrub(_text(event.body)[: MAX_QUERY + MARGIN])))[:MAX_QUERY]


def _text(body: TextBody | MessageBody | JsonBody) -> str:
    if isinstance(body, TextBody):
        return body.content
    if isinstance(body, MessageBody):
        return body.turns[-1].content if body.turns else ""
    if body.data in (None, "", {}, []):
        return ""
    return json.dumps(scrub_names(body.data), ensure_ascii=False)
