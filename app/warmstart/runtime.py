"""The running service: every part opened in order, closed in reverse, and its state in words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

import structlog

from warmstart.account import Account
from warmstart.activity import Activity
from warmstart.config import Settings
from warmstart.embeddings import Embedder
from warmstart.errors import CacheUnavailable, EmbeddingError, Problem
from warmstart.keys import KeyRing
from warmstart.memory import Mode
from warmstart.metrics import Metrics
from warmstart.ratelimit import RateLimiter
from warmstart.search import Search
from warmstart.service import MemoryService
from warmstart.store.bookkeeping import Bookkeeping
from warmstart.store.maintenance import Maintenance
from warmstart.store.reads import Inspector
from warmstart.store.table import Table, open_table, translated
from warmstart.store.writer import Writer
from warmstart.transfer import Transfers
from warmstart.upstash import Cache, open_cache

log = structlog.get_logger(__name__)

PROBE_S: Final = 5.0


@dataclass
class Runtime:
    settings: Settings
    metrics: Metrics
    cache: Cache
    embedder: Embedder
    table: Table
    writer: Writer
    maintenance: Maintenance
    search: Search
    bookkeeping: Bookkeeping
    keys: KeyRing
    limiter: RateLimiter
    transfers: Transfers = field(default_factory=Transfers)
    activity: Activity = field(default_factory=Activity)

    def account(self, user_id: str) -> Account:
        return Account(self, user_id)

    def service(self, user_id: str) -> MemoryService:
        return MemoryService(self, user_id)

    def rung(self) -> tuple[list[str], Mode]:
        """What is degraded now, and the rung a search would be answered from."""
        degraded = []
        off = self.search.vectors_off
        if self.table.is_migrating:
            degraded.append("migrating")
        if off == "space":
            degraded.append("space")
        elif off is None and not self.embedder.healthy:
            degraded.append("embedding")
        if not self.bookkeeping.healthy:
            degraded.append("postgres")
        if not self.cache.healthy:
            degraded.append("redis")
        return degraded, "keyword" if off or not self.embedder.healthy else "hybrid"

    def dependencies(self, share_back: float | None) -> list[dict[str, Any]]:
        """`share_back`: of the memories, where a migration runs."""
        off = self.search.vectors_off
        embedding: dict[str, Any] = {"name": "embedding"} | _state(self.embedder)
        if off == "disabled":
            embedding |= {"status": "off", "detail": "EMBEDDING_ENABLED is False"}
        elif off == "space":
            embedding |= {"status": "off", "detail": space_mismatch(self.table, self.settings)}
        elif off == "migrating":
            embedding |= {"status": "off", "detail": "vectors are made anew once all memories are back"}
        store = {"name": "lancedb", "status": "ok", "detail": ""}
        if self.table.is_migrating:
            store["detail"] = migrating(share_back)
        elif self.table.repaired:
            store["detail"] = "repaired at start; set aside: " + ", ".join(self.table.repaired)
        return [
            store,
            embedding,
            {"name": "postgres"} | _state(self.bookkeeping),
            {"name": "redis"} | _state(self.cache),
        ]

    async def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether memories can be served, and what does not work, in words fit for the public."""
        degraded: dict[str, Any] = {}
        share = None
        unreadable = ""
        try:
            share = await self.table.share_back()
            with translated("be read"):
                await self.table.lance.version()
        except Problem as error:
            unreadable = error.detail
        for part in self.dependencies(share):
            self.metrics.set_dependency(part["name"], part["status"] == "ok")
            if part["status"] == "down":
                degraded[part["name"]] = "down"
        if self.search.vectors_off == "space":
            degraded["embedding"] = space_mismatch(self.table, self.settings)
        if unreadable:
            self.metrics.set_dependency("lancedb", False)
            return False, degraded | {"lancedb": unreadable}
        if self.table.is_migrating:
            degraded["migrating"] = migrating(share)
        return True, degraded


def _state(part: Any) -> dict[str, Any]:
    return {
        "status": "ok" if part.healthy else "down",
        "detail": part.reason or "",
        "since": getattr(part, "since", None),
    }


def migrating(share_back: float | None) -> str:
    """One line on a migration that runs."""
    if share_back is None:
        return "a migration runs: the memories are being dumped; all can be read, writes are refused until it ends"
    return f"a migration runs: {share_back:.0%} of the memories can be read, writes are refused until it ends"


def space_mismatch(table: Table, settings: Settings) -> str:
    """One line on vectors of another space, with the way out."""
    have, want = table.space, settings.space
    return (
        f"the memories' vectors are of {have.model} ({have.revision or 'no revision'}, {have.dim} wide), "
        f"the configuration asks for {want.model} ({want.revision or 'no revision'}, {want.dim} wide): "
        "search is text only and saves are queued until you run "
        f"`warmstart migrate dimension --to {want.dim}`, or set the old model again"
    )


async def _probe(embedder: Embedder, cache: Cache) -> None:
    """While the provider, or the cache, is down, ask it now and then: health heals without waiting for a caller."""
    while True:
        await asyncio.sleep(PROBE_S)
        if not embedder.healthy:
            with suppress(EmbeddingError):
                await embedder.embed_query("probe", PROBE_S)
        if not cache.healthy:
            with suppress(CacheUnavailable):
                await cache.pipeline(("PING",))


@asynccontextmanager
async def open_runtime(settings: Settings) -> AsyncIterator[Runtime]:
    """Open everything the settings name. Only the store must be there; all else may be down.

    Raises ConfigError, StoreUnavailable or DiskFull.
    """
    async with AsyncExitStack() as stack:
        metrics = Metrics()
        settings.warmstart_home.mkdir(parents=True, exist_ok=True, mode=0o700)
        cache = open_cache(settings)
        stack.push_async_callback(cache.close)
        local = None
        if not settings.openai_base_url and settings.embedding_enabled:
            from warmstart.local_embedder import LocalEmbedder

            local = LocalEmbedder()
            stack.push_async_callback(local.stop)
        # the model takes as long as what else is opened
        model = asyncio.create_task(local.start() if local else asyncio.sleep(0))
        stack.push_async_callback(asyncio.wait, {model})
        stack.callback(model.cancel)
        table = await open_table(settings.lancedb, settings.space, settings.index_cache_bytes)
        dsn = settings.database_url.get_secret_value()
        if not dsn:
            from warmstart.postgres import EmbeddedPostgres

            postgres = EmbeddedPostgres(settings.warmstart_home / "postgres")
            dsn = await postgres.start()
            stack.push_async_callback(postgres.stop)
        await model
        if local:
            embedder = Embedder(settings, cache, base_url=local.base_url, transport=local.transport, metrics=metrics)
        else:
            embedder = Embedder(settings, cache, base_url=settings.openai_base_url, metrics=metrics)
        stack.push_async_callback(embedder.close)
        bookkeeping = Bookkeeping(dsn)
        await bookkeeping.open()
        stack.push_async_callback(bookkeeping.close)
        keys = KeyRing(bookkeeping, settings.warmstart_home / "keys.json", settings.key_snapshot_max_hours)
        await keys.start()
        stack.push_async_callback(keys.stop)
        writer = Writer(table, settings.space if settings.embedding_enabled else None)
        writer.start()
        stack.push_async_callback(writer.close)
        maintenance = Maintenance(table, writer, settings.vector_index_min_rows, settings.version_retention_s)
        search = Search(settings, table, embedder, maintenance)
        stack.push_async_callback(search.close)
        probing = asyncio.create_task(_probe(embedder, cache))
        stack.push_async_callback(asyncio.wait, {probing})
        stack.callback(probing.cancel)
        if table.is_migrating:
            log.warning("store.migrating", detail=migrating(await table.share_back()))
        elif search.vectors_off == "space":
            log.error("store.space", detail=space_mismatch(table, settings))
        runtime = Runtime(
            settings, metrics, cache, embedder, table, writer, maintenance, search, bookkeeping, keys,
            RateLimiter(cache),
        )  # fmt: skip
        watching = asyncio.create_task(runtime.activity.watch(lambda: runtime.rung()[0], Inspector(table).queued))
        stack.push_async_callback(asyncio.wait, {watching})
        stack.callback(watching.cancel)
        yield runtime
