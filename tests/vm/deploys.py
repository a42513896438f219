"""Deploys as an operator makes them: from a clone with nothing uncommitted, with an inventory, by `python -m ops`."""

from __future__ import annotations

import contextlib
import os
import pprint
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from containers import build
from containers.stack import clean_environment
from vm import image
from vm.machine import Machine, Result, execute

#: Service → the image that stands for the pinned one, where no registry is reached.
IMAGES: Final = {
    "app": build.tag("app"), "caddy": build.tag("caddy"), "embeddings": build.tag("tei"),
    "postgres": build.tag("postgres"), "redis": build.tag("redis"),
}  # fmt: skip
GIT_TIMEOUT_S: Final = 60
#: The first deploy to an emulated machine takes a quarter of an hour.
OPS_TIMEOUT_S: Final = 5400
#: The defaults, of which a slow machine gets as many times more.
BUDGETS_MS: Final = {
    "EMBED_QUERY_BUDGET_MS": 800, "ARM_BUDGET_MS": 1_000, "SEARCH_BUDGET_MS": 2_000, "EMBED_SAVE_BUDGET_MS": 1_500,
    "CACHE_BUDGET_MS": 150,
}  # fmt: skip
#: One person and one time for all commits: the same files are the same commit, for every operator.
IDENTITY: Final = {
    f"GIT_{role}_{field}": value
    for role in ("AUTHOR", "COMMITTER")
    for field, value in {"NAME": "Test", "EMAIL": "test@example.invalid", "DATE": "2026-01-01T00:00:00Z"}.items()
}


def git(folder: Path, *words: str | Path) -> str:
    nobodys = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = execute(
        ["git", "-C", folder, *words], timeout_s=GIT_TIMEOUT_S, env={**clean_environment(), **IDENTITY, **nobodys}
    )
    assert done.code == 0, f"git {words} ended with {done.code} in {folder}\n{done.text[-2000:]}"
    return done.out


@dataclass(frozen=True)
class Tree:
    """A clone to deploy from. Whatever is changed in it has to be committed first."""

    path: Path

    @property
    def commit_id(self) -> str:
        return git(self.path, "rev-parse", "HEAD").strip()

    def commit(self, message: str = "Another version") -> str:
        git(self.path, "add", "--all")
        git(self.path, "commit", "--quiet", "--message", message)
        return self.commit_id

    def clone(self, path: Path) -> Tree:
        """Another operator's: the same commits."""
        git(self.path, "clone", "--quiet", self.path, path)
        return Tree(path)


def working_tree(path: Path, source: Path = build.ROOT) -> Tree:
    """All of `source`'s files as they are now, committed or not, in a new repository of one commit."""
    path.mkdir(parents=True)
    listed = git(source, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        target = path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        # deleted, and that isn't committed yet
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(source / name, target, follow_symlinks=False)
    git(path, "init", "--quiet", "--initial-branch", "main")
    tree = Tree(path)
    tree.commit("As it is")
    return tree


def write_inventory(
    path: Path, machine: Machine, model: Path, /, *, operator: str = image.OPERATORS[0], **fields: Any
) -> Path:
    """For `python -m ops`; `fields` go before what is said here."""
    data = {
        "ssh_port": machine.ports[22],
        "ssh_key": str(image.key(operator)),
        "ssh_known_hosts": str(path.with_suffix(".known_hosts")),
        # inside and outside of the machine, though the port is another one outside
        "address": "127.0.0.1",
        "images": "carry",
        "image_overrides": IMAGES,
        "model": str(model),
        "settings": budgets(machine.patience),
        **fields,
    }
    path.write_text(f"hosts = [\n{pprint.pformat(('127.0.0.1', data))},\n]\n")
    return path


def budgets(patience: float) -> dict[str, str]:
    """Settings of a machine so many times as slow as others."""
    return {name: str(round(ms * patience)) for name, ms in BUDGETS_MS.items()} if patience != 1 else {}


class MakeInventory(Protocol):
    def __call__(self, target: Machine, *, operator: str = ..., **fields: Any) -> Path: ...


def _ops(inventory: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "ops", "--inventory", str(inventory), *words]


def run_ops(
    tree: Tree, inventory: Path, *words: str, timeout_s: float = OPS_TIMEOUT_S, stdin: bytes = b"", **env: str
) -> Result:
    """`python -m ops …` to its end, with nothing of this environment's settings."""
    env = {**clean_environment(), **env}
    return execute(_ops(inventory, *words), cwd=tree.path, env=env, stdin=stdin, timeout_s=timeout_s)


def start_ops(tree: Tree, inventory: Path, *words: str, log: Path, **env: str) -> subprocess.Popen[bytes]:
    """The same, not waited for; it leads a process group of its own, to be killed with all it has started."""
    with log.open("wb") as out:
        return subprocess.Popen(
            _ops(inventory, *words), cwd=tree.path, env={**clean_environment(), **env}, stdin=subprocess.DEVNULL,
            stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
