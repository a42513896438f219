"""What every answer carries, and what stands beside /v1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from fakes.memory_api import KEY, FakeRuntime
from fakes.web import bearer, serving
from warmstart.errors import PROBLEM_BASE, StoreUnavailable
from warmstart.web.app import Answer

RPC = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}},
}


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
def http(served: tuple[FakeRuntime, TestClient], runtime: FakeRuntime) -> TestClient:
    return served[1]


def kind(response: object) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    return response.status_code, response.json()["type"].removeprefix(PROBLEM_BASE)


def test_the_runtime_is_closed_with_the_application() -> None:
    runtime = FakeRuntime()
    with serving(runtime):
        assert not runtime.closed
    assert runtime.closed


def test_a_sane_request_id_comes_back_and_any_other_is_replaced(http: TestClient) -> None:
    assert http.get("/healthz", headers={"X-Request-Id": "a.B_3-" + "x" * 58}).headers["x-request-id"].startswith("a.B")
    for given in ("x" * 65, "a b", "", 'a"b', "é"):
        answer = http.get("/healthz", headers={"X-Request-Id": given.encode()}).headers["x-request-id"]
        assert answer != given
        assert len(answer) == 32


def test_security_headers_are_on_answers_and_problems(http: TestClient) -> None:
    for path in ("/v1/health", "/v1/no/such", "/healthz", "/no/such", "/mcp"):
        headers = http.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-request-id"]
        assert headers.get("cache-control") == ("no-store" if path.startswith(("/v1", "/mcp")) else None)


@pytest.mark.parametrize(
    "path", ["/v1/no/such", "/v1/memories/", "/v1", "/memories", "/no", "/v1/memories/a%2Fb", "//v1/health"]
)
def test_an_unknown_path_is_a_problem(http: TestClient, path: str) -> None:
    # put in whole, since a client would take "//v1" for a host
    request = http.build_request("GET", "/")
    request.url = request.url.copy_with(raw_path=path.encode())
    assert kind(http.send(request)) == (404, "not-found")


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/v1/search", "OPTIONS, POST"),
        ("/v1/memories", "GET, HEAD, OPTIONS, POST"),
        ("/v1/memories/mem_1", "DELETE, GET, HEAD, OPTIONS, PATCH"),
        ("/healthz", "GET, HEAD, OPTIONS"),
        ("/openapi.json", "GET, HEAD, OPTIONS"),
        ("/mcp", "POST"),
        ("/mcp/", "POST"),
    ],
)
def test_another_method_is_405_with_those_allowed(http: TestClient, path: str, allow: str) -> None:
    for method in ("PUT", "TRACE", "BREW"):
        response = http.request(method, path)
        assert kind(response) == (405, "method-not-allowed")
        assert response.headers["allow"] == allow


def test_options_names_the_methods(http: TestClient) -> None:
    response = http.options("/v1/recall")
    assert (response.status_code, response.headers["allow"]) == (204, "GET, HEAD, OPTIONS")
    assert "access-control-allow-origin" not in response.headers


def test_head_is_get_without_the_body(http: TestClient) -> None:
    path = http.post("/v1/memories", json={"content": "a"}).headers["location"]
    get, head = http.get(path), http.head(path)
    assert head.content == b""
    assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content))
    assert head.headers["etag"] == get.headers["etag"]


def test_the_unexpected_is_a_500_without_details_and_logged(
    http: TestClient, runtime: FakeRuntime, capsys: pytest.CaptureFixture[str]
) -> None:
    runtime.service("alice").error = KeyError("secret detail")
    response = http.get("/v1/health", headers={"X-Request-Id": "find-me"})
    assert kind(response) == (500, "internal")
    assert "secret detail" not in response.text
    assert response.json()["request_id"] == "find-me"
    logged = capsys.readouterr().out
    assert "secret detail" in logged
    assert "find-me" in logged


def test_healthz_asks_nothing(http: TestClient, runtime: FakeRuntime) -> None:
    runtime.readiness = (False, {"store": "gone"})
    runtime.service("alice").error = StoreUnavailable("gone")
    response = http.get("/healthz")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("readiness", "status", "body"),
    [
        ((True, {}), 200, {"status": "ok", "degraded": {}}),
        ((True, {"redis": "down"}), 200, {"status": "degraded", "degraded": {"redis": "down"}}),
        ((False, {"store": "down"}), 503, {"status": "unavailable", "degraded": {"store": "down"}}),
    ],
)
def test_readyz(runtime: FakeRuntime, readiness: object, status: int, body: object) -> None:
    runtime.readiness = readiness
    with serving(runtime, key=None) as http:
        response = http.get("/readyz")
        assert (response.status_code, response.json()) == (status, body)


def test_readyz_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    async def never() -> tuple[bool, dict[str, object]]:
        await asyncio.Event().wait()
        return True, {}

    runtime = FakeRuntime()
    monkeypatch.setattr(runtime, "ready", never)
    monkeypatch.setattr("warmstart.web.api.READY_TIMEOUT_S", 0.05)
    with serving(runtime, key=None) as http:
        response = http.get("/readyz")
        assert response.status_code == 503
        assert response.json()["degraded"] == {"service": "no answer within 0.05 s"}


def test_metrics_count_by_template_and_never_by_path(http: TestClient) -> None:
    path = http.post("/v1/memories", json={"content": "a"}).headers["location"]
    for target in (path, path, "/v1/memories/mem_unknown", "/no/such/path"):
        http.get(target)
    text = http.get("/metrics").text
    route = 'route="/v1/memories/{id}"'
    assert f'warmstart_http_requests_total{{method="GET",{route},status="200"}} 2.0' in text
    assert f'warmstart_http_requests_total{{method="GET",{route},status="404"}} 1.0' in text
    assert 'route="unrouted",status="404"} 1.0' in text
    assert f"warmstart_http_request_seconds_count{{{route}}} 3.0" in text
    assert "mem_" not in text
    assert "such" not in text
    assert "warmstart_http_in_flight 1.0" in text  # this very request


def test_a_method_of_no_standard_is_one_label(http: TestClient) -> None:
    http.request("BREW", "/v1/search")
    assert 'method="other",route="/v1/search",status="405"' in http.get("/metrics").text


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "10.1.2.3", "172.18.0.5", "192.168.1.1", "::ffff:10.0.0.1"])
def test_metrics_are_for_the_local_network(runtime: FakeRuntime, address: str) -> None:
    with serving(runtime, key=None, address=address) as http:
        assert http.get("/metrics").status_code == 200
        for header in ("X-Forwarded-For", "Forwarded", "X-Real-Ip"):
            assert kind(http.get("/metrics", headers={header: "127.0.0.1"})) == (403, "forbidden")


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1", "testclient"])
def test_metrics_are_for_nobody_else(runtime: FakeRuntime, address: str) -> None:
    with serving(runtime, address=address) as http:
        assert kind(http.get("/metrics")) == (403, "forbidden")


@pytest.mark.parametrize("path", ["/mcp", "/mcp/"])
def test_mcp_is_served_with_a_key_and_without_a_redirect(http: TestClient, path: str) -> None:
    response = http.post(path, json=INITIALIZE, headers=RPC)
    assert response.status_code == 200, response.text
    assert '"serverInfo"' in response.text
    assert response.headers["ratelimit-limit"] == "600"
    assert response.headers["x-accel-buffering"] == "no"
    assert http.post(path, json=INITIALIZE, headers={**RPC, "Authorization": "Bearer no"}).status_code == 401


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_mcp_has_no_session_to_read_or_end(http: TestClient, method: str) -> None:
    assert kind(http.request(method, "/mcp", headers=RPC)) == (405, "method-not-allowed")


def test_the_log_names_key_and_template_and_no_text(http: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    http.post("/v1/search?colour=blue", json={"query": "my private query"}, headers=bearer(KEY))
    logged = capsys.readouterr().out
    assert "key_alice" in logged
    assert "/v1/search" in logged
    for private in ("private", "blue", KEY):
        assert private not in logged


def test_the_document_is_served_without_a_key(runtime: FakeRuntime) -> None:
    with serving(runtime, key=None) as http:
        assert json.loads(http.get("/openapi.json").text)["openapi"] == "3.1.0"


async def test_an_answer_that_breaks_under_way_is_broken_off() -> None:
    async def breaking(scope: object, receive: object, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise RuntimeError("in the middle")

    runtime, sent = FakeRuntime(), []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message["type"])

    scope = {"type": "http", "method": "GET", "path": "/x", "headers": [], "state": {"runtime": runtime}}
    with pytest.raises(RuntimeError, match="in the middle"):
        await Answer(breaking)(scope, None, send)
    assert sent == ["http.response.start"]
    assert runtime.metrics.registry.get_sample_value("warmstart_http_in_flight") == 0
