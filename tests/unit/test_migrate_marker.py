"""The marker, the record and the lock of a migration."""

from __future__ import annotations

import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fakes.migrations import NEW, space
from warmstart.errors import Conflict, StoreUnavailable
from warmstart.store import marker
from warmstart.store.marker import Migration

MIGRATION = Migration("recreate", space(8), space(4, NEW), "migrations/x", 10, False, "2026-01-01T00:00:00+00:00")


def test_a_marker_is_seen_in_each_of_its_states(tmp_path: Path) -> None:
    seen = [marker.fingerprint(tmp_path)]
    assert marker.standing(tmp_path) is None
    for step in ("recreate", "reload", "index", "verify"):
        marker.put(tmp_path, replace(MIGRATION, step=step))
        found = marker.standing(tmp_path)
        assert found == replace(MIGRATION, step=step)
        seen.append(marker.fingerprint(tmp_path))
    marker.end(tmp_path, MIGRATION)
    assert (marker.standing(tmp_path), marker.last(tmp_path)) == (None, MIGRATION)
    seen.append(marker.fingerprint(tmp_path))
    assert len(set(seen)) == len(seen)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "reload"}', "null", "\N{SNOWMAN}"])
def test_a_marker_that_cannot_be_read_still_stands(tmp_path: Path, content: str) -> None:
    (tmp_path / "migration.json").write_text(content)
    with pytest.raises(StoreUnavailable, match=r"migration\.json"):
        marker.standing(tmp_path)


def test_one_migrator_at_a_time(tmp_path: Path) -> None:
    assert not marker.migrator_lives(tmp_path)
    with marker.only_migrator(tmp_path):
        assert marker.migrator_lives(tmp_path)
        with pytest.raises(Conflict, match="another migration"), marker.only_migrator(tmp_path):
            pass
    assert not marker.migrator_lives(tmp_path)
    with marker.only_migrator(tmp_path):
        pass


def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, time\nfrom warmstart.store import marker\n"
        "with marker.only_migrator(pathlib.Path(sys.argv[1])):\n print('held', flush=True)\n time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child, child.stdout:
        assert child.stdout.readline() == "held\n"
        assert marker.migrator_lives(tmp_path)
        child.kill()
        child.wait()
    assert not marker.migrator_lives(tmp_path)
