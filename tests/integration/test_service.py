"""Writing, trash, paging and namespaces over REST, by the service itself."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from fakes.provider import FakeProvider
from integration.conftest import TestServer
from integration.service import DIM, MISSING, App, Tenant, down, fresh_database, problem_type, running, settings_for
from warmstart.config import load
from warmstart.errors import ConfigError
from warmstart.store import changes
from warmstart.store.schema import now
from warmstart.worker import Worker

pytestmark = pytest.mark.asyncio(loop_scope="module")


def memory(memory_id: str) -> str:
    return f"/v1/memories/{memory_id}"


# -- saving, and saving again


async def test_what_is_saved_comes_back_as_it_was_given(alice: Tenant) -> None:
    given_values = {
        "content": "  Wörter\r\n\tund 'Zeichen' \u202e 🦭 \\ \"x\" %_  \n",
        "title": "a title",
        "namespace": "n-1._x",
        "type": "gotcha",
        "facts": ["one", "it's two"],
        "tags": ["a", "b'c"],
        "entities": ["C++"],
        "importance": 0.25,
        "source": "a test",
        "metadata": {"a": {"b": [1, None, "ü", 1.5]}},
        "occurred_at": "2026-05-01T12:00:00.123456Z",
    }
    saved = await alice.post("/v1/memories", given_values, 201)
    assert {k: saved[k] for k in given_values} == given_values
    assert saved["duplicate"] is False
    read = await alice.get(memory(saved["id"]))
    assert {k: read[k] for k in given_values} == given_values
    assert (await alice.get("/v1/memories", namespace="n-1._x"))["memories"] == [read]
    assert not {"embedding", "search_text", "user_id"} & read.keys()


async def test_saving_the_same_content_again_is_answered_with_the_first(app: App, alice: Tenant) -> None:
    first = await alice.save("the walrus", importance=0.1)
    again = await alice.save("the walrus", importance=0.9, title="other", status=200)
    assert (again["id"], again["duplicate"], again["importance"]) == (first["id"], True, pytest.approx(0.1))
    assert (await alice.save("the walrus", namespace="elsewhere"))["id"] != first["id"]
    assert (await alice.save("the walrus "))["id"] != first["id"]
    assert (await alice.get("/v1/memories/counts"))["active"] == 3
    await alice.delete(memory(first["id"]))
    assert (await alice.save("the walrus"))["id"] != first["id"]  # the trash is no duplicate


async def test_a_batch_twice_and_from_eight_clients_at_once_is_each_row_once(app: App, alice: Tenant) -> None:
    items = [{"content": f"memory {i}"} for i in range(100)]
    first = await alice.post("/v1/memories/batch", {"memories": items})
    assert (first["created"], first["duplicates"]) == (100, 0)
    again = await alice.post("/v1/memories/batch", {"memories": items})
    assert (again["created"], again["duplicates"]) == (0, 100)
    assert [r["id"] for r in again["results"]] == [r["id"] for r in first["results"]]
    assert {r["status"] for r in again["results"]} == {"duplicate"}

    fresh = [{"content": f"fresh {i}"} for i in range(100)]
    clients = [app.same_tenant(alice) for _ in range(8)]
    answers = await asyncio.gather(*(c.post("/v1/memories/batch", {"memories": fresh}) for c in clients))
    assert sum(a["created"] for a in answers) == 100
    assert sum(a["duplicates"] for a in answers) == 700
    assert len({tuple(r["id"] for r in a["results"]) for a in answers}) == 1
    assert (await alice.get("/v1/memories/counts"))["active"] == 200


async def test_a_batch_of_single_saves_at_once_is_one_memory(app: App, alice: Tenant) -> None:
    answers = await asyncio.gather(*(alice.http.post("/v1/memories", json={"content": "same"}) for _ in range(8)))
    assert Counter(a.status_code for a in answers) == {201: 1, 200: 7}
    assert len({a.json()["id"] for a in answers}) == 1


async def test_a_batch_with_its_own_duplicates_and_known_ones(alice: Tenant) -> None:
    known = await alice.save("known")
    items = [{"content": c} for c in ("new", "known", "new")]
    answer = await alice.post("/v1/memories/batch", {"memories": items})
    assert [r["status"] for r in answer["results"]] == ["created", "duplicate", "duplicate"]
    assert answer["results"][1]["id"] == known["id"]
    assert answer["results"][2]["id"] == answer["results"][0]["id"]
    assert (answer["created"], answer["duplicates"]) == (1, 2)


async def test_a_batch_with_one_fault_is_refused_whole(alice: Tenant) -> None:
    problem = await alice.post("/v1/memories/batch", {"memories": [{"content": "good"}, {"content": ""}]}, 422)
    assert problem["field"] == "memories.1.content"
    assert await alice.page() == []


# -- conflicts


async def test_an_edit_into_another_content_is_409_with_its_id(alice: Tenant) -> None:
    first, second = await alice.batch("first", "second")
    before = await alice.get(memory(second))
    problem = await alice.patch(memory(second), {"content": "first"}, 409)
    assert (problem_type(problem), problem["id"]) == ("duplicate", first)
    assert await alice.get(memory(second)) == before
    third = (await alice.save("first", namespace="other"))["id"]
    problem = await alice.patch(memory(third), {"namespace": "default"}, 409)
    assert (problem_type(problem), problem["id"]) == ("duplicate", first)
    await alice.delete(memory(first))
    assert (await alice.patch(memory(second), {"content": "first"}))["content"] == "first"
    problem = await alice.post(f"{memory(first)}/restore", None, 409)
    assert (problem_type(problem), problem["id"]) == ("duplicate", second)


async def test_an_edit_that_changes_nothing_changes_nothing(alice: Tenant) -> None:
    saved = await alice.save("the walrus", tags=["a"])
    again = await alice.patch(memory(saved["id"]), {"content": "the walrus", "tags": ["a"]})
    assert again["updated_at"] == saved["updated_at"]
    assert again["embedding_status"] == "ready"


async def test_if_match(alice: Tenant) -> None:
    response = await alice.http.post("/v1/memories", json={"content": "the walrus"})
    path, etag = memory(response.json()["id"]), response.headers["etag"]
    assert (await alice.http.get(path)).headers["etag"] == etag
    edited = await alice.http.patch(path, json={"importance": 0.9}, headers={"if-match": etag})
    assert edited.status_code == 200
    assert edited.headers["etag"] != etag
    for stale in (
        await alice.http.patch(path, json={"importance": 0.1}, headers={"if-match": etag}),
        await alice.http.delete(path, headers={"if-match": etag}),
        await alice.http.delete(f"{path}?hard=true", headers={"if-match": etag}),
    ):
        assert (stale.status_code, problem_type(stale.json())) == (412, "stale")
    assert (await alice.get(path))["importance"] == pytest.approx(0.9)
    for wrong in ("x", 'W/"1"', '"a", "b"'):
        refused = await alice.http.patch(path, json={"importance": 0.1}, headers={"if-match": wrong})
        assert refused.status_code == 400
    assert (await alice.http.delete(path, headers={"if-match": edited.headers["etag"]})).status_code == 204


async def test_of_edits_at_once_with_one_etag_one_wins(alice: Tenant) -> None:
    response = await alice.http.post("/v1/memories", json={"content": "the walrus"})
    path, etag = memory(response.json()["id"]), response.headers["etag"]
    answers = await asyncio.gather(
        *(alice.http.patch(path, json={"importance": i / 10}, headers={"if-match": etag}) for i in range(1, 7))
    )
    assert Counter(a.status_code for a in answers) == {200: 1, 412: 5}


async def test_an_edit_of_content_queues_and_the_worker_embeds_it_anew(app: App, alice: Tenant) -> None:
    saved = await alice.save("the walrus")
    assert saved["embedding_status"] == "ready"
    edited = await alice.patch(memory(saved["id"]), {"content": "a seal"})
    assert edited["embedding_status"] == "queued"
    assert edited["title"] == "a seal"
    assert edited["content_hash"] != saved["content_hash"]
    assert (await alice.get("/v1/health"))["queued"] == 1
    await app.embed_all()
    assert (await alice.get(memory(saved["id"])))["embedding_status"] == "ready"
    [hit] = (await alice.search("a seal"))["hits"]
    assert hit["ranks"] == {"vector": 1, "text": 1}
    assert (await alice.patch(memory(saved["id"]), {"importance": 0.7}))["embedding_status"] == "ready"


# -- the trash


async def test_the_trash(alice: Tenant) -> None:
    kept, gone = await alice.batch("kept", "gone")
    await alice.delete(memory(gone))
    await alice.delete(memory(gone))  # again changes nothing
    assert await alice.page() == [kept]
    assert await alice.page(only_deleted="true") == [gone]
    assert await alice.page(only_deleted="true", include_deleted="true") == [gone]
    assert set(await alice.page(include_deleted="true")) == {kept, gone}
    row = await alice.get(memory(gone))
    deleted, expires = (datetime.fromisoformat(row[k]) for k in ("deleted_at", "expires_at"))
    assert expires - deleted == timedelta(days=30)
    assert gone not in await alice.found("gone")
    assert gone not in (await alice.post("/v1/context", {"query": "gone"}))["ids"]
    assert problem_type(await alice.patch(memory(gone), {"importance": 1.0}, 409)) == "conflict"
    restored = await alice.post(f"{memory(gone)}/restore", None)
    assert "deleted_at" not in restored
    assert (await alice.found("gone"))[0] == gone
    await alice.delete(memory(gone), hard="true")
    assert (await alice.get(memory(gone), 404))["id"] == gone
    assert await alice.page(include_deleted="true") == [kept]
    assert (await alice.post(f"{memory(gone)}/restore", None, 404))["status"] == 404


async def test_restore_is_refused_after_thirty_days_and_the_sweep_removes(
    app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = await alice.batch("first", "second", "kept")
    for gone in (first, second):
        await alice.delete(memory(gone))
    at = now()
    monkeypatch.setattr(changes, "now", lambda: at + timedelta(days=29, hours=23))
    await alice.post(f"{memory(second)}/restore", None)
    monkeypatch.setattr(changes, "now", lambda: at + timedelta(days=30, seconds=1))
    problem = await alice.post(f"{memory(first)}/restore", None, 409)
    assert problem_type(problem) == "expired"
    monkeypatch.undo()
    monkeypatch.setattr("warmstart.worker.now", lambda: at + timedelta(days=30, seconds=1))
    with capture_logs() as logs:
        assert await Worker(app.runtime).sweep() >= 1
    assert set(await alice.page(include_deleted="true")) == {second, third}
    assert [e["event"] for e in logs if e["event"] == "worker.swept"] == ["worker.swept"]


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "delete", "hard", "restore", "move", "drop", "rename"]),
        st.integers(0, 9),
        st.sampled_from(["a", "b", "c"]),
    ),
    min_size=4,
    max_size=14,
)


@settings(
    max_examples=8,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
@given(ACTIONS)
async def test_counts_are_those_of_the_lists(app: App, actions: list[tuple[str, int, str]]) -> None:
    await app.compact()
    tenant = await app.tenant()
    for action, number, namespace in actions:
        ids = await tenant.page(include_deleted="true", limit=200)
        path = memory(ids[number % len(ids)]) if ids else memory(MISSING)
        match action:
            case "save":
                body = {"content": f"memory {number}", "namespace": namespace, "type": "goal" if number % 2 else "fact"}
                await tenant.http.post("/v1/memories/batch", json={"memories": [body]})
            case "delete" | "hard":
                await tenant.http.delete(path, params={"hard": str(action == "hard").lower()})
            case "restore":
                await tenant.http.post(f"{path}/restore")
            case "move":
                await tenant.http.patch(path, json={"namespace": namespace})
            case "drop":
                await tenant.http.delete(f"/v1/namespaces/{namespace}")
            case "rename":
                await tenant.http.patch(f"/v1/namespaces/{namespace}", json={"name": f"{namespace}{number}"})
    active = (await tenant.get("/v1/memories", limit=200))["memories"]
    trashed = (await tenant.get("/v1/memories", only_deleted="true", limit=200))["memories"]
    everything = await tenant.page(include_deleted="true", limit=200)
    assert len(everything) == len(set(everything)) == len(active) + len(trashed)
    assert await tenant.get("/v1/memories/counts") == {
        "active": len(active),
        "trashed": len(trashed),
        "namespaces": Counter(m["namespace"] for m in active),
        "types": Counter(m["type"] for m in active),
    }
    listed = (await tenant.get("/v1/namespaces"))["namespaces"]
    counted = {n["name"]: (n["active"], n["trashed"]) for n in listed}
    names = {m["namespace"] for m in [*active, *trashed]}
    in_active, in_trash = (Counter(m["namespace"] for m in rows) for rows in (active, trashed))
    assert counted == {name: (in_active[name], in_trash[name]) for name in names}
    assert len({(m["namespace"], m["content_hash"]) for m in active}) == len(active)


# -- namespaces


async def test_namespaces_are_renamed_whole_and_never_onto_another(alice: Tenant) -> None:
    await alice.batch(*({"content": f"m{i}", "namespace": "old"} for i in range(3)))
    [gone] = await alice.batch({"content": "gone", "namespace": "old"})
    await alice.batch({"content": "m0", "namespace": "taken"})
    await alice.delete(memory(gone))
    problem = await alice.patch("/v1/namespaces/old", {"name": "taken"}, 409)
    assert problem_type(problem) == "conflict"
    assert "taken" in problem["detail"]
    assert await alice.patch("/v1/namespaces/old", {"name": "new"}) == {"name": "new", "memories": 4}
    assert (await alice.get("/v1/namespaces"))["namespaces"] == [
        {"name": "new", "active": 3, "trashed": 1},
        {"name": "taken", "active": 1, "trashed": 0},
    ]
    assert (await alice.patch("/v1/namespaces/old", {"name": "x"}, 404))["status"] == 404
    assert await alice.delete("/v1/namespaces/new", 200) == {"name": "new", "memories": 3}
    assert len(await alice.page(only_deleted="true")) == 4
    assert (await alice.delete("/v1/namespaces/never", 404))["status"] == 404
    assert len(await alice.found("m0", namespace="taken")) == 1


# -- pages


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/v1/memories", {}),
        ("/v1/recall", {}),
        ("/v1/recall", {"order": "importance"}),
    ],
)
async def test_pages_give_each_memory_once_while_more_come_in(alice: Tenant, path: str, params: dict[str, str]) -> None:
    there = [
        (await alice.batch(*({"content": f"{b} {i}", "importance": (i % 3) / 2} for i in range(6)))) for b in range(4)
    ]
    expected = {memory_id for batch in there for memory_id in batch}
    seen: list[Any] = []
    cursor = None
    for page in range(20):
        query = {**params, "limit": "5"} | ({"cursor": cursor} if cursor else {})
        answer = await alice.get(path, **query)
        seen += answer["memories"]
        cursor = answer["next_cursor"]
        if cursor is None:
            break
        await alice.batch({"content": f"meanwhile {page}", "importance": 1.0})
    ids = [m["id"] for m in seen]
    assert len(ids) == len(set(ids))
    assert expected <= set(ids)
    rows = [m for m in seen if m["id"] in expected]
    newest_first = sorted(rows, key=lambda m: m["id"])
    newest_first.sort(key=lambda m: m["created_at"], reverse=True)
    if params.get("order") == "importance":
        newest_first.sort(key=lambda m: m["importance"], reverse=True)
    assert rows == newest_first


async def test_a_cursor_continues_its_own_query_only(alice: Tenant) -> None:
    await alice.batch(*(f"memory {i}" for i in range(6)))
    cursor = (await alice.get("/v1/memories", limit=2))["next_cursor"]
    assert len((await alice.get("/v1/memories", limit=3, cursor=cursor))["memories"]) == 3
    for path, params in (
        ("/v1/memories", {"namespace": "default"}),
        ("/v1/memories", {"only_deleted": "true"}),
        ("/v1/recall", {}),
        ("/v1/recall", {"order": "importance"}),
    ):
        problem = await alice.get(path, status=422, cursor=cursor, **params)
        assert problem["field"] == "cursor"
    for wrong in ("x", "é", "a" * 512, cursor[:-4], "bnVsbA", "W10"):
        problem = await alice.get("/v1/memories", status=422, cursor=wrong)
        assert problem["field"] == "cursor"


async def test_recall_since(alice: Tenant) -> None:
    [first] = await alice.batch("first")
    moment = (await alice.get(memory(first)))["created_at"]
    [second] = await alice.batch("second")
    after = (datetime.fromisoformat(moment) + timedelta(microseconds=1)).isoformat()
    since = [m["id"] for m in (await alice.get("/v1/recall", since=moment))["memories"]]
    assert since == [second, first]
    assert [m["id"] for m in (await alice.get("/v1/recall", since=after))["memories"]] == [second]
    assert (await alice.get("/v1/recall", since=datetime.now(UTC).isoformat()))["memories"] == []


# -- context


async def test_a_context_is_a_block_ready_for_a_prompt(app: App, alice: Tenant) -> None:
    saved = await alice.save("The walrus eats clams.", title="Walrus", facts=["It is heavy", "It has tusks"])
    answer = await alice.post("/v1/context", {"query": "what does the walrus eat", "budget_ms": 5_000})
    assert answer["context"] == (
        "## Prior observations from warmstart\n\n### Walrus\n\nThe walrus eats clams.\n\n"
        "- It is heavy\n- It has tusks\n"
    )
    assert (answer["ids"], answer["mode"]) == ([saved["id"]], "hybrid")
    assert answer["latency_ms"] > 0


@pytest.mark.parametrize("query", ["", "   ", "\n"])
async def test_an_empty_query_has_an_empty_context(alice: Tenant, query: str) -> None:
    await alice.save("the walrus")
    answer = await alice.post("/v1/context", {"query": query})
    assert (answer["context"], answer["ids"], answer["mode"]) == ("", [], None)


async def test_a_conversation_is_given_a_memory_once(alice: Tenant, bob: Tenant) -> None:
    saved = await alice.save("the walrus")
    ask = {"query": "walrus", "conversation_id": "c1", "budget_ms": 5_000}
    assert (await alice.post("/v1/context", ask))["ids"] == [saved["id"]]
    again = await alice.post("/v1/context", ask)
    assert (again["ids"], again["context"]) == ([], "")
    other = await alice.save("another walrus")
    assert (await alice.post("/v1/context", ask))["ids"] == [other["id"]]
    assert len((await alice.post("/v1/context", ask | {"conversation_id": "c2"}))["ids"]) == 2
    assert len((await alice.post("/v1/context", {"query": "walrus"}))["ids"]) == 2
    theirs = await bob.save("the walrus")
    assert (await bob.post("/v1/context", ask))["ids"] == [theirs["id"]]
    assert len(await alice.page()) == 2  # what was given is never stored


async def test_a_context_keeps_to_its_token_budget(alice: Tenant) -> None:
    await alice.batch(*(f"walrus {i} " + f"word{i} " * 60 for i in range(10)))
    assert (await alice.post("/v1/context", {"query": "walrus", "token_budget": 20, "budget_ms": 5_000}))["ids"] == []
    few = await alice.post("/v1/context", {"query": "walrus", "token_budget": 400, "budget_ms": 5_000})
    many = await alice.post("/v1/context", {"query": "walrus", "token_budget": 4000, "budget_ms": 5_000})
    assert 1 <= len(few["ids"]) < len(many["ids"]) == 10
    assert len(many["context"]) <= 10_000


# -- the space of the vectors


@pytest.mark.parametrize(("change", "named"), [({"embed_model": "other-model"}, DIM), ({"embedding_dim": 8}, 8)])
async def test_vectors_of_another_space_are_left_alone(
    postgres_session: TestServer, tmp_path: Path, change: dict[str, Any], named: int
) -> None:
    dsn = await fresh_database(postgres_session.dsn)
    with FakeProvider(DIM) as provider:
        async with running(settings_for(tmp_path, dsn, provider), provider) as app:
            tenant = await app.tenant()
            walrus = await tenant.save("the walrus")
            assert walrus["embedding_status"] == "ready"
        provider.dim = change.get("embedding_dim", DIM)
        provider.requests.clear()
        command = f"warmstart migrate dimension --to {named}"
        with capture_logs() as logs:
            async with running(settings_for(tmp_path, dsn, provider, **change), provider) as app:
                again = app.same_tenant(tenant)
                saved = await again.save("another walrus")
                assert saved["embedding_status"] == "queued"
                await again.batch("a third walrus")
                answer = await again.search("walrus")
                assert (answer["mode"], answer["degraded"], len(answer["hits"])) == ("keyword", ["space"], 3)
                await app.embed_all()
                assert (await again.get(memory(saved["id"])))["embedding_status"] == "queued"
                health = await again.get("/v1/health")
                assert (health["status"], health["mode"], health["degraded"]) == ("degraded", "keyword", ["space"])
                [embedding] = [d for d in health["dependencies"] if d["name"] == "embedding"]
                assert embedding["status"] == "off"
                assert command in embedding["detail"]
                ready = await again.get("/readyz")
                assert ready["status"] == "degraded"
                assert command in json.dumps(ready)
        [said] = [e for e in logs if e["event"] == "store.space"]
        assert said["log_level"] == "error"
        assert command in said["detail"]
        assert provider.requests == []
        # the old model again: nothing was mixed, and the queue is embedded
        provider.dim = DIM
        async with running(settings_for(tmp_path, dsn, provider), provider) as app:
            again = app.same_tenant(tenant)
            await app.embed_all()
            answer = await again.search("the walrus")
            assert (answer["mode"], answer["degraded"]) == ("hybrid", [])
            assert answer["hits"][0]["id"] == walrus["id"]


@pytest.mark.parametrize("value", ["passage:", "", "passage: x", "query: "])
async def test_a_wrong_prefix_stops_the_start_and_says_how_to_quote(value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"EMBED_MODEL": "intfloat/multilingual-e5-small", "EMBED_DOC_PREFIX": value})
    assert 'EMBED_DOC_PREFIX="passage: "' in str(caught.value)
    assert "quotes" in str(caught.value)


# -- a store that can't be used


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of four megabytes."""
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.fail(f"this test needs to mount a tmpfs (run it as root): {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


async def test_a_full_disk_is_507_and_loses_nothing(postgres_session: TestServer, tmp_path: Path, small: Path) -> None:
    dsn = await fresh_database(postgres_session.dsn)
    settings = settings_for(tmp_path / "home", dsn, None, embedding_enabled=False, lancedb_uri=str(small / "lancedb"))
    async with running(settings) as app:
        tenant = await app.tenant()
        kept = await tenant.save("saved while there was room")
        filler = small / "filler"
        with filler.open("wb") as file:
            try:
                while True:
                    file.write(b"x" * 65_536)
                    file.flush()
            except OSError:
                pass
        saved = []
        for i in range(20):
            response = await tenant.http.post("/v1/memories", json={"content": f"{i} " + "x" * 7_000})
            if response.status_code != 201:
                break
            saved.append(response.json()["id"])
        assert (response.status_code, problem_type(response.json())) == (507, "disk-full")
        assert "Free space" in response.json()["detail"]
        batch = {"memories": [{"content": f"b{i} " + "x" * 7_000} for i in range(50)]}
        assert (await tenant.http.post("/v1/memories/batch", json=batch)).status_code == 507
        result = await tenant.mcp("memory_save", content="m " + "x" * 7_000)
        assert result["isError"] is True
        assert "disk-full" in result["content"][0]["text"]
        assert kept["id"] in await tenant.found("room")
        filler.unlink()
        later = await tenant.save("saved when there was room again")
        assert set(await tenant.page()) == {kept["id"], later["id"], *saved}


async def test_a_damaged_table_is_repaired_at_the_start_and_says_so(
    postgres_session: TestServer, tmp_path: Path
) -> None:
    """The newest manifest as a power cut may leave it."""
    dsn = await fresh_database(postgres_session.dsn)
    with FakeProvider(DIM) as provider:
        settings = settings_for(tmp_path, dsn, provider)
        async with running(settings, provider) as app:
            tenant = await app.tenant()
            kept = await tenant.save("the walrus")
            await tenant.save("lost with the manifest")
        versions = tmp_path / "lancedb" / "memories.lance" / "_versions"
        newest = sorted(versions.glob("*.manifest"))[0]
        newest.write_bytes(b"\0" * newest.stat().st_size)
        async with running(settings, provider) as app:
            again = app.same_tenant(tenant)
            assert kept["id"] in await again.found("the walrus")
            [store] = [d for d in (await again.get("/v1/health"))["dependencies"] if d["name"] == "lancedb"]
            assert "repaired at start" in store["detail"]
            assert (await again.save("saved after it"))["embedding_status"] == "ready"


async def test_a_store_that_is_gone_is_said(postgres_session: TestServer, tmp_path: Path) -> None:
    dsn = await fresh_database(postgres_session.dsn)
    async with running(settings_for(tmp_path, dsn, None, embedding_enabled=False)) as app:
        tenant = await app.tenant()
        await tenant.save("the walrus")
        shutil.move(tmp_path / "lancedb" / "memories.lance", tmp_path / "elsewhere")
        problem = await tenant.get("/v1/memories", status=503)
        assert problem_type(problem) == "store-unavailable"
        assert problem_type(await tenant.save("another", status=503)) == "store-unavailable"
        ready = await tenant.get("/readyz", status=503)
        assert (ready["status"], list(ready["degraded"])) == ("unavailable", ["lancedb"])
        assert (await tenant.http.get("/healthz")).status_code == 200
        shutil.move(tmp_path / "elsewhere", tmp_path / "lancedb" / "memories.lance")
        assert len(await tenant.page()) == 1


async def test_another_process_sees_what_was_saved_here(app: App, alice: Tenant) -> None:
    saved = await alice.save("the walrus of another process")
    script = (
        "import asyncio, sys\n"
        "from warmstart.config import Space\n"
        "from warmstart.store.reads import Reader\n"
        "from warmstart.store.table import open_table\n"
        "async def main():\n"
        "    table = await open_table(sys.argv[1], Space('test-model', '', 16, '', ''))\n"
        "    print((await Reader(table, sys.argv[2]).rows([sys.argv[3]]))[sys.argv[3]]['content'])\n"
        "asyncio.run(main())\n"
    )
    arguments = [app.runtime.settings.lancedb, alice.user_id, saved["id"]]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out.decode().strip() == "the walrus of another process"


async def test_a_save_with_the_embedder_down_is_found_at_once(app: App, alice: Tenant) -> None:
    assert app.provider is not None
    with down(app.provider):
        saved = await alice.save("a walrus that nobody embedded")
        assert saved["embedding_status"] == "queued"
        assert await alice.found("walrus") == [saved["id"]]
