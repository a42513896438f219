"""Stops and starts: nothing that was accepted is lost, and nothing is left half done."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from stack import Stack, wait_until

SLOW_S = 3


def post(client: httpx.Client, content: str) -> httpx.Response:
    return client.post("/v1/memories", json={"content": content, "namespace": "stops"})


def contents(client: httpx.Client, mark: str) -> list[str]:
    rows = client.get("/v1/memories", params={"namespace": "stops", "limit": 50}).json()["memories"]
    return sorted(row["content"] for row in rows if mark in row["content"])


def settle(client: httpx.Client) -> None:
    """Each part answers, and a search by vectors says so: a part that nobody asks can't be known to be well again."""

    def hybrid() -> bool:
        answer = client.post("/v1/search", json={"query": f"settled {uuid.uuid4().hex}"}).json()
        return bool(answer["mode"] == "hybrid" and not answer["degraded"])

    wait_until("searches are hybrid", hybrid, 90)
    wait_until("all is well", lambda: client.get("/v1/health").json()["status"] == "ok", 30)


def asked(stack: Stack, mark: str) -> int:
    return sum(mark in str(request) for request in stack.embedding_requests())


def health(stack: Stack, service: str) -> str:
    state = stack.inspect(service)["State"]
    if service == "embeddings":
        httpx.get(f"http://{stack.address(service)}:8080/health", trust_env=False).raise_for_status()
    return str(state["Health"]["Status"]) if "Health" in state else "healthy"


def serving(stack: Stack) -> bool:
    with stack.client() as client:
        return client.get("/healthz").status_code == 200


def test_requests_under_way_end_before_the_api_does(stack: Stack, https: httpx.Client) -> None:
    settle(https)
    mark = uuid.uuid4().hex
    texts = [f"{mark} {i}" for i in range(6)]
    stack.set_fault("slow", seconds=SLOW_S)
    with ThreadPoolExecutor(len(texts)) as pool:
        answers = [pool.submit(post, https, text) for text in texts]
        # each now waits for its vector, for a second and a half
        wait_until("all ask", lambda: asked(stack, mark) == len(texts), every_s=0.1)
        started = time.monotonic()
        stack.compose("stop", "api")
        seconds = time.monotonic() - started
        statuses = [answer.result().status_code for answer in answers]
    stack.clear_fault()
    state = stack.inspect("api")["State"]
    stack.compose("start", "api")
    assert statuses == [201] * len(texts)
    assert seconds < 15, "it was killed after its grace"
    assert state["ExitCode"] == 0
    wait_until("the api serves again", lambda: serving(stack), 60)
    assert contents(https, mark) == texts


def test_a_worker_that_stops_leaves_nothing_claimed(stack: Stack, https: httpx.Client) -> None:
    mark = uuid.uuid4().hex
    stack.set_fault("slow", seconds=SLOW_S)
    batch = [{"content": f"{mark} {i}", "namespace": "worker-stops"} for i in range(20)]
    ids = [r["id"] for r in https.post("/v1/memories/batch", json={"memories": batch}).json()["results"]]
    wait_until("the worker works on them", lambda: asked(stack, mark))
    stack.compose("stop", "worker")
    stack.clear_fault()
    assert stack.inspect("worker")["State"]["ExitCode"] == 0
    assert {https.get(f"/v1/memories/{i}").json()["embedding_status"] for i in ids} == {"queued"}

    stack.compose("start", "worker")
    wait_until(
        "all are embedded",
        lambda: {https.get(f"/v1/memories/{i}").json()["embedding_status"] for i in ids} == {"ready"},
        60,
    )
    found = https.get("/v1/memories", params={"namespace": "worker-stops", "limit": 50}).json()["memories"]
    assert sorted(row["id"] for row in found if mark in row["content"]) == sorted(ids)


def test_a_worker_that_is_killed_comes_back(stack: Stack) -> None:
    """By its process: what docker itself kills counts as stopped."""
    before = stack.inspect("worker")
    os.kill(before["State"]["Pid"], signal.SIGKILL)
    wait_until("it runs again", lambda: stack.inspect("worker")["RestartCount"] > before["RestartCount"], 20)
    wait_until("for good", lambda: stack.inspect("worker")["State"]["Running"], 20)
    assert stack.inspect("worker")["State"]["Pid"] != before["State"]["Pid"]


@pytest.mark.parametrize("service", ["redis", "redis-rest", "embeddings", "postgres", "caddy"])
def test_each_part_stops_within_its_grace(service: str, stack: Stack) -> None:
    started = time.monotonic()
    stack.compose("stop", service)
    seconds = time.monotonic() - started
    code = stack.inspect(service)["State"]["ExitCode"]
    stack.compose("start", service)
    assert code in (0, 143), code
    assert seconds < 10
    wait_until("it is well again", lambda: health(stack, service) == "healthy", 60)


def test_down_and_up_again_keeps_memories_keys_and_the_authority(stack: Stack, https: httpx.Client, key: str) -> None:
    mark = uuid.uuid4().hex
    settle(https)
    saved = post(https, f"kept over a restart {mark}").json()
    before = stack.authority.read_text()
    stop_writing = threading.Event()
    acknowledged: list[str] = []

    def write() -> None:
        with stack.client(key) as client:
            for i in range(500):
                if stop_writing.is_set():
                    return
                try:
                    answer = post(client, f"under way {mark} {i}")
                except httpx.HTTPError:
                    continue
                if answer.status_code == 201:
                    acknowledged.append(answer.json()["id"])

    writer = threading.Thread(target=write)
    writer.start()
    time.sleep(1)
    stack.compose("down")
    stop_writing.set()
    writer.join()
    stack.compose("up", "--detach", "--wait", "--wait-timeout", "150", "--no-build", "--pull", "never")
    stack.fetch_authority()
    assert stack.authority.read_text() == before
    assert acknowledged
    with stack.client(key) as client:
        for memory_id in (saved["id"], *acknowledged):
            assert client.get(f"/v1/memories/{memory_id}").status_code == 200
        found = client.post("/v1/search", json={"query": f"kept over a restart {mark}"}).json()
        assert found["mode"] == "hybrid"
        assert found["hits"][0]["id"] == saved["id"]
