"""Every metric of the service, defined once; api, service and worker count through the same methods.

Labels hold words from small fixed sets (a route's template, a mode, a reason):
never a path, a tenant, a query or an id.
"""

from __future__ import annotations

from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
#: Seconds; dense around the budgets of 0.5, 0.8, 1, 1.5 and 2 s.
LATENCY_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0,
)  # fmt: skip
#: Seconds of a compaction.
OPTIMIZE_BUCKETS: Final = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

SaveOutcome = Literal["inline", "queued", "duplicate"]
LoginOutcome = Literal["ok", "unauthorized", "rate_limited", "unavailable"]
EmbeddingKind = Literal["query", "document"]


class Metrics:
    """The counters of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"warmstart_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"warmstart_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str, *labels: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
            return Histogram(f"warmstart_{name}_seconds", text, labels, buckets=buckets, registry=registry)

        self._requests = counter("http_requests", "Requests answered.", "route", "method", "status")
        self._request_seconds = seconds("http_request", "Time to the end of an answer.", "route")
        self._in_flight = gauge("http_in_flight", "Requests being served.")
        self._logins = counter("logins", "API keys presented.", "outcome")

        self._searches = counter("searches", "Searches answered, by rung.", "mode")
        self._search_seconds = seconds("search", "Time of a search in the service.", "mode")
        self._context_seconds = seconds("context", "Time of a context block.")
        self._degraded = counter("degraded", "Answers given without something.", "operation", "reason")
        self._saves = counter("saves", "Memories saved; inline: with their vector.", "outcome")
        self._embedding_seconds = seconds("embedding", "Time of an embedding request.", "kind")
        self._embedding_failures = counter(
            "embedding_failures", "Embedding requests without a usable vector.", "kind", "reason"
        )
        self._tenant_assertions = counter("tenant_assertions", "Foreign rows caught; must stay 0.")

        self._worker_embedded = counter("worker_embedded", "Queued memories that got their vector.")
        self._worker_failed = counter("worker_failed", "Embedding attempts that failed.", "reason")
        self._worker_swept = counter("worker_swept", "Expired memories removed from the trash.")
        self._optimize_seconds = seconds("worker_optimize", "Time of a compaction.", "table", buckets=OPTIMIZE_BUCKETS)
        self._reconciled = counter("worker_reconciled", "Bookkeeping rows put right.", "kind")

        self._queued = gauge("queued_memories", "Memories that wait for their vector.")
        self._queue_age = gauge("queue_age_seconds", "For how long the longest-waiting memory is known to wait.")
        self._failed = gauge("failed_memories", "Memories whose embedding was given up.")
        self._compaction_lag = gauge("compaction_lag_seconds", "For how long something written waits for compaction.")
        self._unindexed_rows = gauge("unindexed_rows", "Rows an index has not folded in.", "index")
        self._table_versions = gauge("table_versions", "Versions of a table kept on disk.", "table")
        self._dependency_up = gauge("dependency_up", "1 where the dependency answers.", "name")

    def render(self) -> bytes:
        return generate_latest(self.registry)

    # web

    def request_started(self) -> None:
        self._in_flight.inc()

    def request_ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """`route` is the template ("/v1/memories/{id}")."""
        self._in_flight.dec()
        self._requests.labels(route, method, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def login(self, outcome: LoginOutcome) -> None:
        self._logins.labels(outcome).inc()

    # service

    def search(self, mode: str, seconds: float) -> None:
        self._searches.labels(mode).inc()
        self._search_seconds.labels(mode).observe(seconds)

    def context(self, seconds: float) -> None:
        self._context_seconds.observe(seconds)

    def degraded(self, operation: str, reason: str) -> None:
        """`reason` is one of the stable words of `degraded`, without figures in it."""
        self._degraded.labels(operation, reason).inc()

    def saved(self, outcome: SaveOutcome, count: int = 1) -> None:
        self._saves.labels(outcome).inc(count)

    def embedded(self, kind: EmbeddingKind, seconds: float) -> None:
        self._embedding_seconds.labels(kind).observe(seconds)

    def embedding_failed(self, kind: EmbeddingKind, reason: str) -> None:
        self._embedding_failures.labels(kind, reason).inc()

    def tenant_assertion(self) -> None:
        self._tenant_assertions.inc()

    # worker

    def worker_embedded(self, count: int) -> None:
        self._worker_embedded.inc(count)

    def worker_failed(self, reason: str, count: int = 1) -> None:
        self._worker_failed.labels(reason).inc(count)

    def worker_swept(self, count: int) -> None:
        self._worker_swept.inc(count)

    def optimized(self, table: str, seconds: float) -> None:
        self._optimize_seconds.labels(table).observe(seconds)

    def reconciled(self, kind: str, count: int) -> None:
        self._reconciled.labels(kind).inc(count)

    # state

    def set_queue(self, queued: int, failed: int, age_s: float) -> None:
        self._queued.set(queued)
        self._failed.set(failed)
        self._queue_age.set(age_s)

    def set_compaction_lag(self, seconds: float) -> None:
        self._compaction_lag.set(seconds)

    def set_unindexed_rows(self, index: str, rows: int) -> None:
        self._unindexed_rows.labels(index).set(rows)

    def set_table_versions(self, table: str, versions: int) -> None:
        self._table_versions.labels(table).set(versions)

    def set_dependency(self, name: str, up: bool) -> None:
        self._dependency_up.labels(name).set(up)
