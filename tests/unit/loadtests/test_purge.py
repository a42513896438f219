"""Whatever the run wrote is removed, nothing else is, and what stays is told."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest

from loadtests.purge import PAGE, PurgeFailed, counts, purge


class Memory:
    """What a purge sees of a server: namespaces, pages, deletions."""

    def __init__(self, rows: dict[str, int], trashed: dict[str, int] | None = None) -> None:
        self.rows = {
            f"{name}~{state}{i}": (name, state)
            for state, some in (("active", rows), ("trashed", trashed or {}))
            for name, count in some.items()
            for i in range(count)
        }
        self.refusals: list[httpx.Response] = []
        self.asked: list[str] = []
        self._lock = threading.Lock()

    def client(self) -> httpx.Client:
        return httpx.Client(base_url="http://127.0.0.1:1", transport=httpx.MockTransport(self.answer))

    def answer(self, request: httpx.Request) -> httpx.Response:
        with self._lock:
            path, query = request.url.path, request.url.params
            self.asked.append(f"{request.method} {path}")
            if request.method == "DELETE":
                assert query["hard"] == "true"
                if self.refusals:
                    return self.refusals.pop()
                return httpx.Response(204 if self.rows.pop(path.rsplit("/", 1)[1], None) else 404)
            if path == "/v1/namespaces":
                return httpx.Response(200, json={"namespaces": self._namespaces()})
            if path == "/v1/memories/counts":
                states = [state for _, state in self.rows.values()]
                return httpx.Response(200, json={s: states.count(s) for s in ("active", "trashed")})
            assert query["include_deleted"] == "true"
            ids = [i for i, (name, _) in self.rows.items() if name == query["namespace"]]
            start = int(query.get("cursor", 0))
            more = str(start + PAGE) if start + PAGE < len(ids) else None
            return httpx.Response(
                200, json={"memories": [{"id": i} for i in ids[start : start + PAGE]], "next_cursor": more}
            )

    def _namespaces(self) -> list[dict[str, Any]]:
        names = {name for name, _ in self.rows.values()}
        return [
            {"name": n, **{s: list(self.rows.values()).count((n, s)) for s in ("active", "trashed")}} for n in names
        ]


def test_only_the_namespaces_of_the_run_go_over_all_pages_and_out_of_the_trash() -> None:
    memory = Memory({"default": 3, "load-1-load-0": PAGE + 5, "load-1-load-1": 2, "load-10-load-0": 4}, {"load-1-x": 3})
    with memory.client() as client:
        assert purge([client], "load-1") == PAGE + 10
        assert counts(client) == (7, 0)
    assert {name for name, _ in memory.rows.values()} == {"default", "load-10-load-0"}


def test_each_tenant_is_purged() -> None:
    memories = [Memory({"load-1-a": 2}), Memory({"load-1-a": 3})]
    clients = [memory.client() for memory in memories]
    assert purge(clients, "load-1") == 5


def test_a_refusal_for_the_moment_is_tried_again() -> None:
    memory = Memory({"load-1-a": 2})
    memory.refusals = [httpx.Response(status, headers={"retry-after": "0"}) for status in (429, 503)]
    with memory.client() as client:
        assert purge([client], "load-1") == 2


@pytest.mark.parametrize("status", [400, 500, 507])
def test_a_refusal_for_good_is_told(status: int) -> None:
    memory = Memory({"load-1-a": 1})
    memory.refusals = [httpx.Response(status, text=json.dumps({"detail": "no"}))]
    with memory.client() as client, pytest.raises(PurgeFailed, match=f"{status}.*no"):
        purge([client], "load-1")


def test_what_is_written_meanwhile_is_told() -> None:
    memory = Memory({"load-1-a": 1})

    def answer(request: httpx.Request) -> httpx.Response:
        answered = memory.answer(request)
        if request.method == "DELETE":
            memory.rows["late"] = ("load-1-late", "active")
        return answered

    client = httpx.Client(base_url="http://127.0.0.1:1", transport=httpx.MockTransport(answer))
    with client, pytest.raises(PurgeFailed, match="load-1-late"):
        purge([client], "load-1")


def test_without_a_prefix_nothing_is_asked() -> None:
    memory = Memory({"default": 1})
    with memory.client() as client, pytest.raises(ValueError, match="everything"):
        purge([client], "")
    assert memory.asked == []
