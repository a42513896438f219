"""Tenants apart: with the predicates as they are, and by the second check alone where a predicate is gone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import httpx
import pytest
import pytest_asyncio
from structlog.testing import capture_logs

from integration.service import MISSING, App, Tenant, down, problem_type
from warmstart.errors import TenantAssertion
from warmstart.store import predicates as where
from warmstart.store.predicates import Predicate
from warmstart.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")

SECRET = "the secret walrus of bob"


@dataclass
class Two:
    """bob has memories of every kind; alice has one of her own."""

    app: App
    alice: Tenant
    bob: Tenant
    ready: str
    queued: str
    trashed: str


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two(app: App) -> Two:
    """Shared, since a read that is refused changes nothing: each test sees to that."""
    return await made(app)


async def made(app: App) -> Two:
    alice, bob = await app.tenant(), await app.tenant()
    [ready] = await bob.batch({"content": SECRET, "namespace": "bobs", "tags": ["secret"]})
    [trashed] = await bob.batch({"content": f"{SECRET}, trashed", "namespace": "bobs"})
    await alice.save("mine")
    await app.embed_all()
    await bob.delete(f"/v1/memories/{trashed}")
    [queued] = await bob.batch({"content": f"{SECRET}, queued", "namespace": "bobs"})
    return Two(app, alice, bob, ready, queued, trashed)


@contextmanager
def without_predicate() -> Iterator[None]:
    """As if the tenant's predicate had a hole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, "tenant", lambda _: Predicate("user_id IS NOT NULL"))
        yield


async def one_waits(two: Two) -> None:
    """What health counts, also where another test had the queue embedded."""
    if (await two.bob.get("/v1/health"))["queued"] == 0:
        [two.queued] = await two.bob.batch({"content": f"{SECRET}, queued {uuid4()}", "namespace": "bobs"})


async def everything(tenant: Tenant) -> Any:
    page = await tenant.get("/v1/memories", include_deleted="true", limit=200)
    return page["memories"]


# -- the predicate removed, over REST

Request = tuple[str, str, Any]
READS: dict[str, Request] = {
    "search": ("POST", "/v1/search", {"query": "secret walrus"}),
    "search with a filter": ("POST", "/v1/search", {"query": "secret walrus", "tags": ["secret"]}),
    "search of many terms": ("POST", "/v1/search", {"query": "secret " + " ".join(f"t{i}" for i in range(40))}),
    "context": ("POST", "/v1/context", {"query": "secret walrus"}),
    "list": ("GET", "/v1/memories", None),
    "list of the trash": ("GET", "/v1/memories?only_deleted=true", None),
    "list of everything": ("GET", "/v1/memories?include_deleted=true", None),
    "list by tag": ("GET", "/v1/memories?tag=secret", None),
    "recall": ("GET", "/v1/recall", None),
    "recall by importance": ("GET", "/v1/recall?order=importance", None),
    "counts": ("GET", "/v1/memories/counts", None),
    "namespaces": ("GET", "/v1/namespaces", None),
    "health": ("GET", "/v1/health", None),
    "get": ("GET", "/v1/memories/{ready}", None),
    "get from the trash": ("GET", "/v1/memories/{trashed}", None),
    "edit": ("PATCH", "/v1/memories/{ready}", {"importance": 1.0}),
    "delete": ("DELETE", "/v1/memories/{ready}", None),
    "delete for good": ("DELETE", "/v1/memories/{ready}?hard=true", None),
    "restore": ("POST", "/v1/memories/{trashed}/restore", None),
    "history": ("GET", "/v1/memories/{ready}/history", None),
    "export": ("GET", "/v1/export?format=ndjson", None),
    "restore a version": ("POST", "/v1/memories/{ready}/history/1/restore", None),
    "the duplicate check of a save": ("POST", "/v1/memories", {"content": SECRET, "namespace": "bobs"}),
    "the duplicate check of a batch": (
        "POST", "/v1/memories/batch", {"memories": [{"content": SECRET, "namespace": "bobs"}]}
    ),
}  # fmt: skip


async def ask(two: Two, method: str, path: str, body: Any) -> httpx.Response:
    path = path.format(ready=two.ready, trashed=two.trashed)
    return await two.alice.http.request(method, path, json=body) if body else await two.alice.http.request(method, path)


@pytest.mark.parametrize("read", READS)
async def test_a_foreign_row_ends_every_read(two: Two, read: str) -> None:
    await one_waits(two)
    before = await everything(two.bob)
    counted = two.app.metric("tenant_assertions_total")
    with without_predicate(), capture_logs() as logs:
        response = await ask(two, *READS[read])
    assert response.status_code == 500, response.text
    assert problem_type(response.json()) == "tenant-assertion"
    assert two.bob.user_id not in response.text
    assert "secret" not in response.text
    assert "walrus" not in response.text
    assert not [e for e in logs if "walrus" in json.dumps(e, default=str)]
    assert two.app.metric("tenant_assertions_total") == counted + 1
    assert {e["log_level"] for e in logs if e["event"] == "tenant.assertion"} == {"critical"}
    assert await everything(two.bob) == before


@pytest.mark.parametrize("query", ["secret walrus", "ecret wal"])
@pytest.mark.parametrize("path", ["/v1/search", "/v1/context"])
async def test_no_rung_swallows_it(two: Two, path: str, query: str) -> None:
    """Full-text alone, and the scan below it."""
    assert two.app.provider is not None
    await two.app.forget()
    with without_predicate(), down(two.app.provider):
        response = await two.alice.http.post(path, json={"query": query})
    assert (response.status_code, problem_type(response.json())) == (500, "tenant-assertion")
    assert "secret" not in response.text


async def test_the_vector_arm_alone_does_not_swallow_it(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("lance error: the inverted index can't be read")

    monkeypatch.setattr(type(two.app.runtime.table.lance.query()), "nearest_to_text", refuse)
    for filters in ({}, {"namespace": "bobs"}):
        with without_predicate():
            answer = await two.alice.search("secret walrus", status=500, **filters)
        assert problem_type(answer) == "tenant-assertion"


async def test_a_tenant_with_nothing_but_a_foreign_trash_learns_no_count(app: App, alice: Tenant, bob: Tenant) -> None:
    """Counting gives no rows back, and is checked all the same."""
    [trashed] = await bob.batch("trashed")
    await bob.delete(f"/v1/memories/{trashed}")
    with without_predicate():
        for path in ("/v1/memories/counts", "/v1/namespaces"):
            assert problem_type(await alice.get(path, status=500)) == "tenant-assertion"


async def test_the_worker_embeds_nothing_where_the_check_fails(app: App) -> None:
    two = await made(app)
    assert app.provider is not None
    await two.alice.batch("queued by alice")
    app.provider.requests.clear()
    worker = Worker(app.runtime)
    with without_predicate(), pytest.raises(TenantAssertion):
        await worker.backfill()
    assert app.provider.texts == []
    states = {m["content"]: m["embedding_status"] for m in await everything(two.bob)}
    assert states[f"{SECRET}, queued"] == "queued"


# -- the same over MCP

TOOLS: dict[str, dict[str, Any]] = {
    "memory_search": {"query": "secret walrus"},
    "memory_recall": {},
    "memory_get": {"id": "{ready}"},
    "memory_update": {"id": "{ready}", "importance": 1.0},
    "memory_delete": {"id": "{ready}"},
    "memory_save": {"content": SECRET, "namespace": "bobs"},
    "memory_list_namespaces": {},
    "memory_health": {},
}


@pytest.mark.parametrize("tool", TOOLS)
async def test_a_foreign_row_ends_every_tool(two: Two, tool: str) -> None:
    await one_waits(two)
    before = await everything(two.bob)
    counted = two.app.metric("tenant_assertions_total")
    arguments = {k: v.format(ready=two.ready) if isinstance(v, str) else v for k, v in TOOLS[tool].items()}
    with without_predicate(), capture_logs() as logs:
        result = await two.alice.mcp(tool, **arguments)
    assert result["isError"] is True, result
    assert "structuredContent" not in result
    problem = json.loads(result["content"][0]["text"])
    assert (problem["status"], problem_type(problem)) == (500, "tenant-assertion")
    assert "secret" not in json.dumps(result)
    assert two.app.metric("tenant_assertions_total") == counted + 1
    assert {e["log_level"] for e in logs if e["event"] == "tenant.assertion"} == {"critical"}
    assert await everything(two.bob) == before


async def test_a_foreign_row_ends_the_prompt(two: Two) -> None:
    counted = two.app.metric("tenant_assertions_total")
    with without_predicate():
        error = await two.alice.rpc("prompts/get", {"name": "context", "arguments": {"query": "secret walrus"}})
    assert problem_type(error["data"]) == "tenant-assertion"
    assert "walrus" not in json.dumps(error)
    assert two.app.metric("tenant_assertions_total") == counted + 1


# -- the predicate as it is


async def test_two_tenants_with_the_same_content(app: App, alice: Tenant, bob: Tenant) -> None:
    contents = [f"the walrus {i}" for i in range(10)]
    own = {tenant.user_id: set(await tenant.batch(*contents)) for tenant in (alice, bob)}
    assert not own[alice.user_id] & own[bob.user_id]
    await app.embed_all()
    assert app.provider is not None
    for tenant in (alice, bob):
        mine = own[tenant.user_id]
        assert set(await tenant.found("the walrus 3", limit=50)) == mine
        assert set(await tenant.page()) == mine
        assert {m["id"] for m in (await tenant.get("/v1/recall", limit=50))["memories"]} == mine
        assert set((await tenant.post("/v1/context", {"query": "walrus"}))["ids"]) <= mine
        assert (await tenant.get("/v1/memories/counts"))["active"] == 10
        assert (await tenant.save("the walrus 3", status=200))["id"] in mine
        await app.forget()
        with down(app.provider):
            assert set(await tenant.found("walrus", limit=50)) == mine
            assert set(await tenant.found("alru", limit=50)) == mine
        result = await tenant.mcp("memory_search", query="the walrus 3", limit=50)
        assert {hit["id"] for hit in result["structuredContent"]["hits"]} == mine


OPERATIONS: dict[str, Request] = {
    "get": ("GET", "/v1/memories/{id}", None),
    "edit": ("PATCH", "/v1/memories/{id}", {"importance": 1.0}),
    "delete": ("DELETE", "/v1/memories/{id}", None),
    "delete for good": ("DELETE", "/v1/memories/{id}?hard=true", None),
    "restore": ("POST", "/v1/memories/{id}/restore", None),
    "history": ("GET", "/v1/memories/{id}/history", None),
    "restore a version": ("POST", "/v1/memories/{id}/history/1/restore", None),
}


@pytest.mark.parametrize("operation", OPERATIONS)
async def test_anothers_id_looks_like_an_unknown_one(two: Two, operation: str) -> None:
    method, path, body = OPERATIONS[operation]
    before = await everything(two.bob)
    answers = []
    for memory_id in (MISSING, two.ready, two.queued, two.trashed):
        response = await two.alice.http.request(method, path.format(id=memory_id), json=body)
        volatile = {"x-request-id", "ratelimit-remaining", "ratelimit-reset"}
        headers = {k: v for k, v in response.headers.items() if k not in volatile}
        answers.append((response.status_code, response.content.replace(memory_id.encode(), b"ID"), headers))
    assert answers[0][0] == 404
    assert all(answer == answers[0] for answer in answers)
    assert await everything(two.bob) == before


@pytest.mark.parametrize("tool", ["memory_get", "memory_update", "memory_delete"])
async def test_anothers_id_looks_like_an_unknown_one_over_mcp(two: Two, tool: str) -> None:
    extra = {"importance": 1.0} if tool == "memory_update" else {}
    answers = []
    for memory_id in (MISSING, two.ready, two.trashed):
        result = await two.alice.mcp(tool, id=memory_id, **extra)
        answers.append(json.dumps(result).replace(memory_id, "ID"))
    assert json.loads(answers[0])["isError"] is True
    assert "not-found" in answers[0]
    assert len(set(answers)) == 1


async def test_anothers_namespace_is_not_there(app: App) -> None:
    two = await made(app)
    before = await everything(two.bob)
    assert (await two.alice.patch("/v1/namespaces/bobs", {"name": "mine"}, 404))["status"] == 404
    assert (await two.alice.delete("/v1/namespaces/bobs", 404))["status"] == 404
    # the name is free for her, though bob has it
    assert (await two.alice.patch("/v1/namespaces/default", {"name": "bobs"}))["memories"] == 1
    assert await everything(two.bob) == before


async def test_anothers_cursor_gives_nothing_of_theirs(app: App, alice: Tenant, bob: Tenant) -> None:
    await bob.batch(*(f"bob {i}" for i in range(5)))
    await alice.batch(*(f"alice {i}" for i in range(5)))
    page = await bob.get("/v1/memories", limit=2)
    response = await alice.http.get("/v1/memories", params={"limit": 50, "cursor": page["next_cursor"]})
    assert "bob" not in response.text
