from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from warmstart.errors import ConfigError, Conflict
from warmstart.indexer.state import File, Row, State, Store


def example() -> State:
    state = State("code-shop", {"a.py": File("00", 7, False), "b.py": File("")}, foreign=2)
    state.rows = {"mem_1": Row("a.py", "f", "11", "22", 5), "mem_2": Row("a.py", "g", "33", "44", 6)}
    return state


def test_round_trip(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.lock():
        assert store.load() is None
        store.save(example())
        assert store.load() == example()
    assert (tmp_path / ".warmstart" / ".gitignore").read_text() == "*\n"
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", [
    b"", b"{", b"null", b"[]", b'{"format":1}', b"\xff\xfe", b'{"format":2}', b"[" * 5_000,
])  # fmt: skip
def test_what_is_no_state_is_none(tmp_path: Path, damage: bytes) -> None:
    store = Store(tmp_path)
    with store.lock():
        store.path.write_bytes(damage)
        assert store.load() is None


@pytest.mark.parametrize(("key", "value"), [
    ("rules", "other"), ("namespace", 5), ("files", []), ("files", {"a": 1}), ("symbols", {"a": [["x"]]}),
    ("symbols", {"a": [[1, "n", "h", "s", 1]]}), ("foreign", None),
])  # fmt: skip
def test_a_state_of_another_shape_is_none(tmp_path: Path, key: str, value: object) -> None:
    store = Store(tmp_path)
    with store.lock():
        store.path.write_text(json.dumps(json.loads(example().to_json()) | {key: value}))
        assert store.load() is None


def test_a_write_that_breaks_off_leaves_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    with store.lock():
        store.save(example())
        monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            store.save(State("code-other"))
        assert store.load() == example()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with Store(tmp_path).lock(), pytest.raises(Conflict, match="another run"), Store(tmp_path).lock():
        pass
    with Store(tmp_path).lock():
        pass


def test_a_directory_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / ".warmstart").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="link"), Store(root).lock():
        pass
    assert list(elsewhere.iterdir()) == []


def test_links_in_the_directory_are_not_written_through(tmp_path: Path) -> None:
    directory, victim = tmp_path / ".warmstart", tmp_path / "victim"
    directory.mkdir()
    victim.write_text("mine")
    for name in ("index-state.json", "index-state.new"):
        (directory / name).symlink_to(victim)
    (directory / ".gitignore").symlink_to(tmp_path / "new-file")
    store = Store(tmp_path)
    with store.lock():
        store.save(example())
    assert victim.read_text() == "mine"
    assert not (tmp_path / "new-file").exists()
    assert store.load() == example()


def test_a_place_that_can_t_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / ".warmstart").write_text("a file")
    with pytest.raises(ConfigError, match="can't be written"), Store(tmp_path).lock():
        pass


def test_a_large_state_is_not_written_all_the_time(tmp_path: Path) -> None:
    store, saves = Store(tmp_path), []
    with store.lock():
        store.save = saves.append  # type: ignore[method-assign]
        state = example()
        store.save_when_due(state)
        store._next_save = float("inf")
        store.save_when_due(state)
    assert saves == [state]
