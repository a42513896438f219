"""The stack as its users meet it: through caddy, over TLS."""

from __future__ import annotations

import json
import ssl
import subprocess
import uuid
from collections.abc import Iterator

import httpx
import pytest
from stack import SERVICES, Stack, wait_until


def test_a_memory_is_saved_found_read_and_deleted(https: httpx.Client, stack: Stack) -> None:
    saved = https.post("/v1/memories", json={"content": "The staging database is called heron.", "tags": ["story"]})
    assert saved.status_code == 201
    memory = saved.json()
    assert memory["embedding_status"] == "ready"

    found = https.post("/v1/search", json={"query": "Wie heißt die Datenbank für Staging?"})
    assert found.status_code == 200
    answer = found.json()
    assert (answer["mode"], answer["degraded"]) == ("hybrid", [])
    assert answer["hits"][0]["id"] == memory["id"]
    assert answer["hits"][0]["ranks"]["vector"] == 1

    got = https.get(f"/v1/memories/{memory['id']}")
    assert got.json()["content"] == "The staging database is called heron."
    assert https.delete(f"/v1/memories/{memory['id']}").status_code == 204
    again = https.post("/v1/search", json={"query": "staging database heron"}).json()["hits"]
    assert memory["id"] not in [hit["id"] for hit in again]


def test_all_parts_are_well(https: httpx.Client) -> None:
    health = https.get("/v1/health").json()
    assert {d["name"]: d["status"] for d in health["dependencies"]} == {
        "lancedb": "ok", "embedding": "ok", "postgres": "ok", "redis": "ok",
    }  # fmt: skip
    assert (health["status"], health["mode"]) == ("ok", "hybrid")


def test_what_the_api_queues_the_worker_embeds(https: httpx.Client, stack: Stack) -> None:
    """They share the volume, and nothing else tells the worker."""
    mark = uuid.uuid4().hex[:8]
    texts = [f"Note {i} of {mark}: the heron eats {i} frogs." for i in range(40)]
    answer = https.post("/v1/memories/batch", json={"memories": [{"content": t, "namespace": "batch"} for t in texts]})
    assert answer.json()["created"] == 40
    again = https.post("/v1/memories/batch", json={"memories": [{"content": t, "namespace": "batch"} for t in texts]})
    assert (again.json()["created"], again.json()["duplicates"]) == (0, 40)
    ids = [result["id"] for result in answer.json()["results"]]

    wait_until("the queue is empty", lambda: https.get("/v1/health").json()["queued"] == 0, 60)
    assert {https.get(f"/v1/memories/{i}").json()["embedding_status"] for i in ids} == {"ready"}
    batches = [r["input"] for r in stack.embedding_requests() if any(mark in text for text in r["input"])]
    assert sum(map(len, batches)) == 40
    assert max(map(len, batches)) <= 32


def test_the_prefixes_arrive_with_their_blank_and_once(https: httpx.Client, stack: Stack) -> None:
    """Read off the wire: env file, Compose, container, request."""
    mark = uuid.uuid4().hex
    https.post("/v1/memories", json={"content": f"blank {mark}"})
    https.post("/v1/search", json={"query": f"which blank {mark}"})
    texts = [text for r in stack.embedding_requests() for text in r["input"] if mark in text]
    assert texts == [f"passage: blank {mark}", f"query: which blank {mark}"]


# -- keys, made inside the container


def test_keys_are_made_listed_and_revoked_in_the_container(stack: Stack, key: str) -> None:
    made = stack.create_key("short-lived")
    with stack.client(made) as client:
        assert client.get("/v1/memories").status_code == 200
        listed = json.loads(stack.execute("api", "warmstart", "keys", "list", "--json").splitlines()[-1])["keys"]
        [row] = [row for row in listed if row["name"] == "short-lived"]
        assert row["state"] == "active"
        assert made not in json.dumps(listed)
        stack.execute("api", "warmstart", "keys", "revoke", row["id"])
        wait_until("the key is refused", lambda: client.get("/v1/memories").status_code == 401, 10)
    assert made not in stack.logs("api")


def test_no_key_no_entry(stack: Stack) -> None:
    with stack.client() as client:
        answer = client.get("/v1/memories")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")


# -- caddy


def test_the_certificate_is_of_caddys_own_authority(stack: Stack) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{stack.url}/healthz", verify=ssl.create_default_context(), trust_env=False)
    with stack.client() as client:
        assert client.get("/healthz").status_code == 200


def test_plain_http_is_sent_to_https(stack: Stack) -> None:
    url = f"http://127.0.0.1:{stack.settings['HTTP_PORT']}/v1/memories"
    answer = httpx.get(url, trust_env=False)
    assert answer.status_code == 308
    assert answer.headers["location"].startswith("https://127.0.0.1")


def test_headers_of_an_answer(https: httpx.Client) -> None:
    headers = https.get("/v1/memories").headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "server" not in headers
    assert "via" not in headers


def test_the_dashboard_behind_the_proxy(stack: Stack, https: httpx.Client) -> None:
    origin = {"Origin": str(https.base_url).rstrip("/"), "Sec-Fetch-Site": "same-origin"}
    key = https.headers["authorization"].removeprefix("Bearer ")
    with stack.client() as browser:
        shown = browser.get("/login", headers={"Accept": "text/html"})
        assert shown.headers["referrer-policy"] == "same-origin"
        assert "default-src" in shown.headers["content-security-policy"]
        answer = browser.post("/login", data={"key": key, "next": "/"}, headers=origin)
        assert answer.status_code == 303, answer.text
        assert answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"].lower()
        assert all(part in cookie for part in ("__host-", "secure", "httponly", "samesite=lax"))
        for path in ("/", "/?q=anything", "/namespaces", "/trash", "/keys", "/activity", "/health", "/transfer"):
            page = browser.get(path, headers={"Accept": "text/html"})
            assert (page.status_code, 'action="/login"' in page.text) == (200, False), path
        # a form of another site's page
        evil = browser.post("/keys", data={"name": "x"}, headers={"Origin": "https://evil.example"})
        assert evil.status_code == 403
        assert browser.post("/login", data={"key": key}, headers={"Origin": "null"}).status_code == 403


@pytest.mark.parametrize("path", ["/metrics", "/metrics/", "//metrics", "/%6detrics", "/METRICS", "/x/../metrics"])
def test_metrics_are_not_published(path: str, https: httpx.Client) -> None:
    request = https.build_request("GET", "/")
    request.url = request.url.copy_with(raw_path=path.encode())
    answer = https.send(request)
    assert answer.status_code in (400, 403, 404)
    assert "warmstart_" not in answer.text


def test_metrics_are_there_for_the_backend(stack: Stack) -> None:
    script = "import urllib.request as r; print(r.urlopen('http://api:8484/metrics').read().decode())"
    assert "warmstart_" in stack.execute("worker", "python3", "-c", script)


def test_bodies_are_limited(https: httpx.Client) -> None:
    over = https.post("/v1/memories", json={"content": "x" * 1_500_000})
    assert over.status_code == 413
    assert over.headers["content-type"] == "application/problem+json"
    far_over = https.post("/v1/memories/batch", content=b"x" * 11_000_000, headers={"content-type": "application/json"})
    assert far_over.status_code in (413, 502)  # caddy 2.6 has no better word for it, later ones do


def test_another_host_name_is_not_served(stack: Stack) -> None:
    with stack.client() as client:
        answer = client.get("/readyz", headers={"Host": "evil.example"})
    assert answer.status_code != 200 or not answer.content


@pytest.fixture
def counters_reset(stack: Stack) -> Iterator[None]:
    stack.execute("redis", "redis-cli", "flushall")
    yield
    stack.execute("redis", "redis-cli", "flushall")


def test_nobody_can_claim_another_address(stack: Stack, counters_reset: None) -> None:
    """Failed logins are counted by address: with an invented one each they still count as one client's."""
    limit = int(stack.settings["LOGIN_FAILURES_PER_MINUTE"])
    with stack.client("ws_sk_" + "x" * 43) as client:
        claims = [{"X-Forwarded-For": f"203.0.113.{i}", "X-Real-IP": f"198.51.100.{i}"} for i in range(limit + 3)]
        statuses = [client.get("/v1/memories", headers=claim).status_code for claim in claims]
    assert statuses == [401] * limit + [429] * 3


# -- the containers stay what they are


def test_all_services_run_and_none_was_started_again(stack: Stack) -> None:
    for service in SERVICES:
        state = stack.inspect(service)
        assert state["State"]["Running"], service
        assert state["RestartCount"] == 0, stack.logs(service)[-2000:]


def test_logs_are_lines_of_json_without_secrets(stack: Stack) -> None:
    for service in ("api", "worker"):
        lines = stack.logs(service).splitlines()
        other = [line for line in lines if not line.startswith("{")]
        assert all(line.startswith("Warmstart ") for line in other), other[:3]
    everything = "".join(stack.logs(service) for service in SERVICES)
    for name in ("REDIS_PASSWORD", "UPSTASH_REDIS_REST_TOKEN", "OPENAI_API_KEY", "POSTGRES_PASSWORD"):
        assert stack.settings[name] not in everything


def test_doctor_in_the_container(stack: Stack, key: str) -> None:
    words = ["-e", "WARMSTART_URL=http://127.0.0.1:8484", "-e", f"WARMSTART_API_KEY={key}"]
    done = stack.compose("exec", "-T", *words, "api", "warmstart", "doctor", "--json")
    assert json.loads(done.splitlines()[-1])["ok"] is True


def test_the_certificates_of_caddy_are_ones_openssl_takes(stack: Stack) -> None:
    done = subprocess.run(
        ["openssl", "s_client", "-connect", stack.host, "-CAfile", str(stack.authority), "-verify_return_error"],
        input="", capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert "Verify return code: 0 (ok)" in done.stdout, done.stderr
