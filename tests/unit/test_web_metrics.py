"""Each method of Metrics moves the figure it names, once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from warmstart.metrics import Metrics

COUNTS: list[tuple[Callable[[Metrics], None], str, dict[str, str], float]] = [
    (lambda m: m.search("hybrid", 0.2), "searches_total", {"mode": "hybrid"}, 1),
    (lambda m: m.search("scan", 0.2), "search_seconds_sum", {"mode": "scan"}, 0.2),
    (lambda m: m.context(0.3), "context_seconds_sum", {}, 0.3),
    (lambda m: m.degraded("search", "budget"), "degraded_total", {"operation": "search", "reason": "budget"}, 1),
    (lambda m: m.saved("inline"), "saves_total", {"outcome": "inline"}, 1),
    (lambda m: m.saved("queued", 100), "saves_total", {"outcome": "queued"}, 100),
    (lambda m: m.embedded("query", 0.1), "embedding_seconds_sum", {"kind": "query"}, 0.1),
    (
        lambda m: m.embedding_failed("document", "timeout"),
        "embedding_failures_total",
        {"kind": "document", "reason": "timeout"},
        1,
    ),
    (lambda m: m.tenant_assertion(), "tenant_assertions_total", {}, 1),
    (lambda m: m.login("ok"), "logins_total", {"outcome": "ok"}, 1),
    (lambda m: m.worker_embedded(32), "worker_embedded_total", {}, 32),
    (lambda m: m.worker_failed("http", 2), "worker_failed_total", {"reason": "http"}, 2),
    (lambda m: m.worker_swept(5), "worker_swept_total", {}, 5),
    (lambda m: m.optimized("memories", 2.0), "worker_optimize_seconds_sum", {"table": "memories"}, 2.0),
    (lambda m: m.reconciled("missing", 4), "worker_reconciled_total", {"kind": "missing"}, 4),
    (lambda m: m.set_queue(7, 3, 60.0), "queued_memories", {}, 7),
    (lambda m: m.set_queue(7, 3, 60.0), "failed_memories", {}, 3),
    (lambda m: m.set_queue(7, 3, 60.0), "queue_age_seconds", {}, 60),
    (lambda m: m.set_compaction_lag(300.0), "compaction_lag_seconds", {}, 300),
    (lambda m: m.set_unindexed_rows("text", 9), "unindexed_rows", {"index": "text"}, 9),
    (lambda m: m.set_table_versions("memories", 12), "table_versions", {"table": "memories"}, 12),
    (lambda m: m.set_dependency("redis", True), "dependency_up", {"name": "redis"}, 1),
    (lambda m: m.set_dependency("redis", False), "dependency_up", {"name": "redis"}, 0),
    (lambda m: m.request_started(), "http_in_flight", {}, 1),
]


@pytest.mark.parametrize(("move", "name", "labels", "value"), COUNTS, ids=[f"{c[1]}-{c[3]}" for c in COUNTS])
def test_each_method_moves_its_figure(
    move: Callable[[Metrics], None], name: str, labels: dict[str, str], value: float
) -> None:
    metrics, untouched = Metrics(), Metrics()
    move(metrics)
    assert metrics.registry.get_sample_value(f"warmstart_{name}", labels) == value
    assert not untouched.registry.get_sample_value(f"warmstart_{name}", labels)


def test_the_text_is_prometheus_own() -> None:
    metrics = Metrics()
    metrics.saved("inline")
    text = metrics.render().decode()
    assert '# TYPE warmstart_saves_total counter\nwarmstart_saves_total{outcome="inline"} 1.0' in text
    assert "process_resident_memory_bytes" in text


def test_the_buckets_hold_the_budgets() -> None:
    metrics = Metrics()
    metrics.search("hybrid", 0.8)
    for bound in ("0.5", "0.8", "1.0", "1.5", "2.0"):
        labels = {"mode": "hybrid", "le": bound}
        inside = metrics.registry.get_sample_value("warmstart_search_seconds_bucket", labels)
        assert inside == (0 if bound == "0.5" else 1)
