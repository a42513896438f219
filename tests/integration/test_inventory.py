"""What an inventory says of a store, of harm done to it, and of its copies."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import lancedb
import pytest
from click.testing import CliRunner, Result

from integration.service import DIM, App, Tenant, running, settings_for
from warmstart.cli import main
from warmstart.config import Settings, Space
from warmstart.errors import BookkeepingUnavailable, StoreUnavailable
from warmstart.memory import NewMemory
from warmstart.store import inventory
from warmstart.store.inventory import SAMPLE, differences, take
from warmstart.store.reads import CONTENT_BATCH, Inspector
from warmstart.store.schema import content_hash, row_of
from warmstart.store.schema import now as clock
from warmstart.store.table import open_table

SPACE = Space("test-model", "r", DIM, "", "")


async def command(home: Path, *arguments: str, dsn: str = "", stdin: str = "") -> Result:
    environ = {"LANCEDB_URI": str(home), "DATABASE_URL": dsn, "WARMSTART_HOME": str(home / "none")}
    words = ["store", "inventory", *arguments]
    return await asyncio.to_thread(CliRunner().invoke, main, words, env=environ, input=stdin)


def told(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def files(directory: Path) -> dict[str, tuple[int, int]]:
    """Each file with its size and time."""
    found = {path: path.stat() for path in directory.rglob("*")}
    return {str(path): (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


async def fill(directory: Path, contents: dict[str, list[str]]) -> list[str]:
    """A store with these contents by tenant; the ids."""
    table = await open_table(str(directory), SPACE)
    rows = [row_of(NewMemory(content=text), user, clock()) for user, texts in contents.items() for text in texts]
    await table.lance.add([dict(row) for row in rows])
    return [row["id"] for row in rows]


async def change(directory: Path, **kwargs: Any) -> None:
    await (await (await lancedb.connect_async(str(directory))).open_table("memories")).update(**kwargs)


@pytest.fixture
def settings(tmp_path: Path, dsn: str) -> Settings:
    return settings_for(tmp_path / "home", dsn, None, embedding_enabled=False)


async def two_tenants(app: App) -> tuple[Tenant, Tenant]:
    one, two = await app.tenant(), await app.tenant()
    for number in range(4):
        await one.save(f"harbour note {number}: the ferry to Bergen leaves at dawn")
    gone = await two.save("the cellar key hangs behind the clock")
    await two.save("der Leuchtturm wird am Mittwoch gestrichen")
    await two.delete(f"/v1/memories/{gone['id']}")
    await app.written_behind()
    return one, two


async def test_it_counts_checks_and_searches_each_tenant_beside_a_running_service(settings: Settings, dsn: str) -> None:
    async with running(settings) as app:
        one, two = await two_tenants(app)
        before = files(settings.warmstart_home / "lancedb")
        found = await take(settings.lancedb, dsn, search=True)
        assert files(settings.warmstart_home / "lancedb") == before, "something was written"
    assert found["ok"]
    assert (found["rows"], found["mismatches"], found["faults"]) == (6, 0, [])
    counted = {name: (t["active"], t["trashed"], t["by_status"]) for name, t in found["tenants"].items()}
    assert counted == {one.user_id: (4, 0, {"queued": 4}), two.user_id: (1, 1, {"queued": 2})}
    assert found["search"] == {"searched": 2, "found": 2, "without_words": 0}
    assert found["postgres"] == {
        "schema": 1, "tenants": 2, "active_keys": 2, "status_rows": 6,
        "status_missing": 0, "status_orphaned": 0, "status_differing": 0, "unknown_tenants": [],
    }  # fmt: skip
    assert found["space"]["model"] == "test-model"
    assert len(found["sample"]) == 6
    assert all(row["ok"] for row in found["sample"])
    assert found["bytes"] > 1000


async def test_a_copy_is_the_same_and_a_later_state_is_not(settings: Settings, dsn: str, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    async with running(settings) as app:
        one, two = await two_tenants(app)
        first = await command(Path(settings.lancedb), "--search", "--json", dsn=dsn)
        assert first.exit_code == 0, first.output
        shutil.copytree(settings.lancedb, copy)
        await one.save("written after the copy was made")
        gone = (await two.page())[0]
        await two.delete(f"/v1/memories/{gone}", hard="true")
    earlier = tmp_path / "earlier.json"
    earlier.write_text(first.stdout)
    same = await command(copy, "--search", "--against", str(earlier), "--json", dsn=dsn)
    assert same.exit_code == 0, same.output
    assert told(same)["differences"] == []
    later = await command(Path(settings.lancedb), "--against", "-", "--json", stdin=first.stdout)
    assert later.exit_code == 1
    lines = told(later)["differences"]
    assert f"tenant {one.user_id}, active: 4 before, 5 now" in lines
    assert f"tenant {two.user_id}, active: 1 before, 0 now" in lines
    assert any(line.startswith(f"memory {gone} is not there") for line in lines)
    assert all(f"Error: {line}" in later.stderr for line in lines)


async def test_contents_that_changed_under_their_hash_are_named(tmp_path: Path) -> None:
    ids = await fill(tmp_path, {"usr_a": [f"note {n}" for n in range(30)], "usr_b": ["other"]})
    before = await take(str(tmp_path))
    await change(tmp_path, where=f"id = '{ids[3]}'", updates={"content": "forged"})
    after = await command(tmp_path, "--json")
    assert after.exit_code == 1
    assert told(after)["mismatches"] == 1
    assert told(after)["faults"] == [f"the content of {ids[3]} does not have the hash that is kept of it"]
    assert [row["id"] for row in told(after)["sample"] if not row["ok"]] == [ids[3]]
    # with its hash changed too, only an earlier inventory knows
    await change(tmp_path, where=f"id = '{ids[3]}'", updates={"content_hash": content_hash("forged")})
    whole = await take(str(tmp_path))
    assert whole["ok"]
    said = differences(before, whole)
    assert f"memory {ids[3]} has another content" in said
    assert [line.split(":")[0] for line in said if "digest" in line] == ["tenant usr_a, digest"]


async def test_order_and_compaction_change_nothing(tmp_path: Path) -> None:
    await fill(tmp_path, {"usr_a": [f"note {n}" for n in range(20)]})
    await fill(tmp_path, {"usr_b": ["more"], "usr_a": ["and more"]})
    before = await take(str(tmp_path))
    await (await open_table(str(tmp_path), SPACE)).lance.optimize()
    after = await take(str(tmp_path))
    assert after["version"] != before["version"]
    assert differences(before, after) == []


async def test_a_search_that_finds_nothing_is_a_fault(tmp_path: Path) -> None:
    await fill(
        tmp_path, {"usr_a": ["the ferry to Bergen leaves at dawn"], "usr_b": ["🦊", "of it"], "usr_c": ["灯台守の日誌"]}
    )
    await (await open_table(str(tmp_path), SPACE)).lance.optimize()
    found = await take(str(tmp_path), search=True)
    assert (found["search"], found["faults"]) == ({"searched": 2, "found": 2, "without_words": 1}, [])
    # the text that is searched is another column than the one that is counted
    await change(tmp_path, where="user_id = 'usr_a'", updates={"search_text": "nothing of the kind"})
    lost = await take(str(tmp_path), search=True)
    assert not lost["ok"]
    assert lost["faults"] == ["full-text search of tenant usr_a does not find its own memory by its words"]
    for index in (tmp_path / "memories.lance" / "_indices").iterdir():
        shutil.rmtree(index)
    broken = await take(str(tmp_path), search=True)
    assert any("tenant usr_a does not find" in fault for fault in broken["faults"])


async def test_tenants_that_postgres_does_not_know_are_a_fault(settings: Settings, dsn: str) -> None:
    async with running(settings) as app:
        await two_tenants(app)
        await fill(Path(settings.lancedb), {"usr_stranger": ["whose is this?"]})
        found = await take(settings.lancedb, dsn)
    assert found["postgres"]["unknown_tenants"] == ["usr_stranger"]
    assert found["postgres"]["status_missing"] == 1
    assert found["faults"] == ["Postgres knows no tenant usr_stranger, whose memories are here"]


async def test_it_holds_no_more_than_a_batch_and_a_sample(tmp_path: Path) -> None:
    many = 2 * CONTENT_BATCH + SAMPLE
    await fill(tmp_path, {"usr_a": [f"note {n}" for n in range(many)]})
    table = await open_table(str(tmp_path), SPACE)
    sizes = [len(rows) async for rows in Inspector(table).contents()]
    assert sum(sizes) == many
    assert max(sizes) <= CONTENT_BATCH
    found = await take(str(tmp_path))
    assert len(found["sample"]) == SAMPLE
    keys = [inventory._number(row["id"]) for row in found["sample"]]
    assert keys == sorted(keys)


async def test_what_can_not_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="there is no memory table"):
        await take(str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
    assert (await command(tmp_path / "none")).exit_code == 5
    await fill(tmp_path, {"usr_a": ["note"]})
    with pytest.raises(BookkeepingUnavailable):
        await take(str(tmp_path), "postgresql://nobody@127.0.0.1:9/none")
    assert (await command(tmp_path, dsn="postgresql://nobody@127.0.0.1:9/none")).exit_code == 5
    for text in ("no json", "{}", "[]"):
        refused = await command(tmp_path, "--against", "-", stdin=text)
        assert refused.exit_code == 2, refused.output
        assert "--against" in refused.stderr
