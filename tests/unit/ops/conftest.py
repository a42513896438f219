"""Steps are run against recorded facts, see steptest.py; what a test puts in the way of a program is on its PATH."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """program(name, script): stands before the real one; the lines of the file returned are its calls' arguments."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, script: str) -> Path:
        calls = tmp_path / f"{name}.calls"
        calls.touch()
        path = folder / name
        path.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n{script}\n')
        path.chmod(0o755)
        return calls

    return make
