"""What only a real socket shows: chunked bodies, refusals that arrive, clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from fakes.memory_api import KEY, FakeRuntime, InMemoryAPI
from fakes.web import bearer, listening
from warmstart.memory import NewMemory, Saved
from warmstart.web.decode import MAX_BODY

HEADERS = {**bearer(KEY), "Content-Type": "application/json"}


class SlowSave(InMemoryAPI):
    """Lets a test leave while a save is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = threading.Event(), threading.Event()

    async def save(self, new: NewMemory) -> Saved:
        self.begun.set()
        await asyncio.to_thread(self.go_on.wait, 10)
        return await super().save(new)


@pytest.fixture(scope="module")
def runtime() -> FakeRuntime:
    return FakeRuntime()


@pytest.fixture(scope="module")
def url(runtime: FakeRuntime) -> Iterator[str]:
    with listening(runtime) as url:
        yield url


def raw(url: str, head: str, body: bytes = b"") -> socket.socket:
    parts = urlsplit(url)
    connection = socket.create_connection((parts.hostname, parts.port), timeout=10)
    lines = [head, f"Host: {parts.netloc}", f"Authorization: Bearer {KEY}", "Content-Type: application/json", "", ""]
    connection.sendall("\r\n".join(lines).encode() + body)
    return connection


def test_a_chunked_body_is_counted_as_it_comes(url: str) -> None:
    def chunks(size: int) -> Iterator[bytes]:
        yield b'{"query": "a"}'
        for _ in range((size - 14) // 1024):
            yield b" " * 1024
        yield b" " * ((size - 14) % 1024)

    assert httpx.post(f"{url}/v1/search", content=chunks(MAX_BODY), headers=HEADERS).status_code == 200
    refused = httpx.post(f"{url}/v1/search", content=chunks(MAX_BODY + 1), headers=HEADERS)
    assert refused.status_code == 413
    assert refused.headers["content-type"] == "application/problem+json"


def test_the_sender_of_a_large_body_gets_to_read_the_refusal(url: str) -> None:
    with httpx.Client(headers=HEADERS) as http:
        refused = http.post(f"{url}/v1/search", content=b" " * (20 << 20))
        assert refused.status_code == 413
        assert http.get(f"{url}/v1/health").status_code == 200


def test_expect_100_continue(url: str) -> None:
    body = b'{"query": "a"}'
    with raw(url, f"POST /v1/search HTTP/1.1\r\nContent-Length: {len(body)}\r\nExpect: 100-continue") as connection:
        assert b"100 Continue" in connection.recv(4096)
        connection.sendall(body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")


def test_head_over_the_wire_has_no_body(url: str) -> None:
    with raw(url, "HEAD /v1/health HTTP/1.1\r\nConnection: close") as connection:
        answer = b"".join(iter(lambda: connection.recv(65_536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert body == b""


def test_a_save_is_finished_though_its_client_left(url: str, runtime: FakeRuntime) -> None:
    slow = SlowSave()
    runtime.tenants["alice"] = slow
    body = json.dumps({"content": "kept"}).encode()
    raw(url, f"POST /v1/memories HTTP/1.1\r\nContent-Length: {len(body)}", body).close()
    assert slow.begun.wait(5)
    time.sleep(0.05)  # the server sees the disconnect
    slow.go_on.set()
    deadline = time.monotonic() + 5
    while not slow.rows and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [m.content for m in slow.rows.values()] == ["kept"]


def test_a_client_that_leaves_within_its_body_saves_nothing(url: str, runtime: FakeRuntime) -> None:
    tenant = runtime.tenants["alice"] = InMemoryAPI()
    requests = runtime.metrics.registry.get_sample_value
    raw(url, "POST /v1/memories HTTP/1.1\r\nContent-Length: 1000", b'{"content": "half').close()
    labels = {"route": "/v1/memories", "method": "POST", "status": "499"}
    deadline = time.monotonic() + 5
    while not requests("warmstart_http_requests_total", labels) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert requests("warmstart_http_requests_total", labels) == 1
    assert not tenant.rows
    assert httpx.get(f"{url}/v1/health", headers=HEADERS).status_code == 200


def test_a_body_that_does_not_come_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmstart.web.decode.BODY_TIMEOUT_S", 0.1)
    with raw(url, "POST /v1/memories HTTP/1.1\r\nContent-Length: 1000", b"{") as connection:
        assert connection.recv(4096).startswith(b"HTTP/1.1 400")
