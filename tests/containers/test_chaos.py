"""Harm that comes without warning, to a stack of its own: floods, memory, kills at random, a full disk."""

from __future__ import annotations

import json
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from stack import Stack, command, wait_until

from containers.faults import container, filled, kill

FLOOD_MB = 45
LOG_FILES = 3
LOG_MB = 10
WRITERS = 4
NAMESPACE = "chaos"
#: Between a kill and the next one.
PAUSE_S = (1.0, 4.0)


@contextmanager
def searching(stack: Stack, key: str) -> Iterator[list[str]]:
    """Searches all the time; each must be answered with 200. Gives the modes, as they come."""
    over, modes, faults = threading.Event(), [], []

    def work() -> None:
        with stack.client(key) as http:
            # or a search by text alone finds nothing, and is a scan
            http.post("/v1/memories", json={"content": "The walrus."}).raise_for_status()
            while not over.wait(0.1):
                answer = http.post("/v1/search", json={"query": f"walrus {uuid.uuid4().hex}"})
                if answer.status_code != 200:
                    faults.append(answer.text)
                else:
                    modes.append(answer.json()["mode"])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield modes
    finally:
        over.set()
        thread.join()
    assert not faults, faults[:3]
    assert modes


def hybrid_again(stack: Stack, key: str) -> None:
    with stack.client(key) as http:

        def is_well() -> bool:
            health = http.get("/v1/health").json()
            return bool((health["status"], health["mode"], health["queued"]) == ("ok", "hybrid", 0))

        wait_until("all is well", is_well, 60)


def deaths(stack: Stack, service: str, since: float) -> list[str]:
    """Exit codes of its container, from the time `since` (Unix) on."""
    lines = command(
        "docker", "events", "--since", f"{since:.3f}", "--until", f"{time.time():.3f}",
        "--filter", f"container={container(stack, service)}", "--filter", "event=die", "--format", "{{json .}}",
    ).splitlines()  # fmt: skip
    return [json.loads(line)["Actor"]["Attributes"]["exitCode"] for line in lines]


def test_a_flood_of_log_lines_fills_three_files_and_no_disk(small_stack: Stack, small_key: str) -> None:
    flood = (
        "out = open('/proc/1/fd/1', 'wb', buffering=0); line = b'{\"event\": \"flood\"}'.ljust(999) + b'\\n'\n"
        f"for _ in range({FLOOD_MB * 1000}): out.write(line)"
    )
    log = Path(small_stack.inspect("worker")["LogPath"])
    with searching(small_stack, small_key) as modes:
        small_stack.execute("worker", "python3", "-c", flood)

        def sizes() -> list[int]:
            return sorted(file.stat().st_size for file in log.parent.glob(f"{log.name}*"))

        wait_until("it is written", lambda: len(sizes()) == LOG_FILES)
    # the line that is one too many goes into a new file
    assert len(sizes()) == LOG_FILES
    assert sizes()[-1] <= LOG_MB * 1_000_000 * 1.05
    assert sum(sizes()) > LOG_MB * 1_000_000
    assert set(modes) == {"hybrid"}


def test_a_container_over_its_memory_limit_comes_back_while_search_goes_on(small_stack: Stack, small_key: str) -> None:
    began = time.time()
    before = small_stack.inspect("embeddings")["RestartCount"]
    with searching(small_stack, small_key) as modes:
        small_stack.set_fault("memory")
        wait_until("it was started again", lambda: small_stack.inspect("embeddings")["RestartCount"] > before, 60)
        assert deaths(small_stack, "embeddings", began) == ["137"]

        def is_up() -> bool:
            # it has no address until it runs again
            health = f"http://{small_stack.address('embeddings')}:8080/health"
            return httpx.get(health, trust_env=False).status_code == 200

        wait_until("it is up", is_up, 30)
        hybrid_again(small_stack, small_key)
        count = len(modes)
        wait_until("searches go on", lambda: len(modes) > count + 3)
    assert set(modes) <= {"hybrid", "keyword"}
    assert modes[-1] == "hybrid"


def test_a_full_disk_refuses_writes_loses_nothing_and_heals(small_stack: Stack, small_key: str) -> None:
    mark = uuid.uuid4().hex

    def save(what: str) -> httpx.Response:
        return http.post("/v1/memories", json={"content": f"{mark} {what}", "namespace": mark})

    with small_stack.client(small_key) as http:
        before = save("before").raise_for_status().json()["id"]
        with filled(small_stack, "/data"):
            refused = save("while it is full")
            assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (507, "disk-full")
            assert http.delete(f"/v1/memories/{before}").status_code == 507
            found = http.post("/v1/search", json={"query": mark}).json()
            assert (found["mode"], found["hits"][0]["id"]) == ("hybrid", before)
        after = wait_until("writes work again", lambda: accepted(save("after")))
        rows = http.get("/v1/memories", params={"namespace": mark}).json()["memories"]
        assert {row["id"] for row in rows} == {before, after}
    hybrid_again(small_stack, small_key)


def accepted(answer: httpx.Response) -> str:
    return str(answer.json()["id"]) if answer.status_code in (200, 201) else ""


def test_kills_at_random_lose_nothing_that_was_acknowledged(small_stack: Stack, small_key: str) -> None:
    write_through_kills(small_stack, small_key, seconds=10)


@pytest.mark.slow
def test_kills_at_random_for_two_minutes(small_stack: Stack, small_key: str) -> None:
    write_through_kills(small_stack, small_key, seconds=120)


def write_through_kills(stack: Stack, key: str, seconds: float) -> None:
    """Four clients save, each text until it is acknowledged, while api and worker are killed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    mark, over = uuid.uuid4().hex, threading.Event()
    kills = 0
    with ThreadPoolExecutor(WRITERS) as pool:
        writers = [pool.submit(write, stack, key, f"{mark} {i}", over.is_set) for i in range(WRITERS)]
        try:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                time.sleep(dice.uniform(*PAUSE_S))
                kills += kill(stack, dice.choice(["api", "worker"]))
        finally:
            over.set()
        acknowledged = {content: i for writer in writers for content, i in writer.result().items()}
    assert kills >= seconds / 10
    assert len(acknowledged) > WRITERS
    for service in ("api", "worker"):
        command("docker", "restart", container(stack, service))  # not to wait for the engine's patience
    hybrid_again(stack, key)
    rows = everything(stack, key)
    contents = [row["content"] for row in rows if mark in row["content"]]
    assert len(set(contents)) == len(contents), "a memory is there twice"
    ids = {row["content"]: row["id"] for row in rows}
    lost = [content for content, i in acknowledged.items() if ids.get(content) != i]
    assert not lost
    assert {row["embedding_status"] for row in rows} == {"ready"}
    print(f"{len(acknowledged)} acknowledged, {len(contents)} there, {kills} kills")


def write(stack: Stack, key: str, mark: str, is_over: Callable[[], bool]) -> dict[str, str]:
    """Texts that were acknowledged, and under which id."""
    acknowledged: dict[str, str] = {}
    count = 0
    with stack.client(key) as http:
        while not is_over():
            content = f"{mark} {count}"
            try:
                answer = http.post("/v1/memories", json={"content": content, "namespace": NAMESPACE})
            except httpx.HTTPError:
                continue  # the same again: it may be there, or not
            # caddy's words for a server that went away
            assert answer.status_code in (200, 201, 502, 503, 504), answer.text
            if memory_id := accepted(answer):
                acknowledged[content] = memory_id
                count += 1
    return acknowledged


def everything(stack: Stack, key: str) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    params = {"namespace": NAMESPACE, "limit": 200}
    with stack.client(key) as http:
        while True:
            page = http.get("/v1/memories", params=params).raise_for_status().json()
            rows += page["memories"]
            if not page["next_cursor"]:
                return rows
            params["cursor"] = page["next_cursor"]
