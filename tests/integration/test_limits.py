"""Every limit one below, at, and one above it, against the running service: refused whole, with field, limit, size."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from integration.service import App, Tenant, problem_type

pytestmark = pytest.mark.asyncio(loop_scope="module")

META_FRAME = len(json.dumps({"k": ""}))


def metadata(size: int) -> dict[str, Any]:
    """An object that is `size` bytes of JSON, as the limit counts them."""
    return {"k": "x" * (size - META_FRAME)}


def deep(levels: int) -> dict[str, Any]:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return dict(value)


#: Field, the largest that is taken, the smallest that is not.
LARGEST: list[tuple[str, Any, Any]] = [
    ("content", "x" * 8_000, "x" * 8_001),
    ("content", "ü" * 8_000, "ü" * 8_001),
    ("content", "🦭" * 8_000, "🦭" * 8_001),
    ("content", "x", ""),
    ("title", "t" * 200, "t" * 201),
    ("title", "t", ""),
    ("facts", ["f" * 300] * 20, ["f"] * 21),
    ("facts", ["f" * 300], ["f" * 301]),
    ("facts", [], [""]),
    ("tags", ["t" * 64] * 20, ["t"] * 21),
    ("tags", ["t" * 64], ["t" * 65]),
    ("tags", [], [""]),
    ("entities", ["e" * 64] * 20, ["e"] * 21),
    ("entities", ["e" * 64], ["e" * 65]),
    ("source", "s" * 200, "s" * 201),
    ("importance", 1, 1.0000001),
    ("importance", 0, -0.0000001),
    ("metadata", metadata(4_096), metadata(4_097)),
    ("metadata", {}, []),
    ("namespace", "n" * 64, "n" * 65),
    ("namespace", "0", ""),
    ("namespace", "a-b_c.d", "-a"),
    ("namespace", "a", "A"),
    ("namespace", "a.", ".a"),
    ("namespace", "a_", "_a"),
    ("namespace", "a-", "a b"),
    ("namespace", "code-x", "a/b"),
    ("namespace", "n", "n\n"),
    ("namespace", "n", "ü"),
    ("type", "other", "others"),
    ("occurred_at", "2026-05-01T12:00:00Z", "yesterday"),
    ("occurred_at", "0001-01-01T00:00:00Z", "0000-01-01T00:00:00Z"),
    ("occurred_at", "9999-12-31T23:59:59Z", "10000-01-01T00:00:00Z"),
]


@pytest.mark.parametrize(("field", "largest", "too_large"), LARGEST)
async def test_the_fields_of_a_memory(alice: Tenant, field: str, largest: Any, too_large: Any) -> None:
    for operation in ("save", "batch", "mcp"):
        body = {"content": f"{operation} refused", field: too_large}
        if operation == "save":
            problem = await alice.post("/v1/memories", body, 422)
        elif operation == "batch":
            problem = await alice.post("/v1/memories/batch", {"memories": [{"content": "good"}, body]}, 422)
            assert problem["field"].startswith("memories.1.")
            problem["field"] = problem["field"].removeprefix("memories.1.")
        else:
            answer = await alice.mcp("memory_save", **body)
            if not isinstance(too_large, type(largest)) and not isinstance(too_large, float):
                assert answer["code"] == -32602  # a type is the programmer's fault
                continue
            assert answer["isError"] is True
            problem = json.loads(answer["content"][0]["text"])
        assert problem_type(problem) == "invalid"
        assert problem["field"].split(".")[0] == field
        assert problem["detail"]
        [fault] = [e for e in problem["errors"] if field in e["field"]]
        if isinstance(too_large, str | list | dict) and "pattern" not in fault["problem"]:
            assert "size" in fault
    assert await alice.page() == []

    saved = await alice.post("/v1/memories", {"content": "taken", field: largest}, 201)
    read = await alice.get(f"/v1/memories/{saved['id']}")
    if field != "occurred_at":
        assert read[field] == largest
    [again] = await alice.batch({"content": "taken too", field: largest})
    if field == "content":
        assert again == saved["id"]
    edited = await alice.patch(f"/v1/memories/{saved['id']}", {field: too_large}, 422)
    assert edited["field"].split(".")[0] == field
    assert await alice.get(f"/v1/memories/{saved['id']}") == read


async def test_one_below_each_length(alice: Tenant) -> None:
    saved = await alice.post(
        "/v1/memories",
        {
            "content": "x" * 7_999, "title": "t" * 199, "facts": ["f" * 299] * 19, "tags": ["t" * 63] * 19,
            "entities": ["e" * 63] * 19, "source": "s" * 199, "metadata": metadata(4_095), "namespace": "n" * 63,
            "importance": 0.999,
        },
        201,
    )  # fmt: skip
    assert (await alice.found("x" * 7_999, limit=50))[0] == saved["id"]


@pytest.mark.parametrize("char", ["\x00", "\ud800"])
async def test_what_cannot_be_stored_is_refused(alice: Tenant, char: str) -> None:
    headers = {"content-type": "application/json"}
    for field in ("content", "title", "source"):
        body = json.dumps({"content": "good", field: f"a{char}b"})
        response = await alice.http.post("/v1/memories", content=body, headers=headers)
        assert (response.status_code, response.json()["field"]) == (422, field)
    for field in ("facts", "tags", "entities"):
        body = json.dumps({"content": "good", field: ["good", f"a{char}b"]})
        response = await alice.http.post("/v1/memories", content=body, headers=headers)
        assert (response.status_code, response.json()["field"]) == (422, f"{field}.1")
    for value in ({"k": f"a{char}b"}, {f"a{char}b": 1}):
        body = json.dumps({"content": "good", "metadata": value})
        response = await alice.http.post("/v1/memories", content=body, headers=headers)
        assert (response.status_code, response.json()["field"]) == (422, "metadata")
    assert await alice.page() == []


async def test_metadata_may_be_as_deep_as_a_body(alice: Tenant) -> None:
    saved = await alice.save("deep", metadata=deep(31))
    assert (await alice.get(f"/v1/memories/{saved['id']}"))["metadata"] == deep(31)
    assert (await alice.save("deeper", metadata=deep(32), status=400))["status"] == 400


@pytest.mark.parametrize("count", [1, 99, 100])
async def test_a_batch_of(alice: Tenant, count: int) -> None:
    assert len(await alice.batch(*(f"b{i}" for i in range(count)))) == count


@pytest.mark.parametrize("count", [0, 101])
async def test_a_batch_of_too_few_or_many(alice: Tenant, count: int) -> None:
    problem = await alice.post("/v1/memories/batch", {"memories": [{"content": f"b{i}"} for i in range(count)]}, 422)
    assert (problem["field"], problem["errors"][0]["size"]) == ("memories", count)
    assert problem["errors"][0]["limit"] in (1, 100)
    assert await alice.page() == []


async def test_the_largest_batch_there_can_be(alice: Tenant) -> None:
    """100 times everything at its limit is under the limit of a body."""
    items = [
        {"content": f"{i:03}" + "x" * 7_997, "title": "t" * 200, "facts": ["f" * 300] * 20, "tags": ["t" * 64] * 20,
         "entities": ["e" * 64] * 20, "source": "s" * 200, "metadata": metadata(4_096)}
        for i in range(100)
    ]  # fmt: skip
    assert len(await alice.batch(*items)) == 100


SEARCHES: list[tuple[str, list[Any], list[Any]]] = [
    ("query", ["q", "q" * 16_383, "q" * 16_384], ["", "q" * 16_385]),
    ("limit", [1, 49, 50], [0, 51, -1]),
    ("min_score", [0, 0.03278, 2 / 61], [-0.001, 0.0328]),
    ("min_importance", [0, 0.5, 1], [-0.1, 1.1]),
    ("namespace", ["n" * 64], ["n" * 65, "N", ""]),
    ("tags", [[], ["t" * 64] * 20], [["t"] * 21, ["t" * 65], [""]]),
    ("entities", [["e" * 64] * 20], [["e"] * 21, ["e" * 65]]),
    ("source", ["", "s" * 200], ["s" * 201]),
    ("type", ["goal", ["goal"]], ["goals", [], ["goals"], ["goal"] * 11]),
    ("occurred_from", ["2026-01-01T00:00:00Z"], ["never"]),
]


@pytest.mark.parametrize(("field", "good", "bad"), SEARCHES)
async def test_the_fields_of_a_search(alice: Tenant, field: str, good: list[Any], bad: list[Any]) -> None:
    await alice.batch("q")
    for value in good:
        await alice.post("/v1/search", {"query": "q", field: value})
        assert (await alice.mcp("memory_search", **{"query": "q", field: value}))["isError"] is False
    for value in bad:
        problem = await alice.post("/v1/search", {"query": "q", field: value}, 422)
        assert problem["field"].split(".")[0] == field
        answer = await alice.mcp("memory_search", **{"query": "q", field: value})
        assert answer["isError"] is True


async def test_a_window_must_not_be_empty(alice: Tenant) -> None:
    at = "2026-01-01T00:00:00Z"
    problem = await alice.search("q", occurred_from=at, occurred_to=at, status=422)
    assert "occurred_from must be before occurred_to" in problem["detail"]


async def test_no_search_gives_more_than_its_limit(alice: Tenant) -> None:
    await alice.batch(*(f"walrus {i}" for i in range(60)))
    assert len(await alice.found("walrus")) == 10
    for limit in (1, 49, 50):
        assert len(await alice.found("walrus", limit=limit)) == limit


@pytest.mark.parametrize(("path", "most", "default"), [("/v1/memories", 200, 50), ("/v1/recall", 50, 10)])
async def test_no_page_is_longer_than_its_limit(alice: Tenant, path: str, most: int, default: int) -> None:
    for start in range(0, 210, 70):
        await alice.batch(*(f"m{i}" for i in range(start, start + 70)))
    assert len((await alice.get(path))["memories"]) == default
    for limit in (1, most - 1, most):
        assert len((await alice.get(path, limit=limit))["memories"]) == limit
    for limit in (0, most + 1, "x", "1.0", " 1", "+1"):
        assert (await alice.get(path, status=422, limit=limit))["field"] == "limit"
    assert (await alice.get(path, status=422, cursor="c" * 513))["field"] == "cursor"


CONTEXTS: list[tuple[str, list[Any], list[Any]]] = [
    ("query", ["", "q" * 16_384], ["q" * 16_385]),
    ("token_budget", [1, 4_000], [0, 4_001]),
    ("budget_ms", [1, 5_000], [0, 5_001]),
    ("conversation_id", ["c", "c" * 200], ["", "c" * 201]),
]


@pytest.mark.parametrize(("field", "good", "bad"), CONTEXTS)
async def test_the_fields_of_a_context(alice: Tenant, field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        await alice.post("/v1/context", {"query": "q", field: value})
    for value in bad:
        assert (await alice.post("/v1/context", {"query": "q", field: value}, 422))["field"] == field


@pytest.mark.parametrize(("path", "limit"), [("/v1/memories", 1 << 20), ("/v1/memories/batch", 8 << 20)])
async def test_the_size_of_a_body(alice: Tenant, path: str, limit: int) -> None:
    one = {"content": f"body for {path}"}
    body = json.dumps(one if path == "/v1/memories" else {"memories": [one]}).encode()
    headers = {"content-type": "application/json"}
    for size, status in ((limit + 1, 413), (limit - 1, (200, 201)), (limit, 200)):
        response = await alice.http.post(path, content=body + b" " * (size - len(body)), headers=headers)
        assert response.status_code in (status if isinstance(status, tuple) else (status,)), size
        if status == 413:
            assert (problem_type(response.json()), response.json()["limit"]) == ("too-large", limit)
            assert await alice.page() == []


async def test_faults_of_form(alice: Tenant) -> None:
    for body, field in (
        ({}, "content"), ({"content": "x", "contents": 1}, "contents"), ({"content": 1}, "content"),
        ({"content": None}, "content"), ({"content": "x", "importance": "1"}, "importance"),
        ({"content": "x", "importance": True}, "importance"), ({"content": "x", "tags": "a"}, "tags"),
        ({"content": "x", "tags": [1]}, "tags.0"), ({"content": "x", "user_id": "someone"}, "user_id"),
        ({"content": "x", "id": "mem_1"}, "id"), ({"content": "x", "embedding": []}, "embedding"),
    ):  # fmt: skip
        assert (await alice.post("/v1/memories", body, 422))["field"] == field
        assert (await alice.mcp("memory_save", **body))["code"] == -32602
    for wrong in ([], "x", 1, True):
        assert (await alice.post("/v1/memories", wrong, 422))["status"] == 422
    assert (await alice.http.post("/v1/memories", content=b"{", headers={"content-type": "application/json"})
            ).status_code == 400  # fmt: skip
    assert (await alice.http.post("/v1/memories", content=b"{}")).status_code == 415
    assert await alice.page() == []


# -- rates


async def test_600_requests_a_minute_a_key(app: App, bob: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.runtime.limiter, "_clock", lambda: 1_900_000_010.0)
    tenant = await app.tenant(unlimited=False)
    answers = []
    for _ in range(12):
        answers += await asyncio.gather(*(tenant.http.get("/v1/memories/x") for _ in range(50)))
    assert {a.status_code for a in answers} == {404}
    assert {a.headers["ratelimit-limit"] for a in answers} == {"600"}
    assert sorted(int(a.headers["ratelimit-remaining"]) for a in answers) == list(range(600))
    refused = await tenant.http.get("/v1/memories")
    assert (refused.status_code, problem_type(refused.json())) == (429, "rate-limited")
    assert refused.headers["ratelimit-remaining"] == "0"
    wait = int(refused.headers["retry-after"])
    assert 1 <= wait <= 60
    assert refused.json()["retry_after"] == wait
    mcp = await tenant.http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "ping"})
    assert mcp.status_code == 429
    assert (await bob.http.get("/v1/memories")).status_code == 200  # another key has its own
    monkeypatch.setattr(app.runtime.limiter, "_clock", lambda: 1_900_000_010.0 + wait)
    assert (await tenant.http.get("/v1/memories")).headers["ratelimit-remaining"] == "599"


async def test_60_failed_logins_a_minute_an_address(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.runtime.limiter, "_clock", lambda: 1_900_000_500.0)
    wrong = app.client("ws_sk_wrong", address="192.0.2.1")
    codes = [(await wrong.get("/v1/memories")).status_code for _ in range(62)]
    assert codes == [401] * 60 + [429] * 2
    refused = await wrong.get("/v1/memories")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    right = app.client(alice.key, address="192.0.2.1")
    assert (await right.get("/v1/memories")).status_code == 429  # guessing stops for the whole address
    assert (await app.client("ws_sk_wrong", address="192.0.2.2").get("/v1/memories")).status_code == 401
    assert (await alice.http.get("/v1/memories")).status_code == 200
