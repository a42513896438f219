"""Keys, rate limits, hosts, load."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from fakes.memory_api import KEY, OTHER_KEY, UNLIMITED_KEY, FakeRuntime
from fakes.web import bearer, serving
from warmstart.config import Settings
from warmstart.errors import PROBLEM_BASE, AuthUnavailable, ConfigError
from warmstart.local_cache import LocalCache
from warmstart.ratelimit import RateLimiter
from warmstart.web.auth import Clients, LoadLimit, needs_key

WRONG = "ws_sk_" + "x" * 43
ALL_INTERFACES = "0.0.0.0"  # noqa: S104 - never bound here


def limited(**settings: object) -> FakeRuntime:
    """The clock stands still, so that no window ends within a test."""
    limiter = RateLimiter(LocalCache(), clock=lambda: 1_000_000_000.0)
    return FakeRuntime(settings=Settings(**settings), limiter=limiter)


@pytest.fixture(scope="module")
def http() -> Iterator[TestClient]:
    with serving(limited(login_failures_per_minute=1_000), key=None) as client:
        yield client


def kind(response: object) -> tuple[int, str]:
    assert response.headers["content-type"] == "application/problem+json"
    return response.status_code, response.json()["type"].removeprefix(PROBLEM_BASE)


@pytest.mark.parametrize("path", ["/v1/memories", "/v1/health", "/v1/no/such", "/v1", "/mcp", "/mcp/"])
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer(WRONG),
        {"Authorization": f"Basic {KEY}"},
        {"Authorization": KEY},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer " + "x" * 10_000},
    ],
)
def test_without_a_valid_key_401(http: TestClient, path: str, headers: dict[str, str]) -> None:
    response = http.post(path, headers=headers, content=b"never read")
    assert kind(response) == (401, "unauthorized")
    assert response.headers["www-authenticate"] == 'Bearer realm="warmstart"'
    assert response.headers["ratelimit-limit"] == "1000"
    assert WRONG not in response.text


def test_two_authorization_headers_are_none(http: TestClient) -> None:
    headers = [("Authorization", f"Bearer {WRONG}"), ("Authorization", f"Bearer {KEY}")]
    assert kind(http.get("/v1/health", headers=headers)) == (401, "unauthorized")


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY}"])
def test_the_scheme_has_no_case(http: TestClient, value: str) -> None:
    assert http.get("/v1/health", headers={"Authorization": value}).status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/openapi.json"])
def test_no_key_is_needed_beside_the_api(http: TestClient, path: str) -> None:
    response = http.get(path)
    assert response.status_code == 200
    assert "ratelimit-limit" not in response.headers


def test_what_needs_a_key() -> None:
    assert [p for p in ("/v1", "/v1/x", "/mcp", "/mcp/", "/mcp/x") if not needs_key(p)] == []
    assert [p for p in ("/", "/v1x", "/mcpx", "/healthz", "/x/v1/") if needs_key(p)] == []


def test_keys_that_cannot_be_checked_are_503() -> None:
    runtime = FakeRuntime()
    runtime.keys.error = AuthUnavailable("the key is unknown and Postgres is down")
    with serving(runtime) as http:
        response = http.get("/v1/health")
        assert kind(response) == (503, "auth-unavailable")
        assert response.headers["retry-after"] == "1"
        assert response.headers["ratelimit-remaining"] == "60"


def test_requests_a_minute_a_key() -> None:
    with serving(limited(rate_limit_per_minute=3)) as http:
        left = [http.get("/v1/health").headers["ratelimit-remaining"] for _ in range(3)]
        assert left == ["2", "1", "0"]
        refused = http.get("/v1/health")
        assert kind(refused) == (429, "rate-limited")
        assert refused.headers["retry-after"] == refused.headers["ratelimit-reset"]
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["ratelimit-limit"] == "3"
        assert refused.json()["retry_after"] == int(refused.headers["retry-after"])
        assert kind(http.post("/mcp", json={})) == (429, "rate-limited")
        assert http.get("/v1/health", headers=bearer(OTHER_KEY)).status_code == 200


def test_the_defaults_are_600_and_60() -> None:
    with serving(limited()) as http:
        assert http.get("/v1/health").headers["ratelimit-limit"] == "600"
        assert http.get("/v1/health", headers=bearer(WRONG)).headers["ratelimit-limit"] == "60"


def test_an_unlimited_key_is_not_counted() -> None:
    with serving(limited(rate_limit_per_minute=2), key=UNLIMITED_KEY) as http:
        answers = [http.get("/v1/health") for _ in range(4)]
        assert {a.status_code for a in answers} == {200}
        assert {a.headers["ratelimit-remaining"] for a in answers} == {"2"}


def test_failed_logins_a_minute_an_address() -> None:
    runtime = limited(login_failures_per_minute=3)
    with serving(runtime) as http:
        for left in ("2", "1", "0"):
            response = http.get("/v1/health", headers=bearer(WRONG))
            assert (response.status_code, response.headers["ratelimit-remaining"]) == (401, left)
        asked = runtime.keys.asked
        for key in (WRONG, KEY):
            assert kind(http.get("/v1/health", headers=bearer(key))) == (429, "rate-limited")
        assert runtime.keys.asked == asked


def test_good_logins_are_no_failures() -> None:
    with serving(limited(login_failures_per_minute=1)) as http:
        assert {http.get("/v1/health").status_code for _ in range(5)} == {200}


def test_failures_count_for_the_address_a_trusted_proxy_names() -> None:
    runtime = limited(login_failures_per_minute=1, trusted_proxies=["10.0.0.0/8"])
    with serving(runtime, address="10.0.0.2") as http:

        def get(key: str, forwarded: str) -> int:
            return http.get("/v1/health", headers={**bearer(key), "X-Forwarded-For": forwarded}).status_code

        assert get(WRONG, "203.0.113.1") == 401
        assert get(KEY, "203.0.113.1") == 429
        assert get(KEY, "203.0.113.2") == 200
        # what the client wrote itself stands on the left and does not count
        assert get(KEY, "203.0.113.2, 203.0.113.1") == 429


def client_of(peer: str | None, *forwarded: str, trusted: tuple[str, ...] = ()) -> str:
    from starlette.datastructures import Headers

    scope = {"type": "http", "client": (peer, 1) if peer else None}
    headers = Headers(raw=[(b"x-forwarded-for", value.encode()) for value in forwarded])
    return Clients(Settings(trusted_proxies=list(trusted))).address(scope, headers)


def test_the_address_of_a_client() -> None:
    proxies = ("10.0.0.0/8", "fd00::1")
    assert client_of("198.51.100.1", "203.0.113.1") == "198.51.100.1"
    assert client_of("198.51.100.1", "203.0.113.1", trusted=proxies) == "198.51.100.1"
    assert client_of("10.0.0.1", "203.0.113.1", trusted=proxies) == "203.0.113.1"
    assert client_of("10.0.0.1", "203.0.113.1, 10.0.0.9", trusted=proxies) == "203.0.113.1"
    assert client_of("10.0.0.1", "203.0.113.1", "203.0.113.2", trusted=proxies) == "203.0.113.2"
    assert client_of("10.0.0.1", "203.0.113.1, nonsense", trusted=proxies) == "10.0.0.1"
    assert client_of("10.0.0.1", trusted=proxies) == "10.0.0.1"
    assert client_of("::ffff:10.0.0.1", "203.0.113.1", trusted=proxies) == "203.0.113.1"
    assert client_of("fd00::1", "2001:db8:1:2:3::4", trusted=proxies) == "2001:db8:1:2::/64"
    assert client_of(None) == "unknown"
    assert client_of("/run/socket") == "/run/socket"


def test_a_proxy_that_is_no_address_stops_the_start() -> None:
    with pytest.raises(ConfigError, match="TRUSTED_PROXIES"):
        Clients(Settings(trusted_proxies=["caddy"]))


HOSTS = ("localhost", "LOCALHOST:1", "127.0.0.1:8484", "[::1]:8484", "[0:0:0:0:0:0:0:1]", "a.example", "A.Example.:443")
FOREIGN_HOSTS = (
    "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "a.example.evil", "evil.example:8484",
    "", "a@localhost", ALL_INTERFACES,
)  # fmt: skip


def test_hosts_that_are_served_and_hosts_that_are_not() -> None:
    runtime = FakeRuntime(settings=Settings(host=ALL_INTERFACES, allowed_hosts=["a.example"]))
    with serving(runtime) as http:
        for host in HOSTS:
            assert http.get("/v1/health", headers={"Host": host}).status_code == 200, host
        for host in FOREIGN_HOSTS:
            for path in ("/v1/health", "/mcp", "/readyz", "/metrics", "/openapi.json", "/no/such"):
                assert kind(http.get(path, headers={"Host": host})) == (403, "forbidden"), host
            assert http.get("/healthz", headers={"Host": host}).status_code == 200


def test_the_address_it_listens_on_is_a_host() -> None:
    with serving(FakeRuntime(settings=Settings(host="192.168.1.5"))) as http:
        assert http.get("/v1/health", headers={"Host": "192.168.1.5:8484"}).status_code == 200
        assert http.get("/v1/health", headers={"Host": "192.168.1.6:8484"}).status_code == 403


def test_origins(http: TestClient) -> None:
    good = {"http://localhost:6274": 200, "https://127.0.0.1": 200}
    bad = {"https://evil.example": 403, "null": 403, "http://[": 403, "": 403}
    for origin, status in {**good, **bad}.items():
        assert http.get("/v1/health", headers={**bearer(KEY), "Origin": origin}).status_code == status, origin


async def test_more_requests_at_once_than_allowed_are_503() -> None:
    import anyio
    import httpx

    from fakes.memory_api import InMemoryAPI
    from fakes.web import asgi

    runtime = FakeRuntime(settings=Settings(max_concurrent_requests=2))
    gate = anyio.Event()

    class Slow(InMemoryAPI):
        async def health(self) -> object:
            await gate.wait()
            return await super().health()

    runtime.tenants["alice"] = Slow()
    statuses: list[int] = []
    async with asgi(runtime) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=bearer(KEY)) as http:

            async def get() -> None:
                statuses.append((await http.get("/v1/health")).status_code)

            async with anyio.create_task_group() as group:
                group.start_soon(get)
                group.start_soon(get)
                await anyio.wait_all_tasks_blocked()
                refused = await http.get("/v1/counts")
                assert kind(refused) == (503, "overloaded")
                assert refused.headers["retry-after"] == "1"
                assert (await http.get("/healthz")).status_code == 200
                assert (await http.get("/readyz")).status_code == 200
                gate.set()
            assert statuses == [200, 200]
            assert (await http.get("/v1/health")).status_code == 200


async def test_a_request_that_fails_gives_its_place_back() -> None:
    async def failing(scope: object, receive: object, send: object) -> None:
        raise RuntimeError

    limit = LoadLimit(failing)
    scope = {"type": "http", "path": "/v1/x", "state": {"runtime": FakeRuntime()}}
    with pytest.raises(RuntimeError):
        await limit(scope, None, None)
    assert limit.serving == 0


def test_logins_are_counted_by_outcome() -> None:
    runtime = limited(login_failures_per_minute=1)
    with serving(runtime) as http:
        for key in (KEY, WRONG, KEY):
            http.get("/v1/health", headers=bearer(key))
    value = runtime.metrics.registry.get_sample_value
    outcomes = {o: value("warmstart_logins_total", {"outcome": o}) for o in ("ok", "unauthorized", "rate_limited")}
    assert outcomes == {"ok": 1, "unauthorized": 1, "rate_limited": 1}
