"""Importers on files that the other memories wrote themselves (tests/fakes/exports), and on what could be there."""

from __future__ import annotations

import gzip
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from fakes.memory_api import InMemoryAPI
from warmstart.errors import Invalid
from warmstart.importers import MODULES, read
from warmstart.importers.carry import Carried, carry
from warmstart.importers.items import Item, Report, instant, kind_of, memories, slug, split_text
from warmstart.importers.markdown import front_matter, sections
from warmstart.memory import MAX_CONTENT, Memory, MemoryPatch

EXPORTS = Path(__file__).resolve().parents[1] / "fakes" / "exports"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "sqlite_vec.db"
    path.write_bytes(gzip.decompress((EXPORTS / "mcp-memory-service.db.gz").read_bytes()))
    return path


async def run(api: InMemoryAPI, source: str, path: Path, *, dry_run: bool = False, namespace: str | None = None) -> Any:
    carried = Carried()
    news = memories(read(source, path, namespace, carried.report), source, carried.report)

    async def once(call: Any) -> Any:
        return await call()

    await carry(api, news, source, carried, dry_run=dry_run, save=once, progress=lambda _: None)
    return carried.to_dict()


def by_title(api: InMemoryAPI) -> dict[str, Memory]:
    return {row.title: row for row in api.rows.values()}


# -- each format, as its own program wrote it


@pytest.mark.parametrize("form", ["database", "json"])
async def test_mcp_memory_service(database: Path, form: str) -> None:
    api = InMemoryAPI()
    told = await run(api, "mcp-memory-service", database if form == "database" else EXPORTS / "mcp-memory-service.json")
    rows = list(api.rows.values())
    decision = next(r for r in rows if r.content.startswith("Invoices are numbered"))
    assert (decision.type, sorted(decision.tags), decision.importance) == ("decision", ["billing", "postgres"], 0.8)
    assert decision.occurred_at == instant(1760000000.25)
    assert decision.metadata["project"] == "shop"
    assert next(r for r in rows if "ENOSPC" in r.content).type == "gotcha"
    cat = next(r for r in rows if "Katze" in r.content)
    assert (cat.content, cat.metadata["type"], cat.type) == ("Die Katze heißt Mimi. 漢字", "note", "fact")
    story = sorted((r for r in rows if "long" in r.tags), key=lambda r: r.id)
    assert len(story) == 2
    assert "".join(r.content for r in story).startswith("A long story.\n\nParagraph 0")
    assert not any("To be deleted" in r.content for r in rows)
    reasons = {f"longer than {MAX_CONTENT} characters: carried in parts": 1}
    assert told["not_carried"] == reasons | ({"deleted there": 1} if form == "database" else {})
    assert (told["memories"], told["created"]) == (5, 5)


async def test_server_memory() -> None:
    api = InMemoryAPI()
    told = await run(api, "server-memory", EXPORTS / "server-memory.jsonl", namespace="graph")
    rows = by_title(api)
    ada = rows["Ada"]
    assert ada.content == "Ada (person)\n- Prefers tabs\n- Is on call on Mondays\n- Ada maintains Billing service"
    assert (ada.facts, ada.tags, ada.entities, ada.namespace) == (
        ["Prefers tabs", "Is on call on Mondays"], ["person"], ["Ada", "Billing service"], "graph",
    )  # fmt: skip
    assert rows["日本語"].content == "日本語 (topic)"
    # of an entity that the graph does not have
    assert rows["Ledger feeds Billing service"].type == "relationship"
    assert told == {
        "memories": 4, "created": 4, "known": 0, "changed": 0, "duplicates": 0, "not_carried": {},
    }  # fmt: skip


async def test_basic_memory() -> None:
    api = InMemoryAPI()
    told = await run(api, "basic-memory", EXPORTS / "basic-memory")
    rows = by_title(api)
    note = rows["Invoice numbers"]
    assert note.content.startswith("# Invoice numbers\n\nTwo workers once")
    assert "- [not] an observation" in note.content
    assert note.facts == [
        "[decision] Number invoices by a database sequence #billing (since the outage)",
        "[gotcha] Sequences leave gaps after a rollback #postgres",
    ]
    assert note.tags == ["billing", "postgres"]
    assert note.entities == ["Billing", "Ledger"]
    assert note.metadata["relations"] == ["part_of Billing", "depends on Ledger"]
    assert note.metadata["import"]["id"] == note.metadata["permalink"]
    assert note.namespace == "basic-memory"
    guide = rows["Mimi 漢字"]
    assert (guide.type, guide.metadata["type"], guide.entities) == ("other", "guide", ["Invoice numbers"])
    assert "---" not in guide.content
    assert told["created"] == 2


async def test_agent_files(tmp_path: Path) -> None:
    project = tmp_path / "My Shop"
    (project / "api" / "node_modules").mkdir(parents=True)
    (project / ".claude").mkdir()
    (project / "CLAUDE.md").write_text(
        "Always be brief.\n\n# Style\n\n- tabs\n\n## Go\n\nrun `gofmt`\n\n```sh\n# no heading\n```\n\n# Empty\n\n"
        "# Style\n\nagain\n\nSee @docs/extra.md and @README.md\n"
    )
    (project / "api" / "AGENTS.md").write_text("# Tests\nRun make test.\n")
    (project / ".claude" / "CLAUDE.md").write_text("# Hidden\nstill read\n")
    (project / "api" / "node_modules" / "AGENTS.md").write_text("# Not ours\nno\n")
    (project / "README.md").write_text("# Readme\nno\n")
    api = InMemoryAPI()
    told = await run(api, "agent-files", project)
    rows = by_title(api)
    assert set(rows) == {"CLAUDE.md", "Style", "Style › Go", "Tests", "Hidden"}
    assert rows["CLAUDE.md"].content == "Always be brief."
    assert rows["Style › Go"].content == "Go\n\nrun `gofmt`\n\n```sh\n# no heading\n```"
    assert {r.namespace for r in rows.values()} == {"my-shop"}
    assert {r.type for r in rows.values()} == {"preference"}
    assert told["created"] == 6
    assert told["not_carried"] == {
        "files included by @path: name them on their own": 2, "headings with nothing below them": 1,
    }  # fmt: skip
    assert (await run(api, "agent-files", project / "CLAUDE.md"))["known"] == 4


# -- twice, and not at all


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("mcp-memory-service", "mcp-memory-service.json"),
        ("server-memory", "server-memory.jsonl"),
        ("basic-memory", "basic-memory"),
    ],
)
async def test_twice_is_once_whatever_became_of_it(source: str, name: str) -> None:
    api = InMemoryAPI()
    planned = await run(api, source, EXPORTS / name, dry_run=True)
    assert not api.rows
    first = await run(api, source, EXPORTS / name)
    assert first == planned
    edited, trashed, *_ = list(api.rows)
    await api.update(edited, MemoryPatch(content="edited here"))
    await api.delete(trashed)
    before = dict(api.rows)
    for dry_run in (True, False):
        again = await run(api, source, EXPORTS / name, dry_run=dry_run)
        assert (again["created"], again["known"], again["changed"]) == (0, first["created"], 0)
    assert api.rows == before


async def test_what_changed_at_its_source_is_told_and_stays_here(tmp_path: Path) -> None:
    graph = tmp_path / "memory.jsonl"
    graph.write_bytes((EXPORTS / "server-memory.jsonl").read_bytes())
    api = InMemoryAPI()
    await run(api, "server-memory", graph)
    graph.write_text(graph.read_text().replace("Prefers tabs", "Prefers spaces"))
    told = await run(api, "server-memory", graph)
    assert (told["created"], told["known"], told["changed"]) == (0, 4, 1)
    assert "Prefers tabs" in by_title(api)["Ada"].content


# -- what could be there


@pytest.mark.parametrize("source", MODULES)
@pytest.mark.parametrize(
    "content", [b"", b"\x00\xff\xfe\x00", b"[1, 2]", b'{"a": 1}', b"\n\nnonsense", b"SQLite format 3\x00x"]
)
async def test_a_file_of_another_kind_is_refused_in_one_line(tmp_path: Path, source: str, content: bytes) -> None:
    path = tmp_path / "given"
    path.write_bytes(content)
    if (source, content) == ("server-memory", b""):  # an empty graph is one
        assert (await run(InMemoryAPI(), source, path))["memories"] == 0
    elif source == "agent-files" and b"\xff" not in content:  # any text may be one
        await run(InMemoryAPI(), source, path)
    else:
        with pytest.raises(Invalid) as refused:
            await run(InMemoryAPI(), source, path)
        assert "given" in str(refused.value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("source", MODULES)
async def test_nothing_there(tmp_path: Path, source: str) -> None:
    with pytest.raises(Invalid):
        await run(InMemoryAPI(), source, tmp_path)
    with pytest.raises(Invalid):
        await run(InMemoryAPI(), source, tmp_path / "missing")


async def test_a_database_of_an_older_release_of_it(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE memories (content_hash TEXT, content TEXT, tags TEXT, metadata TEXT)")
        connection.execute("INSERT INTO memories VALUES ('h1', 'kept', 'a,,b , a', 'no json')")
        connection.execute("INSERT INTO memories VALUES (NULL, 'no hash', NULL, NULL)")
    connection.close()
    api = InMemoryAPI()
    told = await run(api, "mcp-memory-service", path)
    [row] = api.rows.values()
    assert (row.content, row.tags) == ("kept", ["a", "b"])
    assert sum(told["not_carried"].values()) == 2


async def test_links_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.md"
    secret.write_text("the secret")
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "own.md").write_text("mine")
    os.symlink(secret, notes / "link.md")
    os.symlink(tmp_path, notes / "folder")
    api = InMemoryAPI()
    await run(api, "basic-memory", notes)
    assert [r.content for r in api.rows.values()] == ["mine"]


def test_whatever_an_item_holds_becomes_memories_within_their_limits() -> None:
    report = Report()
    item = Item(
        id="x" * 5_000,
        content="\ud800a\0" + "b" * 20_000,
        title="t" * 500,
        kind="Weird Kind",
        facts=["f" * 400] * 2 + [f"{n}" for n in range(30)],
        tags=["t" * 100, " ", "a\nb"],
        entities=[str(n) for n in range(50)],
        importance=7,
        metadata={"big": "x" * 5_000, "nan": float("nan")},
    )
    found = list(memories([item, Item(id="empty", content=" \n")], "s", report))
    assert "".join(m.content for m in found) == "a" + "b" * 20_000
    assert [m.title for m in found if m.title] == [f"{'t' * 191} ({n} of 3)" for n in (1, 2, 3)]
    assert len({json.dumps(m.metadata) for m in found}) == 3
    assert found[0].type == "other"
    assert found[0].tags == ["t" * 64, "a b"]
    assert found[1].facts == []
    assert report.left["nothing in it"] == 1
    assert report.left["facts over the 20 a memory has"] == 11


def test_front_matter() -> None:
    assert front_matter("---\ntitle: x\n---\nbody") == ({"title": "x"}, "body")
    for text in (
        "no front matter",
        "---\n- a\n---\nx",
        "---\na: [\n---\nx",
        "---\nunclosed: 1\n",
        "\n---\na: 1\n---\n",
    ):
        assert front_matter(text) == ({}, text)
    # nothing but data is made of it
    assert front_matter("---\na: !!python/object/apply:os.system ['true']\n---\n")[0] == {}


def test_sections_and_parts() -> None:
    found = sections("a\n# One #\nb\n### Three\n```\n# code\n```\n~~~\n# too\n~~~\n## Two\nc\n")
    assert [s.path for s in found] == [(), ("One",), ("One", "Three"), ("One", "Two")]
    assert "# code" in found[2].text
    text = "\n\n".join("word " * 300 for _ in range(20))
    parts = split_text(text)
    assert "".join(parts) == text
    assert all(len(part) <= MAX_CONTENT for part in parts)
    assert all(part.endswith("\n\n") for part in parts[:-1])


def test_names_and_times() -> None:
    names = {"My Shop!": "my-shop", "...": "default", "日本": "default", "a" * 99: "a" * 64, "-x-": "x"}
    assert {name: slug(name) for name in names} == names
    assert (kind_of("Decision"), kind_of("note"), kind_of("x")) == ("decision", "fact", "other")
    assert instant(1e300) is None
    assert instant("2026-01-01T00:00:00+02:00").isoformat() == "2025-12-31T22:00:00+00:00"  # type: ignore[union-attr]
    assert (instant(True), instant(None), instant("soon")) == (None, None, None)
