"""The file that an importer is tested on, written once more by the other memory's own program."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from clients.node import NODE, npm_ci

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_the_reference_memory_server_still_writes_this_graph(tmp_path: Path) -> None:
    folder = npm_ci(TESTS / "clients" / "memories")
    written = tmp_path / "memory.jsonl"
    subprocess.run([NODE, "graph.mjs", written], cwd=folder, check=True, timeout=60, capture_output=True)
    assert written.read_bytes() == (TESTS / "fakes" / "exports" / "server-memory.jsonl").read_bytes()
