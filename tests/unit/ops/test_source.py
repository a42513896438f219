"""A deploy takes what is in a commit, and nothing else."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from ops.source import SourceError, committed


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    subprocess.run(["git", "-C", folder, *identity, *words], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "compose").mkdir()
    (tmp_path / "compose" / "compose.yml").write_text("services: {}\n")
    (tmp_path / "other").write_text("x")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_a_committed_tree_has_its_commit_and_files(tree: Path) -> None:
    source = committed(tree)
    assert len(source.commit) == 40
    assert source.commit.startswith(source.short)
    with tarfile.open(fileobj=io.BytesIO(source.archive("compose"))) as tar:
        assert tar.getnames() == ["compose", "compose/compose.yml"]


def test_the_files_are_those_of_the_commit(tree: Path) -> None:
    source = committed(tree)
    (tree / "compose" / "compose.yml").write_text("changed since\n")
    with tarfile.open(fileobj=io.BytesIO(source.archive("compose"))) as tar:
        member = tar.extractfile("compose/compose.yml")
        assert member is not None
        assert member.read() == b"services: {}\n"


@pytest.mark.parametrize("name", ["compose/compose.yml", "new-file"])
def test_a_changed_or_new_file_is_refused_by_name(tree: Path, name: str) -> None:
    (tree / name).write_text("not committed\n")
    with pytest.raises(SourceError, match=name):
        committed(tree)


def test_many_files_are_counted(tree: Path) -> None:
    for number in range(15):
        (tree / f"new-{number:02}").touch()
    with pytest.raises(SourceError, match="and 5 more"):
        committed(tree)


def test_a_folder_without_a_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="git rev-parse HEAD"):
        committed(tmp_path)
