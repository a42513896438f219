"""Export and import: what comes back is what was there, whatever cuts it off, and whoever else has the ids."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator

from fakes.provider import FakeProvider
from integration.conftest import TestServer
from integration.service import DIM, App, Tenant, fresh_database, hosted, problem_type, running, settings_for
from warmstart.exchange import MAX_CHUNK, MAX_CHUNK_MEMORIES, MAX_VERSIONS, ExportedVersion, json_schema
from warmstart.store import marker
from warmstart.store import predicates as where
from warmstart.store.importing import own_id
from warmstart.store.schema import Row
from warmstart.transfer import MAX_TRANSFERS

pytestmark = pytest.mark.asyncio(loop_scope="module")

NDJSON = {"Content-Type": "application/x-ndjson"}
VALID = Draft202012Validator(json_schema(), format_checker=Draft202012Validator.FORMAT_CHECKER)


async def filled(tenant: Tenant) -> None:
    """Memories of each kind: plain, odd, edited, in the trash, replaced."""
    plain = await tenant.save("the ferry leaves at dawn", tags=["harbour"], importance=0.1)
    await tenant.save(
        "odd \u2028 \U0001f600 \\ \" ' \r\n漢字", metadata={"n": [1, None, 1.5, {"x": "é"}]}, importance=1 / 3,
        occurred_at="0001-01-01T00:00:00Z", namespace="odd.one", type="gotcha", facts=["f"], entities=["C++"],
        source="test", title="t",
    )  # fmt: skip
    for number in range(3):
        await tenant.patch(f"/v1/memories/{plain['id']}", {"content": f"the ferry leaves at {number}"})
    gone = await tenant.save("trashed once")
    await tenant.patch(f"/v1/memories/{gone['id']}", {"title": "edited before it went"})
    await tenant.delete(f"/v1/memories/{gone['id']}")
    old = await tenant.save("the key is under the mat")
    await tenant.save("the key is at the neighbours'", supersedes=old["id"])


async def export(tenant: Tenant, form: str = "ndjson") -> bytes:
    response = await tenant.http.get("/v1/export", params={"format": form})
    assert response.status_code == 200, response.text
    return response.content


async def send(tenant: Tenant, body: bytes, status: int = 200, **headers: str) -> Any:
    response = await tenant.http.post("/v1/import", content=body, headers=NDJSON | headers)
    assert response.status_code == status, response.text
    return response.json()


def memories_of(ndjson: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ndjson.splitlines()[1:]] if ndjson else []


def sorted_memories(ndjson: bytes) -> list[dict[str, Any]]:
    return sorted(memories_of(ndjson), key=lambda m: str(m["id"]))


async def rows(app: App, user_id: str) -> list[Row]:
    found: list[Row] = await app.runtime.table.lance.query().where(where.tenant(user_id).sql).to_list()
    return sorted(found, key=lambda row: row["id"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def elsewhere(postgres_session: TestServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[App]:
    """Another server."""
    dsn = await fresh_database(postgres_session.dsn)
    with FakeProvider(DIM) as provider:
        async with hosted(running(settings_for(tmp_path_factory.mktemp("other"), dsn, provider), provider)) as app:
            yield app


async def test_both_forms_are_what_the_schema_says(alice: Tenant) -> None:
    await filled(alice)
    ndjson, text = await export(alice), await export(alice, "json")
    document = json.loads(text)
    VALID.validate(document)
    for line in ndjson.splitlines():
        VALID.validate(json.loads(line))
    memory = VALID.evolve(schema=json_schema()["$defs"]["ExportedMemory"] | {"$defs": json_schema()["$defs"]})
    for found in document["memories"]:
        memory.validate(found)
    assert {**document, "memories": 0, "exported_at": 0} == {
        **json.loads(ndjson.splitlines()[0]), "memories": 0, "exported_at": 0,
    }  # fmt: skip
    assert document["memories"] == memories_of(ndjson)
    assert document["count"] == len(document["memories"]) == 5
    assert sorted(len(m.get("history", [])) for m in document["memories"]) == [0, 0, 0, 1, 3]
    assert "embedding" not in text.decode()
    head = await alice.http.head("/v1/export")
    assert (head.status_code, head.content) == (200, b"")
    # what the schema does not have, it refuses
    for fault in ({"extra": 1}, {"content": ""}, {"id": "x"}, {"history": [{}]}):
        assert not memory.is_valid(document["memories"][0] | fault)


@pytest.mark.parametrize("form", ["ndjson", "json"])
async def test_on_another_server_all_is_as_it_was(alice: Tenant, elsewhere: App, app: App, form: str) -> None:
    await filled(alice)
    body = await export(alice, form)
    other = await elsewhere.tenant()
    kind = {"Content-Type": "application/json"} if form == "json" else {}
    assert (await send(other, body, **kind))["created"] == 5
    assert sorted_memories(await export(other)) == sorted_memories(await export(alice))
    assert (await send(other, body, **kind))["unchanged"] == 5
    # but for vectors and what waits for one, the very same rows
    derived = {"user_id", "embedding", "embedding_status"}
    before, after = await rows(app, alice.user_id), await rows(elsewhere, other.user_id)
    assert [{k: v for k, v in r.items() if k not in derived} for r in before] == [
        {k: v for k, v in r.items() if k not in derived} for r in after
    ]
    assert {r["embedding_status"] for r in after if r["search_text"]} == {"queued"}
    await elsewhere.embed_all()
    found = await other.found("the key is at the neighbours'")
    assert await other.found("under the mat") == [i for i in await other.found("under the mat") if i in found]
    [trashed] = (await other.get("/v1/memories", only_deleted="true"))["memories"]
    restored = await other.post(f"/v1/memories/{trashed['id']}/restore", None)
    assert restored["title"] == "edited before it went"


async def test_what_is_here_otherwise_stays_and_is_told(alice: Tenant) -> None:
    await filled(alice)
    body = await export(alice)
    ferry, odd, *_ = memories_of(body)
    await alice.patch(f"/v1/memories/{ferry['id']}", {"content": "the ferry was sunk"})
    await alice.delete(f"/v1/memories/{odd['id']}", hard="true")
    told = await send(alice, body)
    assert {k: v for k, v in told.items() if k != "notes"} == {
        "created": 1, "unchanged": 3, "duplicates": 0, "differing": 1, "renamed": 0,
    }  # fmt: skip
    assert told["notes"] == [{"id": ferry["id"], "outcome": "differs", "other": None}]
    assert (await alice.get(f"/v1/memories/{ferry['id']}"))["content"] == "the ferry was sunk"
    assert (await alice.get(f"/v1/memories/{odd['id']}"))["updated_at"] == odd["updated_at"]


async def test_content_that_is_there_under_another_id_is_left_out(alice: Tenant, elsewhere: App) -> None:
    await alice.save("the same content")
    body = await export(alice)
    other = await elsewhere.tenant()
    mine = await other.save("the same content")
    told = await send(other, body)
    assert (told["created"], told["duplicates"]) == (0, 1)
    assert told["notes"][0]["other"] == mine["id"]
    assert len(await other.page()) == 1


async def test_another_tenant_of_the_same_server_gets_ids_of_its_own(app: App, alice: Tenant, bob: Tenant) -> None:
    await filled(alice)
    body, before = await export(alice), await rows(app, alice.user_id)
    told = await send(bob, body)
    assert (told["created"], told["renamed"]) == (5, 5)
    assert await rows(app, alice.user_id) == before
    mine, theirs = memories_of(body), memories_of(await export(bob))
    assert not {m["id"] for m in mine} & {m["id"] for m in theirs}
    renamed = {m["id"]: own_id(bob.user_id, m["id"]) for m in mine}
    text = json.dumps(sorted(mine, key=lambda m: renamed[m["id"]]))
    for old, new in renamed.items():
        text = text.replace(old, new)
    assert json.loads(text) == sorted(theirs, key=lambda m: str(m["id"]))
    assert alice.user_id not in json.dumps(told)
    # and once more: the same ids, so nothing twice, the trash included
    assert (await send(bob, body))["unchanged"] == 5
    assert [m["id"] for m in memories_of(await export(bob))] == [m["id"] for m in theirs]


FAULTS: dict[str, tuple[Any, str]] = {
    "no JSON": ("{", "malformed"),
    "no object": ([1], "invalid"),
    "unknown field": ({"embedding": [1.0]}, "invalid"),
    "of another tenant": ({"user_id": "usr_x"}, "invalid"),
    "too long": ({"content": "x" * 8_001}, "invalid"),
    "wrong type": ({"importance": "0.5"}, "invalid"),
    "another content": ({"content": "changed"}, "invalid"),
    "NUL": ({"content": "a\0b"}, "invalid"),
    "half in the trash": ({"deleted_at": "2026-01-01T00:00:00Z"}, "invalid"),
    "reserved metadata": ({"metadata": {"warmstart:links": {}}}, "invalid"),
    "bad id": ({"id": "mem_'; DROP"}, "invalid"),
    "superseding itself": ({"supersedes": "SELF"}, "invalid"),
    "no time": ({"created_at": "yesterday"}, "invalid"),
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_bad_line_is_told_by_its_number_and_nothing_is_written(
    alice: Tenant, elsewhere: App, fault: str
) -> None:
    await alice.batch("good one", "good two", "good three")
    lines = (await export(alice)).splitlines(keepends=True)
    changed, kind = FAULTS[fault]
    if isinstance(changed, dict):
        memory = json.loads(lines[2])
        memory |= {k: memory["id"] if v == "SELF" else v for k, v in changed.items()}
        lines[2] = json.dumps(memory).encode() + b"\n"
    else:
        lines[2] = (changed if isinstance(changed, str) else json.dumps(changed)).encode() + b"\n"
    other = await elsewhere.tenant()
    status = 400 if kind == "malformed" else 422
    told = await send(other, b"".join(lines), status)
    assert problem_type(told) == kind
    assert told["line"] == 3
    assert told["detail"].startswith("line 3: ")
    assert await other.page(include_deleted="true") == []


async def test_what_no_request_may_be(alice: Tenant) -> None:
    await alice.save("one")
    [line] = lines = (await export(alice)).splitlines(keepends=True)[1:]
    assert problem_type(await send(alice, line * 2, 422)) == "invalid"
    assert (await send(alice, b'{"schema": "warmstart/export/2"}\n' + line, 422))["line"] == 1
    many = b"".join(line.replace(b"mem_", b"mem_")[:-1] + b"\n" for _ in range(MAX_CHUNK_MEMORIES + 1))
    assert "at most" in (await send(alice, many, 422))["detail"]
    assert problem_type(await send(alice, b" " * (MAX_CHUNK + 1), 413)) == "too-large"
    assert (
        problem_type(await send(alice, b"".join(lines), 415, **{"Content-Type": "text/csv"}))
        == "unsupported-media-type"
    )
    assert problem_type(await send(alice, b"", 400)) == "malformed"
    assert (await send(alice, b"\n\n"))["created"] == 0


async def test_the_largest_memory_fits_into_one_request(alice: Tenant) -> None:
    await alice.save("\x01" * 8_000, facts=["\x01" * 300] * 20, metadata={"m": "m" * 4_000})
    [found] = memories_of(await export(alice))
    version = {k: v for k, v in found.items() if k in ExportedVersion.model_fields}
    found["history"] = [version | {"version": n} for n in range(MAX_VERSIONS, 0, -1)]
    for key in ("facts", "tags", "entities"):
        size = 300 if key == "facts" else 64
        found[key] = [chr(1) * size] * 20
        for version in found["history"]:
            version[key] = found[key]
    line = json.dumps(found, ensure_ascii=False).encode()
    assert MAX_CHUNK / 4 < len(line) < MAX_CHUNK
    assert (await send(alice, line))["differing"] == 1


async def test_an_export_is_of_one_moment(app: App, alice: Tenant) -> None:
    ids = [(await alice.save(f"moment {n}"))["id"] for n in range(20)]
    chunks = app.runtime.service(alice.user_id).export("ndjson")
    # opened, and nothing of it read yet
    begun = asyncio.ensure_future(anext(chunks))
    first = await begun
    for number, memory_id in enumerate(ids):
        if number % 2:
            await alice.patch(f"/v1/memories/{memory_id}", {"content": f"later {number}"})
        else:
            await alice.delete(f"/v1/memories/{memory_id}", hard="true")
    await alice.save("new")
    await app.runtime.maintenance.optimize()
    body = first + b"".join([chunk async for chunk in chunks])
    assert [m["content"] for m in memories_of(body)] == [f"moment {n}" for n in range(20)]
    assert not any("history" in m for m in memories_of(body))


async def test_exports_at_once_are_few(app: App, alice: Tenant) -> None:
    for number in range(40):  # enough for a second piece
        await alice.batch({"content": f"{number} " + "x" * 4_000})
    open_exports = [app.runtime.service(alice.user_id).export("json") for _ in range(MAX_TRANSFERS)]
    for chunks in open_exports:
        await anext(chunks)
    assert problem_type((await alice.http.get("/v1/export")).json()) == "overloaded"
    assert (await alice.http.post("/v1/import", content=b"\n", headers=NDJSON)).status_code == 503
    for chunks in open_exports:
        await chunks.aclose()  # type: ignore[attr-defined]
    assert (await alice.http.get("/v1/export")).status_code == 200


async def test_while_a_migration_runs_neither_goes(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    await alice.save("one")
    line = (await export(alice)).splitlines()[1]

    async def half() -> float:
        return 0.5

    with monkeypatch.context() as patch:
        patch.setattr(app.runtime.table, "share_back", half)
        assert problem_type((await alice.http.get("/v1/export")).json()) == "migrating"
    directory = app.runtime.table.directory
    assert directory is not None
    with marker.only_migrator(directory):
        assert problem_type(await send(alice, line, 503)) == "migrating"


async def test_an_import_that_was_cut_off_is_sent_again(alice: Tenant, elsewhere: App) -> None:
    """History is there before its memory, so what was answered or not, the second time makes it whole."""
    for number in range(6):
        made = await alice.save(f"cut {number}")
        await alice.patch(f"/v1/memories/{made['id']}", {"title": f"title {number}"})
    body = await export(alice)
    other = await elsewhere.tenant()
    table = elsewhere.runtime.table
    with pytest.MonkeyPatch.context() as patch:

        async def cut_off(*_: Any) -> None:
            raise OSError("cut off")

        patch.setattr(table.lance, "add", cut_off)
        assert problem_type(await send(other, body, 503)) == "store-unavailable"
    assert await other.page() == []
    lines = body.splitlines(keepends=True)
    assert (await send(other, b"".join(lines[:4])))["created"] == 3
    told = await send(other, body)
    assert (told["created"], told["unchanged"]) == (3, 3)
    assert sorted_memories(await export(other)) == sorted_memories(body)


async def test_whatever_is_done_before_it_comes_back_the_same(tmp_path: Path, alice: Tenant, elsewhere: App) -> None:
    dice = random.Random(7)
    ids: list[str] = []
    for step in range(40):
        target = dice.choice(ids) if ids else None
        match dice.choice(["save", "supersede", "edit", "trash", "restore"]):
            case "save":
                ids += await alice.batch({"content": f"step {step}", "importance": dice.random()})
            case "supersede" if target:
                response = await alice.http.post("/v1/memories", json={"content": f"step {step}", "supersedes": target})
                ids += [response.json()["id"]] if response.status_code == 201 else []
            case "edit" if target:
                await alice.http.patch(f"/v1/memories/{target}", json={"content": f"edit {step}"})
            case "trash" if target:
                await alice.http.delete(f"/v1/memories/{target}")
            case "restore" if target:
                await alice.http.post(f"/v1/memories/{target}/restore")
    body = await export(alice)
    other = await elsewhere.tenant()
    lines = body.splitlines(keepends=True)[1:]
    dice.shuffle(lines)
    for start in range(0, len(lines), 7):
        await send(other, b"".join(lines[start : start + 7]))
    assert sorted_memories(await export(other)) == sorted_memories(body)
