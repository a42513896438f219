"""Bodies: content type, size, JSON, depth."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from starlette.requests import Request
from starlette.testclient import TestClient

from fakes.memory_api import FakeRuntime
from fakes.web import serving
from warmstart.errors import PROBLEM_BASE, MalformedRequest, TooLarge
from warmstart.memory import SearchRequest
from warmstart.web.decode import MAX_BATCH_BODY, MAX_BODY, MAX_DEPTH, parse_json, read_body

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def http() -> Iterator[TestClient]:
    with serving(FakeRuntime()) as client:
        yield client


def kind(response: object) -> tuple[int, str]:
    return response.status_code, response.json()["type"].removeprefix(PROBLEM_BASE)


def padded(size: int, body: str) -> bytes:
    """JSON of exactly so many bytes."""
    return body.encode() + b" " * (size - len(body))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize(
    ("path", "limit", "body"),
    [
        ("/v1/search", MAX_BODY, '{"query": "a"}'),
        ("/v1/memories/batch", MAX_BATCH_BODY, '{"memories": [{"content": "a"}]}'),
    ],
)
def test_size_one_below_at_and_one_above(http: TestClient, path: str, limit: int, body: str, chunked: bool) -> None:
    def send(size: int) -> object:
        content = padded(size, body)
        pieces = (content[i : i + 65_536] for i in range(0, size, 65_536))
        return http.post(path, content=pieces if chunked else content, headers=JSON)

    assert send(limit - 1).status_code == 200
    assert send(limit).status_code == 200
    refused = send(limit + 1)
    assert kind(refused) == (413, "too-large")
    assert refused.json()["limit"] == limit


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/json; charset=utf-8", 'Application/JSON; charset="UTF-8"']
)
def test_json_is_served(http: TestClient, content_type: str) -> None:
    response = http.post("/v1/search", content=b'{"query": "a"}', headers={"Content-Type": content_type})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/jsonp"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Type": "multipart/form-data; boundary=x"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_anything_else_is_415(http: TestClient, headers: dict[str, str]) -> None:
    request = http.build_request("POST", "/v1/search", content=b'{"query": "a"}')
    request.headers.update(headers)
    assert kind(http.send(request)) == (415, "unsupported-media-type")


@pytest.mark.parametrize("headers", [{}, JSON])
def test_an_empty_body_is_400(http: TestClient, headers: dict[str, str]) -> None:
    assert kind(http.post("/v1/search", headers=headers)) == (400, "malformed")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b'{"query": "a"} x',
        b"{'query': 'a'}",
        b'\xef\xbb\xbf{"query": "a"}',
        b'{"query": "\xff"}',
        b'{"query": "a", "min_score": NaN}',
        b'{"query": "a", "min_score": -Infinity}',
        b'{"query": "a", "limit": ' + b"9" * 5000 + b"}",
        b'{"query": "a", "query": "b"}',
        b"[" * 100_000,
        b'{"query":' * 100_000,
        b"[" * 500 + b"]" * 500,
    ],
)
def test_what_is_no_json_is_400(http: TestClient, body: bytes) -> None:
    assert kind(http.post("/v1/search", content=body, headers=JSON)) == (400, "malformed")


def test_a_number_beyond_floats_is_no_infinity(http: TestClient) -> None:
    response = http.post("/v1/memories", content=b'{"content": "a", "metadata": {"a": 1e999}}', headers=JSON)
    assert kind(response) == (422, "invalid")


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def test_depth_one_below_at_and_one_above() -> None:
    assert parse_json(nested(MAX_DEPTH - 1)) == json.loads(nested(MAX_DEPTH - 1))
    assert parse_json(nested(MAX_DEPTH)) == json.loads(nested(MAX_DEPTH))
    with pytest.raises(MalformedRequest, match=str(MAX_DEPTH)):
        parse_json(nested(MAX_DEPTH + 1))


def test_depth_counts_objects_and_lists_alike() -> None:
    mixed = b'{"a":[' * MAX_DEPTH + b"]}" * MAX_DEPTH
    with pytest.raises(MalformedRequest, match="nested"):
        parse_json(mixed)


def test_metadata_as_deep_as_a_body_may_be_comes_back(http: TestClient) -> None:
    deep: dict[str, object] = {}
    for _ in range(MAX_DEPTH - 2):
        deep = {"a": deep}
    saved = http.post("/v1/memories", json={"content": "deep", "metadata": deep})
    assert saved.status_code == 201
    assert saved.json()["metadata"] == deep
    too_deep = http.post("/v1/memories", json={"content": "deeper", "metadata": {"a": deep}})
    assert kind(too_deep) == (400, "malformed")


async def test_a_body_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmstart.web.decode.MAX_DRAIN", 2 * MAX_BODY)
    read = 0

    async def receive() -> dict[str, object]:
        nonlocal read
        read += MAX_BODY // 2
        return {"type": "http.request", "body": b" " * (MAX_BODY // 2), "more_body": True}

    scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(TooLarge):
        await read_body(Request(scope, receive), SearchRequest, MAX_BODY)
    assert read == 2 * MAX_BODY + MAX_BODY // 2
