"""The journal of commits: whoever reads it to its end knows of every write, or knows that it doesn't."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmstart.store import journal
from warmstart.store.journal import MAX_IDS, JournalReader, JournalWriter, Rows, merge

DROP: list[Rows | None] = [None]


def poll(reader: JournalReader) -> list[Rows | None]:
    return list(reader.poll())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def writer(tmp_path: Path) -> JournalWriter:
    return JournalWriter(tmp_path)


@pytest.fixture
def reader(tmp_path: Path, writer: JournalWriter) -> JournalReader:
    """One that has read to the end: version 7."""
    writer.append(7, 7, None)
    made = JournalReader(tmp_path)
    assert set(poll(made)) == {None}
    assert made.usable
    return made


# -- what is read


def test_each_line_is_read_once_and_in_order(writer: JournalWriter, reader: JournalReader) -> None:
    assert poll(reader) == []
    writer.append(7, 8, {"alice": ["a"]})
    writer.append(8, 11, {"bob": None, "alice": ["b", "c"]})
    writer.append(11, 12, {})
    assert poll(reader) == [{"alice": ["a"]}, {"bob": None, "alice": ["b", "c"]}, {}]
    assert poll(reader) == []


def test_any_row_at_all_drops_everything_and_the_chain_goes_on(writer: JournalWriter, reader: JournalReader) -> None:
    writer.append(7, 8, None)
    writer.append(8, 9, {"alice": ["a"]})
    assert poll(reader) == [None, {"alice": ["a"]}]


@pytest.mark.parametrize("before", [6, 8, 9, 0])
def test_a_gap_drops_everything(writer: JournalWriter, reader: JournalReader, before: int) -> None:
    writer.append(before, 10, {"alice": ["a"]})
    assert poll(reader) == DROP
    writer.append(10, 11, {"alice": ["a"]})
    assert poll(reader) == [{"alice": ["a"]}]


def test_a_group_that_changed_nothing_shows_the_gap_before_it(writer: JournalWriter, reader: JournalReader) -> None:
    writer.append(7, 7, {})
    assert poll(reader) == [{}]
    writer.append(8, 8, {})  # who committed 8 was killed before its line
    assert poll(reader) == DROP


def test_a_first_look_drops_whatever_it_finds(tmp_path: Path, writer: JournalWriter) -> None:
    for version in range(5):
        writer.append(version, version + 1, {"alice": ["a"]})
    reader = JournalReader(tmp_path)
    assert poll(reader)[0] is None
    writer.append(5, 6, {"alice": ["a"]})
    assert poll(reader) == [{"alice": ["a"]}]


@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.dictionaries(st.text(max_size=5), st.lists(st.text(max_size=4)))), max_size=12
    )
)
@settings(max_examples=50)
def test_any_tenant_and_id_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, dict[str, list[str]]]]
) -> None:
    directory = tmp_path_factory.mktemp("any")
    writer, reader = JournalWriter(directory), JournalReader(directory)
    writer.append(0, 0, None)
    poll(reader)
    due: list[Rows | None] = []
    for version, (look, rows) in enumerate(steps):
        writer.append(version, version + 1, rows)
        due.append(rows)
        if look:
            assert poll(reader) == due
            due = []
    assert poll(reader) == due
    reader.close()


# -- harm done to the file


def test_without_a_journal_nothing_is_trusted(tmp_path: Path, writer: JournalWriter) -> None:
    reader = JournalReader(tmp_path)
    assert poll(reader) == DROP
    assert not reader.usable
    writer.append(1, 2, {"alice": ["a"]})
    assert set(poll(reader)) == {None}
    assert reader.usable


def test_a_deleted_journal_is_trusted_again_from_a_new_line_on(
    path: Path, writer: JournalWriter, reader: JournalReader
) -> None:
    path.unlink()
    for _ in range(2):
        assert poll(reader) == DROP
        assert not reader.usable
    writer.append(8, 9, {"alice": ["a"]})
    assert set(poll(reader)) == {None}
    assert reader.usable
    writer.append(9, 10, {"alice": ["a"]})
    assert poll(reader) == [{"alice": ["a"]}]


@pytest.mark.parametrize("again", range(5))
def test_a_new_file_as_large_as_the_old_is_noticed(
    path: Path, writer: JournalWriter, reader: JournalReader, again: int
) -> None:
    """File systems give a freed inode to the next file; the size says nothing either."""
    size = path.stat().st_size
    path.unlink()
    (path.parent / "other").touch()  # whichever inode is next
    (path.parent / "other").unlink()
    writer.append(8, 8, None)
    assert path.stat().st_size == size
    assert set(poll(reader)) == {None}
    writer.append(8, 9, {"alice": ["a"]})
    assert poll(reader) == [{"alice": ["a"]}]


def test_a_file_cut_to_nothing_and_written_again_is_noticed(
    path: Path, writer: JournalWriter, reader: JournalReader
) -> None:
    size = path.stat().st_size
    os.truncate(path, 0)
    writer.append(8, 8, None)
    assert path.stat().st_size == size
    assert set(poll(reader)) == {None}


@pytest.mark.parametrize("left", [0, 3])
def test_a_shorter_file_drops_everything(path: Path, writer: JournalWriter, reader: JournalReader, left: int) -> None:
    os.truncate(path, left)
    assert None in poll(reader)
    writer.append(8, 9, {"alice": ["a"]})
    assert set(poll(reader)) == {None}
    writer.append(9, 10, {"alice": ["a"]})
    writer.append(10, 11, {"alice": ["b"]})
    assert poll(reader)[-1] == {"alice": ["b"]}


GARBAGE: list[bytes] = [
    b"\n", b"x\n", b"\x00\xff\xfe\n", b"5\n", b"null\n", b"[]\n", b"[7, 8]\n", b"[7, 8, 9]\n", b'[7, 8, "abc"]\n',
    b"[7, 8, [1]]\n", b'"abc"\n', b'{"a": 1, "b": 2, "c": 3}\n', b"[7, 8, {}, {}]\n", b"[" * 100_000 + b"\n", b"\r\n",
    b'[7, 8, {"alice": ["a"]}\n',
]  # fmt: skip


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda g: repr(g[:20]))
def test_garbage_drops_everything(path: Path, writer: JournalWriter, reader: JournalReader, garbage: bytes) -> None:
    with path.open("ab") as file:
        file.write(garbage)
    writer.append(8, 9, {"alice": ["a"]})
    assert None in poll(reader)
    writer.append(9, 10, {"alice": ["b"]})
    assert poll(reader) == [{"alice": ["b"]}]


def test_half_a_line_is_read_once_it_is_whole(path: Path, reader: JournalReader) -> None:
    line = json.dumps([7, 8, {"alice": ["a"]}]).encode() + b"\n"
    with path.open("ab", buffering=0) as file:
        for byte in line[:-1]:
            file.write(bytes([byte]))
            assert poll(reader) == []
        file.write(line[-1:])
    assert poll(reader) == [{"alice": ["a"]}]


def test_half_a_line_of_a_killed_writer(path: Path, writer: JournalWriter, reader: JournalReader) -> None:
    with path.open("ab") as file:
        file.write(b'[7, 8, {"alice": ["a"')
    assert poll(reader) == []  # nobody was answered yet
    writer.append(8, 9, {"bob": ["b"]})
    assert poll(reader) == DROP


def test_what_is_no_file_is_not_trusted(path: Path, reader: JournalReader) -> None:
    path.unlink()
    path.mkdir()
    assert poll(reader) == DROP
    assert not reader.usable
    path.rmdir()


def test_a_file_that_may_not_be_read(
    path: Path, writer: JournalWriter, reader: JournalReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read anything, so the refusal is made."""
    path.unlink()
    writer.append(8, 9, {"alice": ["a"]})

    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert poll(reader) == DROP
        assert not reader.usable
    assert set(poll(reader)) == {None}
    assert reader.usable


def test_a_file_that_is_far_too_large_is_not_read(path: Path, reader: JournalReader) -> None:
    os.truncate(path, 1 << 40)  # a hole: takes no room
    assert poll(reader) == DROP
    assert not reader.usable


def test_replaced_between_two_system_calls(
    tmp_path: Path, path: Path, writer: JournalWriter, reader: JournalReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the two files is read, the next look sees the new one."""
    writer.append(7, 8, {"alice": ["a"]})
    stat = Path.stat

    def then_replace(self: Path, **kwargs: Any) -> os.stat_result:
        before = stat(self, **kwargs)
        monkeypatch.setattr(Path, "stat", stat)
        other = tmp_path / "other"
        other.write_bytes(b'[8, 9, {"alice": ["b"]}]\n')
        other.replace(path)
        return before

    monkeypatch.setattr(Path, "stat", then_replace)
    assert poll(reader) == [{"alice": ["a"]}]  # what was acknowledged before the look
    assert set(poll(reader)) == {None}
    writer.append(9, 10, {"alice": ["c"]})
    assert poll(reader) == [{"alice": ["c"]}]


def test_a_reader_keeps_one_descriptor(tmp_path: Path, path: Path, writer: JournalWriter) -> None:
    before = len(os.listdir("/proc/self/fd"))
    reader = JournalReader(tmp_path)
    for version in range(30):
        path.unlink(missing_ok=True)
        poll(reader)
        writer.append(version, version + 1, {})
        poll(reader)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    reader.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not reader.usable


# -- writing


def test_it_is_begun_anew_above_its_size(
    path: Path, writer: JournalWriter, reader: JournalReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", 200)
    drops = 0
    for version in range(7, 60):
        writer.append(version, version + 1, {"alice": [f"mem_{version}"]})
        assert path.stat().st_size <= 200
        found = poll(reader)
        drops += None in found
        assert found[-1] in (None, {"alice": [f"mem_{version}"]})
    assert 3 < drops < 20
    assert [p.name for p in path.parent.iterdir()] == ["journal"]


def test_a_reader_that_slept_over_two_new_files(
    path: Path, writer: JournalWriter, reader: JournalReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", 60)
    for version in range(7, 7 + 40):
        writer.append(version, version + 1, {"alice": ["a"]})
    assert None in poll(reader)
    assert poll(reader) == []


def test_a_line_longer_than_the_file_may_be(
    path: Path, writer: JournalWriter, reader: JournalReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_BYTES", 100)
    for version in (7, 8, 9):
        writer.append(version, version + 1, {"alice": ["x" * 300]})
        assert set(poll(reader)) == {None}
        assert reader.usable


FULL = OSError(errno.ENOSPC, "No space left on device")


def fail(*_: Any) -> int:
    raise FULL


@pytest.mark.parametrize(
    "harm",
    [
        lambda patch: patch.setattr(os, "write", fail),
        lambda patch: patch.setattr(os, "write", lambda _, line: len(line) - 1),
        lambda patch: patch.setattr(os, "open", fail),
        lambda patch: (patch.setattr(journal, "MAX_BYTES", 1), patch.setattr(Path, "write_bytes", fail)),
        lambda patch: (patch.setattr(journal, "MAX_BYTES", 1), patch.setattr(Path, "replace", fail)),
    ],
    ids=["write", "short write", "open", "new file", "replace"],
)
def test_a_line_that_cant_be_written_removes_the_journal(
    path: Path,
    writer: JournalWriter,
    reader: JournalReader,
    monkeypatch: pytest.MonkeyPatch,
    harm: Callable[[pytest.MonkeyPatch], Any],
) -> None:
    with monkeypatch.context() as patch:
        harm(patch)
        writer.append(7, 8, {"alice": ["a"]})
    assert not path.exists()
    assert poll(reader) == DROP
    assert not reader.usable
    writer.append(8, 9, {"alice": ["b"]})
    assert set(poll(reader)) == {None}
    assert reader.usable


def test_the_file_is_for_its_owner_alone(
    path: Path, writer: JournalWriter, reader: JournalReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert path.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(journal, "MAX_BYTES", 1)
    writer.append(7, 8, {"alice": ["a"]})
    assert path.stat().st_mode & 0o077 == 0


def test_many_ids_are_any_row() -> None:
    into: dict[str, Any] = {}
    merge(into, {"alice": [str(i) for i in range(MAX_IDS)], "bob": ["a"]})
    assert len(into["alice"]) == MAX_IDS
    merge(into, {"alice": ["one more"]})
    merge(into, {"bob": ["b"], "carol": None})
    merge(into, {"carol": ["c"], "alice": ["x"]})
    assert into == {"alice": None, "bob": ["a", "b"], "carol": None}


# -- everything at once


@pytest.mark.parametrize("seed", range(12))
def test_no_write_is_ever_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Whatever happens to lines and file: what a reader holds is never older than what was answered."""
    monkeypatch.setattr(journal, "MAX_BYTES", 400)
    chance = random.Random(seed)
    writer, path = JournalWriter(tmp_path), tmp_path / "journal"
    version = 1
    writer.append(1, 1, None)
    readers = [JournalReader(tmp_path) for _ in range(3)]
    held: list[dict[str, int]] = [{} for _ in readers]
    truth = {f"m{i}": 1 for i in range(6)}
    answered = dict(truth)
    for _ in range(600):
        match chance.choices(["write", "look", "killed", "remove", "cut", "full", "nothing"], [40, 50, 3, 1, 1, 1, 4])[
            0
        ]:
            case "write":
                before = version
                version += chance.randint(1, 3)
                changed = chance.sample(sorted(truth), chance.randint(1, 3))
                truth |= dict.fromkeys(changed, version)
                writer.append(before, version, chance.choice([{"t": changed}, {"t": None}, None, {"t": changed}]))
                answered = dict(truth)
            case "nothing":
                writer.append(version, version, {})
                answered = dict(truth)  # what it answers may rest on a commit that was never noted
            case "killed":
                version += 1
                truth[chance.choice(sorted(truth))] = version
                if chance.random() < 0.5 and path.exists():
                    with path.open("ab") as file:
                        file.write(b'[3, 4, {"t"')
            case "remove":
                path.unlink(missing_ok=True)
            case "cut" if path.exists():
                os.truncate(path, 0)
            case "full":
                before, version = version, version + 1
                truth[chance.choice(sorted(truth))] = version
                with monkeypatch.context() as patch:
                    patch.setattr(os, "write", fail)
                    patch.setattr(Path, "write_bytes", fail)
                    writer.append(before, version, {"t": ["m0"]})
                answered = dict(truth)
            case "look":
                number = chance.randrange(3)
                mine = held[number]
                for rows in readers[number].poll():
                    ids = rows.get("t", ()) if rows is not None else None
                    for gone in list(mine) if ids is None else ids:
                        mine.pop(gone, None)
                if not readers[number].usable:
                    assert mine == {}
                    continue
                for memory_id, seen in mine.items():
                    assert seen >= answered[memory_id]
                mine |= truth
    for reader in readers:
        reader.close()
