"""Every row of the REST table, and the status each kind of fault answers with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from fakes.memory_api import OTHER_KEY, FakeRuntime, InMemoryAPI
from fakes.web import bearer, serving
from warmstart.errors import (
    PROBLEM_BASE,
    AuthUnavailable,
    Conflict,
    DiskFull,
    Duplicate,
    Migrating,
    Problem,
    StoreUnavailable,
    TenantAssertion,
)
from warmstart.memory import MAX_CONTENT

UNKNOWN = "mem_" + "0" * 26


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeRuntime, TestClient]]:
    runtime = FakeRuntime()
    with serving(runtime) as client:
        yield runtime, client


@pytest.fixture
def runtime(served: tuple[FakeRuntime, TestClient]) -> FakeRuntime:
    served[0].reset()
    return served[0]


@pytest.fixture
def tenant(runtime: FakeRuntime) -> InMemoryAPI:
    return runtime.service("alice")


@pytest.fixture
def http(served: tuple[FakeRuntime, TestClient], runtime: FakeRuntime) -> TestClient:
    return served[1]


def saved(http: TestClient, content: str = "use uv, not pip", **fields: object) -> dict[str, object]:
    return http.post("/v1/memories", json={"content": content, **fields}).json()


def problem(response: object, status: int, kind: str) -> dict[str, object]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert body["type"] == PROBLEM_BASE + kind
    assert body["status"] == status
    assert body["detail"]
    return body


def test_save_answers_201_with_where_it_is_and_its_etag(http: TestClient) -> None:
    response = http.post("/v1/memories", json={"content": "use uv", "tags": ["tools"]})
    memory = response.json()
    assert response.status_code == 201
    assert memory["duplicate"] is False
    assert response.headers["location"] == f"/v1/memories/{memory['id']}"
    read = http.get(response.headers["location"])
    assert read.headers["etag"] == response.headers["etag"]
    assert read.json()["tags"] == ["tools"]


def test_saving_the_same_again_answers_200_and_says_so(http: TestClient) -> None:
    first = saved(http)
    response = http.post("/v1/memories", json={"content": "use uv, not pip"})
    assert response.status_code == 200
    assert response.json()["duplicate"] is True
    assert response.json()["id"] == first["id"]
    assert "location" not in response.headers


def test_nulls_are_shown_only_where_they_mean_something(http: TestClient) -> None:
    memory = saved(http)
    assert "deleted_at" not in memory
    assert "expires_at" not in memory
    page = http.get("/v1/memories").json()
    assert page["next_cursor"] is None
    assert "deleted_at" not in page["memories"][0]
    hit = http.post("/v1/search", json={"query": "uv"}).json()["hits"][0]
    assert hit["ranks"] == {"vector": None, "text": 1}
    assert "expires_at" not in hit
    http.delete(f"/v1/memories/{memory['id']}")
    (trashed,) = http.get("/v1/memories?only_deleted=true").json()["memories"]
    assert trashed["deleted_at"] < trashed["expires_at"]


def test_batch_reports_each_item(http: TestClient) -> None:
    first = saved(http, "a")
    response = http.post("/v1/memories/batch", json={"memories": [{"content": "a"}, {"content": "b"}]})
    assert response.status_code == 200
    body = response.json()
    assert [r["status"] for r in body["results"]] == ["duplicate", "created"]
    assert body["results"][0]["id"] == first["id"]
    assert (body["created"], body["duplicates"]) == (1, 1)


def test_list_filters_and_pages(http: TestClient) -> None:
    for n in range(3):
        saved(http, f"note {n}", namespace="work", type="gotcha", tags=["x"], source="me")
    saved(http, "other")
    query = "namespace=work&type=gotcha&tag=x&source=me&limit=2&include_deleted=false"
    page = http.get(f"/v1/memories?{query}").json()
    assert [m["content"] for m in page["memories"]] == ["note 2", "note 1"]
    rest = http.get(f"/v1/memories?{query}&cursor={page['next_cursor']}").json()
    assert [m["content"] for m in rest["memories"]] == ["note 0"]
    assert rest["next_cursor"] is None


def test_recall_orders_by_importance(http: TestClient) -> None:
    saved(http, "minor", importance=0.1)
    saved(http, "major", importance=0.9)
    saved(http, "middle")
    page = http.get("/v1/recall?order=importance&since=2025-06-01T12:00:00Z&limit=2").json()
    assert [m["content"] for m in page["memories"]] == ["major", "middle"]


def test_counts_namespaces_rename_and_delete(http: TestClient) -> None:
    saved(http, "a", namespace="old", type="goal")
    assert http.get("/v1/memories/counts").json() == {
        "active": 1,
        "trashed": 0,
        "namespaces": {"old": 1},
        "types": {"goal": 1},
    }
    renamed = http.patch("/v1/namespaces/old", json={"name": "new"})
    assert (renamed.status_code, renamed.json()) == (200, {"name": "new", "memories": 1})
    assert http.delete("/v1/namespaces/new").json() == {"name": "new", "memories": 1}
    assert http.get("/v1/namespaces").json() == {"namespaces": [{"name": "new", "active": 0, "trashed": 1}]}


def test_edit_in_place_depends_on_the_etag(http: TestClient) -> None:
    memory = saved(http)
    path = f"/v1/memories/{memory['id']}"
    etag = http.get(path).headers["etag"]
    edited = http.patch(path, json={"importance": 1}, headers={"If-Match": etag})
    assert edited.status_code == 200
    assert edited.json()["importance"] == 1
    assert edited.headers["etag"] != etag
    problem(http.patch(path, json={"importance": 0}, headers={"If-Match": etag}), 412, "stale")
    assert http.patch(path, json={"importance": 0}, headers={"If-Match": "*"}).status_code == 200
    assert http.patch(path, json={"importance": 0.2}).status_code == 200


@pytest.mark.parametrize("value", ["abc", '"a", "b"', 'W/"a"', '"', '""', '"' + "x" * 65 + '"'])
def test_an_if_match_of_another_form_is_400(http: TestClient, value: str) -> None:
    path = f"/v1/memories/{saved(http)['id']}"
    problem(http.patch(path, json={"importance": 1}, headers={"If-Match": value}), 400, "malformed")
    problem(http.delete(path, headers={"If-Match": value}), 400, "malformed")
    assert http.get(path).json()["importance"] == 0.5


def test_delete_restore_and_delete_for_good(http: TestClient) -> None:
    path = f"/v1/memories/{saved(http)['id']}"
    problem(http.delete(path, headers={"If-Match": '"0"'}), 412, "stale")
    etag = http.get(path).headers["etag"]
    deleted = http.delete(path, headers={"If-Match": etag})
    assert (deleted.status_code, deleted.content) == (204, b"")
    assert "deleted_at" in http.get(path).json()
    restored = http.post(f"{path}/restore")
    assert "deleted_at" not in restored.json()
    assert restored.headers["etag"]
    assert http.delete(f"{path}?hard=true").status_code == 204
    problem(http.get(path), 404, "not-found")


def test_restore_is_409_once_the_days_are_over(http: TestClient, tenant: InMemoryAPI) -> None:
    path = f"/v1/memories/{saved(http)['id']}"
    http.delete(path)
    tenant.forget_trash(days=31)
    problem(http.post(f"{path}/restore"), 409, "expired")


def test_context_and_health(http: TestClient) -> None:
    memory = saved(http)
    context = http.post("/v1/context", json={"query": "uv"}).json()
    assert context["ids"] == [memory["id"]]
    assert "use uv, not pip" in context["context"]
    assert http.get("/v1/health").json()["mode"] == "hybrid"


def test_a_tenant_sees_nothing_of_another(http: TestClient) -> None:
    path = f"/v1/memories/{saved(http)['id']}"
    theirs = problem(http.get(path, headers=bearer(OTHER_KEY)), 404, "not-found")
    unknown = problem(http.get(f"/v1/memories/{UNKNOWN}", headers=bearer(OTHER_KEY)), 404, "not-found")
    assert theirs.keys() == unknown.keys()
    assert http.get("/v1/memories", headers=bearer(OTHER_KEY)).json()["memories"] == []


@pytest.mark.parametrize(
    "path",
    ["/v1/memories/mem_1", "/v1/memories/%00", f"/v1/memories/{UNKNOWN}%0A", "/v1/memories/MEM_" + "0" * 26],
)
def test_what_is_no_id_is_an_unknown_one(http: TestClient, tenant: InMemoryAPI, path: str) -> None:
    tenant.error = AssertionError("the service must not be asked")
    problem(http.get(path), 404, "not-found")
    problem(http.delete(path), 404, "not-found")


@pytest.mark.parametrize("name", ["UPPER", "a b", "-a", "a" * 65, "a%0A"])
def test_what_is_no_namespace_is_an_unknown_one(http: TestClient, name: str) -> None:
    problem(http.delete(f"/v1/namespaces/{name}"), 404, "not-found")


def test_values_out_of_range_are_422_with_field_limit_and_size(http: TestClient, tenant: InMemoryAPI) -> None:
    body = problem(http.post("/v1/memories", json={"content": "x" * (MAX_CONTENT + 1)}), 422, "invalid")
    assert body["field"] == "content"
    (fault,) = body["errors"]
    assert (fault["limit"], fault["size"]) == (MAX_CONTENT, MAX_CONTENT + 1)
    assert not tenant.rows
    assert http.post("/v1/memories", json={"content": "x" * MAX_CONTENT}).status_code == 201


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "content"),
        ({"content": "a", "colour": 1}, "colour"),
        ({"content": 1}, "content"),
        ({"content": "a\x00"}, "content"),
        ({"content": "a", "importance": "0.5"}, "importance"),
        ({"content": "a", "type": "poem"}, "type"),
        ({"content": "a", "tags": ["x", 1]}, "tags.1"),
        ([], ""),
    ],
)
def test_bodies_that_break_a_rule_are_422(http: TestClient, tenant: InMemoryAPI, body: object, field: str) -> None:
    assert problem(http.post("/v1/memories", json=body), 422, "invalid")["field"] == field
    assert not tenant.rows


def test_a_lone_surrogate_is_refused_in_content_and_stripped_from_a_query(http: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    refused = http.post("/v1/memories", content=rb'{"content": "a\ud800"}', headers=headers)
    assert problem(refused, 422, "invalid")["field"] == "content"
    saved(http, "abc")
    found = http.post("/v1/search", content=rb'{"query": "ab\ud800c\u0000"}', headers=headers)
    assert len(found.json()["hits"]) == 1
    problem(http.post("/v1/memories", content=rb'{"content": "a", "\ud800": 1}', headers=headers), 422, "invalid")


def test_an_answer_does_not_echo_a_flood_of_faults(http: TestClient) -> None:
    flood = {f"field{n}" + "x" * 1000: 1 for n in range(500)}
    response = http.post("/v1/memories", json={"content": "a", **flood})
    assert response.status_code == 422
    assert len(response.content) < 50_000
    assert len(response.json()["errors"]) == 20


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "limit"),
        ("limit=201", "limit"),
        ("limit=1.0", "limit"),
        ("limit=+1", "limit"),
        ("limit=%201", "limit"),
        ("limit=1_0", "limit"),
        ("limit=٣", "limit"),
        ("limit=" + "9" * 30, "limit"),
        ("limit=", "limit"),
        ("limit=1&limit=1", "limit"),
        ("include_deleted=1", "include_deleted"),
        ("include_deleted=yes", "include_deleted"),
        ("include_deleted=TRUE", "include_deleted"),
        ("colour=red", "colour"),
        ("namespace=", "namespace"),
        ("namespace=A", "namespace"),
        ("tag=%00", "tag"),
        ("tag=" + "x" * 65, "tag"),
        ("cursor=nonsense", "cursor"),
    ],
)
def test_query_parameters_are_strict(http: TestClient, query: str, field: str) -> None:
    assert problem(http.get(f"/v1/memories?{query}"), 422, "invalid")["field"] == field


@pytest.mark.parametrize(
    "query", ["limit=1", "limit=200", "only_deleted=true", "only_deleted=False", "tag=" + "x" * 64]
)
def test_query_parameters_at_their_limits(http: TestClient, query: str) -> None:
    assert http.get(f"/v1/memories?{query}").status_code == 200


@pytest.mark.parametrize("since", ["yesterday", "2025-13-01T00:00:00Z", "1717243200"])
def test_since_is_a_date_and_time(http: TestClient, since: str) -> None:
    assert problem(http.get(f"/v1/recall?since={since}"), 422, "invalid")["field"] == "since"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/v1/search"), ("DELETE", f"/v1/memories/{UNKNOWN}"), ("GET", "/v1/health"), ("GET", "/healthz")],
)
def test_an_unknown_parameter_is_refused_everywhere(http: TestClient, method: str, path: str) -> None:
    response = http.request(method, f"{path}?colour=red")
    assert problem(response, 422, "invalid")["field"] == "colour"


def test_a_query_string_that_is_no_utf8_or_endless_is_400(http: TestClient) -> None:
    problem(http.get("/v1/memories?tag=%ff"), 400, "malformed")
    problem(http.get("/v1/memories?" + "&".join(f"a{n}=1" for n in range(51))), 400, "malformed")


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (Duplicate("there already", id=UNKNOWN), 409, "duplicate", None),
        (Conflict("in the trash"), 409, "conflict", None),
        (Migrating("moving to 512 wide", retry_after=30), 503, "migrating", "30"),
        (StoreUnavailable("the directory is gone"), 503, "store-unavailable", "1"),
        (AuthUnavailable("no key can be checked"), 503, "auth-unavailable", "1"),
        (DiskFull("no space left"), 507, "disk-full", None),
        (TenantAssertion("a foreign row"), 500, "tenant-assertion", None),
    ],
)
def test_problems_of_the_service(
    http: TestClient, tenant: InMemoryAPI, error: Problem, status: int, kind: str, retry_after: str | None
) -> None:
    tenant.error = error
    for response in (
        http.post("/v1/memories", json={"content": "a"}),
        http.post("/v1/memories/batch", json={"memories": [{"content": "a"}]}),
        http.post("/v1/search", json={"query": "a"}),
        http.get("/v1/memories"),
        http.get("/v1/recall"),
        http.get(f"/v1/memories/{UNKNOWN}"),
        http.get("/v1/memories/counts"),
    ):
        body = problem(response, status, kind)
        assert response.headers.get("retry-after") == retry_after
        assert body.get("id") == error.extra.get("id")


def test_a_failed_tenant_check_is_counted(http: TestClient, runtime: FakeRuntime, tenant: InMemoryAPI) -> None:
    tenant.error = TenantAssertion("a foreign row")
    http.get("/v1/memories")
    assert runtime.metrics.registry.get_sample_value("warmstart_tenant_assertions_total") == 1
