"""A committed tree for steps that read one: the repository's own files, in a repository of its own."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from ops.source import ROOT, Source

PARTS: Final = (
    "compose",
    "ops/vm",
    "app/Dockerfile",
    "app/warmstart/errors.py",
    "pyproject.toml",
    "requirements-server.lock",
)
IDENTITY: Final = ("-c", "user.name=Ann", "-c", "user.email=ann@example.com", "-c", "commit.gpgsign=false")


def make(folder: Path) -> Source:
    for part in PARTS:
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", ".env", "model"))
        else:
            shutil.copyfile(ROOT / part, folder / part)
    _git(folder, "init", "--quiet")
    return commit(folder)


def commit(folder: Path, **files: str) -> Source:
    """`files` by path, with __ for a slash and _dot_ for a dot."""
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    _git(folder, "add", "--all")
    _git(folder, *IDENTITY, "commit", "--quiet", "--allow-empty", "--message", "one")
    head = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    return Source(folder, head.stdout.strip(), "ann@laptop")


def _git(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True)
