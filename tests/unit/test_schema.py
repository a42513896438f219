"""The 21 columns, ids in the order of time, and what follows from a row's other values."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstart.config import Space
from warmstart.memory import ID_PATTERN, MAX_TITLE, NewMemory
from warmstart.store import schema as s

AT = datetime(2026, 5, 1, tzinfo=UTC)
COLUMNS = {
    "id": "string", "user_id": "string", "namespace": "string", "type": "string", "title": "string",
    "content": "string", "facts": "list<item: string>", "tags": "list<item: string>",
    "entities": "list<item: string>", "importance": "float", "source": "string", "metadata": "string",
    "search_text": "string", "content_hash": "string", "embedding": "fixed_size_list<item: float>[384]",
    "embedding_status": "string", "occurred_at": "timestamp[us, tz=UTC]",
    "created_at": "timestamp[us, tz=UTC]", "updated_at": "timestamp[us, tz=UTC]",
    "deleted_at": "timestamp[us, tz=UTC]", "expires_at": "timestamp[us, tz=UTC]",
}  # fmt: skip


def test_the_columns_are_those_of_the_contract() -> None:
    made = s.schema(Space("m", "r", 384, "passage: ", "query: "))
    assert {f.name: str(f.type) for f in made} == COLUMNS
    assert list(made.names) == list(s.COLUMNS)
    assert len(made) == 21
    assert {f.name for f in made if f.nullable} == {"embedding", "deleted_at", "expires_at"}


def test_the_space_is_the_tables_own_setting() -> None:
    space = Space("m", "r", 384, "passage: ", "query: ")
    kept = s.schema(space).metadata[s.SPACE_KEY]
    assert Space.from_json(kept.decode()) == space


def test_derived_columns_and_vectors_are_not_shown() -> None:
    assert set(s.COLUMNS) - set(s.SHOWN) == {"search_text", "embedding"}


def test_an_id_is_a_uuid7_in_crockford_base32() -> None:
    before = time.time_ns() // 1_000_000
    made = s.new_id()
    after = time.time_ns() // 1_000_000
    assert re.fullmatch(ID_PATTERN, made)
    assert len(made) == len("mem_") + 26
    value = 0
    for letter in made.removeprefix("mem_"):
        value = value << 5 | "0123456789abcdefghjkmnpqrstvwxyz".index(letter)
    assert value < 1 << 128
    assert before <= value >> 80 <= after
    assert value >> 76 & 0xF == 7
    assert value >> 62 & 0x3 == 2


def test_ids_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = [0, 1, 999, 10**12, 1_764_000_000_000, 1_764_000_000_001, 2**48 - 1]
    made = []
    for ms in moments:
        monkeypatch.setattr(s.time, "time_ns", lambda ms=ms: ms * 1_000_000)
        made.append(s.new_id())
    assert made == sorted(made)
    assert all(re.fullmatch(ID_PATTERN, i) for i in made)


def test_ids_do_not_meet() -> None:
    assert len({s.new_id() for _ in range(20_000)}) == 20_000


def test_the_hash_is_of_the_content_as_given() -> None:
    assert s.content_hash("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert s.content_hash("é") != s.content_hash("e\u0301")
    assert s.content_hash("a ") != s.content_hash("a")
    assert s.content_hash("a\r\n") != s.content_hash("a\n")


@pytest.mark.parametrize(
    ("content", "title"),
    [
        ("one line", "one line"),
        ("first\nsecond", "first"),
        ("\n\n  indented  \nsecond", "indented"),
        ("x" * 300, "x" * MAX_TITLE),
        ("first\rsecond", "first"),
        (" ", " "),
        ("\n", "\n"),
    ],
)
def test_a_title_is_the_first_line_that_says_something(content: str, title: str) -> None:
    assert s.title_of(content) == title


storable = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=300)


@given(content=storable)
def test_a_derived_title_is_never_empty_nor_too_long(content: str) -> None:
    assert 1 <= len(s.title_of(content)) <= MAX_TITLE


@given(
    content=storable,
    title=st.none() | storable.map(lambda t: t[:MAX_TITLE]),
    tags=st.lists(storable.map(lambda t: t[:64]), max_size=3),
)
def test_a_row_keeps_what_was_given_byte_for_byte(content: str, title: str | None, tags: list[str]) -> None:
    made = s.row_of(NewMemory(content=content, title=title, tags=tags), "u", AT)
    assert made["content"] == content
    assert made["tags"] == tags
    assert made["title"] == (title or s.title_of(content))
    assert made["content_hash"] == s.content_hash(content)
    assert s.derived(made) == {k: made[k] for k in ("content_hash", "search_text")}
    table = pa.Table.from_pylist([made], schema=s.schema(Space("m", "r", 4, "", "")))
    assert table["content"][0].as_py() == content


def test_a_new_row_waits_for_its_vector() -> None:
    made = s.row_of(NewMemory(content="x", metadata={"a": "ü", "b": [1, None]}), "u", AT)
    assert set(made) == set(s.COLUMNS)
    assert (made["embedding"], made["embedding_status"]) == (None, "queued")
    assert made["occurred_at"] == made["created_at"] == made["updated_at"] == AT
    assert made["metadata"] == '{"a":"ü","b":[1,null]}'
    assert made["deleted_at"] is made["expires_at"] is None


def test_occurred_at_is_kept_where_given() -> None:
    then = datetime(1815, 12, 10, tzinfo=UTC)
    assert s.row_of(NewMemory(content="x", occurred_at=then), "u", AT)["occurred_at"] == then
