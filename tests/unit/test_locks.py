"""The lock files hold what pyproject.toml asks for, with hashes, in the same versions, and from no named place."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Final[dict[str, list[str]]] = PROJECT["optional-dependencies"]
#: What each is made with: see the target `lock`.
LOCKS: Final = {
    "requirements.lock": ["server", "local"],
    "requirements-server.lock": ["server"],
    "requirements-dev.lock": list(EXTRAS),
}
NODE_LOCKS: Final = [
    path for path in (ROOT / "tests" / "clients").rglob("package-lock.json") if "node_modules" not in path.parts
]


def locked(name: str) -> set[tuple[str, str]]:
    """Packages and versions; of some there is one for each range of Python versions."""
    return set(re.findall(r"^([a-z0-9._-]+)==([^ ;]+)", (ROOT / name).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", LOCKS)
def test_it_holds_what_the_project_asks_for(name: str) -> None:
    wanted = [*PROJECT["dependencies"], *(entry for extra in LOCKS[name] for entry in EXTRAS[extra])]
    names = {re.split(r"[^A-Za-z0-9._-]", entry, maxsplit=1)[0].lower() for entry in wanted}
    assert names - {package for package, _ in locked(name)} == set(), "run `make lock`"


@pytest.mark.parametrize("name", LOCKS)
def test_versions_are_the_same_in_all(name: str) -> None:
    assert locked(name) - locked("requirements-dev.lock") == set()


@pytest.mark.parametrize("name", LOCKS)
def test_it_has_hashes_and_names_no_index(name: str) -> None:
    text = (ROOT / name).read_text()
    blocks = re.findall(r"^[a-z0-9._-]+==.*(?:\n .*)*", text, re.MULTILINE)
    assert len(blocks) == len(locked(name))
    assert [block for block in blocks if "--hash=sha256:" not in block] == []
    assert re.search(r"://|^-i |index-url|find-links|trusted-host", text, re.MULTILINE) is None


@pytest.mark.parametrize("path", NODE_LOCKS, ids=lambda path: path.parent.name)
def test_node_locks_have_hashes_and_no_addresses(path: Path) -> None:
    packages: dict[str, dict[str, Any]] = json.loads(path.read_text())["packages"]
    assert len(packages) > 1
    assert [name for name, entry in packages.items() if "resolved" in entry] == []
    assert [name for name, entry in packages.items() if name and "integrity" not in entry] == []
