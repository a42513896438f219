from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstart.errors import ConfigError
from warmstart.indexer.repository import find, namespace_of
from warmstart.memory import NAMESPACE_PATTERN

REMOTE = "example.com/team/shop"
DIGITS = hashlib.sha256(REMOTE.encode()).hexdigest()[:6]


def test_a_plain_name_stays() -> None:
    assert namespace_of("shop-2.0_x", REMOTE) == "code-shop-2.0_x"


@pytest.mark.parametrize(("name", "namespace"), [
    ("My Shop", f"code-my-shop-{DIGITS}"), ("Shop", f"code-shop-{DIGITS}"), ("größe", f"code-gr--e-{DIGITS}"),
])  # fmt: skip
def test_a_changed_name_is_told_apart(name: str, namespace: str) -> None:
    assert namespace_of(name, REMOTE) == namespace
    assert namespace_of(name, REMOTE) != namespace_of(name, REMOTE + "-fork")


def test_the_longest_name_that_fits() -> None:
    assert namespace_of("a" * 59, REMOTE) == "code-" + "a" * 59
    long = namespace_of("a" * 60, REMOTE)
    assert len(long) == 64
    assert long.endswith(f"a-{DIGITS}")


@given(st.text(min_size=1), st.text())
def test_every_namespace_is_allowed(name: str, remote: str) -> None:
    assert re.fullmatch(NAMESPACE_PATTERN, namespace_of(name, remote))


def repository(root: Path, config: str) -> Path:
    (root / ".git").mkdir(parents=True)
    (root / ".git" / "config").write_text(config)
    return root


def remote(url: str) -> str:
    fork = '[core]\n\tbare = false\n[remote "fork"]\n\turl = elsewhere\n'
    return f'{fork}[remote "origin"]\n\turl = {url}\n\tfetch = +refs\n'


@pytest.mark.parametrize("url", [
    "https://example.com/team/shop", "https://example.com/team/shop.git/", "git@example.com:team/shop.git",
    "ssh://git@example.com/team/shop.git", "https://user:ghp_token@example.com/Team/Shop.git",
])  # fmt: skip
def test_one_remote_by_any_way(tmp_path: Path, url: str) -> None:
    assert find(repository(tmp_path / "shop", remote(url))).identity == DIGITS


def test_without_a_remote_the_place_tells_apart(tmp_path: Path) -> None:
    one, two = tmp_path / "a" / "shop", tmp_path / "b" / "shop"
    one.mkdir(parents=True)
    two.mkdir(parents=True)
    assert find(one).namespace == find(two).namespace == "code-shop"
    assert find(one).identity != find(two).identity


def test_a_worktree_has_its_repository_s_remote(tmp_path: Path) -> None:
    main = repository(tmp_path / "main", remote("https://example.com/team/shop"))
    inner = main / ".git" / "worktrees" / "w"
    inner.mkdir(parents=True)
    (inner / "commondir").write_text("../..\n")
    tree = tmp_path / "w"
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {inner}\n")
    assert find(tree).identity == DIGITS


def test_the_repository_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = repository(tmp_path / "shop", "")
    deep = root / "src" / "deep"
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    assert find(None).root == root
    assert find(deep).root == deep


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no directory"):
        find(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no name"):
        find(Path("/"))
