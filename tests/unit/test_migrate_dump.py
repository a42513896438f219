"""The dump's form: a line gives its row again, byte for byte, and a digest that no accident keeps the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.migrations import rows_of, space
from warmstart.errors import StoreUnavailable
from warmstart.migrate import dump
from warmstart.migrate.dump import KEPT, Manifest, Tally
from warmstart.store.schema import Row, as_float32, schema

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
TIME = st.datetimes(timezones=st.just(UTC))


@st.composite
def rows(draw: st.DrawFn) -> Row:
    [row] = rows_of(1, 2)
    row |= {name: draw(TEXT) for name in ("title", "content", "source", "search_text")}
    row |= {name: draw(st.lists(TEXT, max_size=3)) for name in ("facts", "tags", "entities")}
    row |= {name: draw(TIME) for name in ("occurred_at", "created_at", "updated_at")}
    row |= {name: draw(st.none() | TIME) for name in ("deleted_at", "expires_at")}
    return row | {"importance": as_float32(draw(st.floats(0, 1, width=32)))}


@given(rows())
def test_a_line_gives_its_row_again(row: Row) -> None:
    kept = {name: row[name] for name in KEPT}
    line = dump.encode(row)
    assert line.count(b"\n") == 1
    assert dump.decode(line) == kept
    # and the table keeps what it is given
    again = pa.Table.from_pylist([dump.decode(line) | {"embedding": None}], schema=schema(space(2))).to_pylist()
    assert dump.encode(again[0]) == line


def test_a_line_has_every_column_but_the_vector() -> None:
    [row] = rows_of(1, 2)
    assert len(KEPT) == 20
    assert list(json.loads(dump.encode(row))) == KEPT


def tally(*rows: Row) -> str:
    made = Tally()
    for row in rows:
        made.add(row)
    return made.digest


def test_the_digest_is_of_what_the_rows_say() -> None:
    one, two, three = rows_of(3, 2)
    assert tally(one, two, three) == tally(three, one, two)
    assert tally(one | {"embedding": None, "embedding_status": "queued"}) == tally(one | {"embedding_status": "ready"})
    different = [
        tally(one, two), tally(one, two, two), tally(one, one), tally(two, two), tally(one, two | {"title": "x"}),
        tally(one, two | {"updated_at": datetime.now(UTC)}), tally(one | {"deleted_at": None, "expires_at": None}, two),
        tally(one | {"user_id": "tenant-9"}, two), tally(one), tally(),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-10],
        lambda text: text + text.splitlines(keepends=True)[0],
        lambda text: text.replace(b"walrus", b"WALRUS", 1),
        lambda text: b"".join(text.splitlines(keepends=True)[1:]),
        lambda text: b"",
    ],
)
def test_a_dump_that_is_not_what_was_written_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    lines = [dump.encode(row) for row in rows_of(8, 2)]
    (tmp_path / "memories.ndjson").write_bytes(b"".join(lines))
    whole = manifest(tmp_path)
    dump.check(tmp_path, whole)
    (tmp_path / "memories.ndjson").write_bytes(damage(b"".join(lines)))
    with pytest.raises(StoreUnavailable, match="damaged"):
        dump.check(tmp_path, whole)


def manifest(folder: Path) -> Manifest:
    content = (folder / "memories.ndjson").read_bytes()
    made = [dump.decode(line) for line in content.splitlines(keepends=True)]
    return Manifest(len(made), len(content), hashlib.sha256(content).hexdigest(), tally(*made), 1, "then")


def test_rows_behind_the_first_ones(tmp_path: Path) -> None:
    made = rows_of(1_203, 2)
    (tmp_path / "memories.ndjson").write_bytes(b"".join(dump.encode(row) for row in made))
    batches = list(dump.rows_behind(tmp_path, 100))
    assert [len(batch) for batch in batches] == [500, 500, 103]
    assert [row["id"] for batch in batches for row in batch] == [row["id"] for row in made[100:]]
    assert list(dump.rows_behind(tmp_path, 1_203)) == []
