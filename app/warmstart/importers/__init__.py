"""Memories from elsewhere: each module reads one format, from a file or folder on this machine."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from warmstart.importers.items import Item, Report

#: Name on the command line → module. `warmstart`, its own exports, goes another way: they keep ids and times.
OWN: Final = "warmstart"
MODULES: Final = {
    "mcp-memory-service": "mcp_memory_service",
    "basic-memory": "basic_memory",
    "server-memory": "server_memory",
    "agent-files": "agent_files",
}


def read(name: str, path: Path, namespace: str | None, report: Report) -> Iterator[Item]:
    """What is at `path`, in the format `name`; raises Invalid where it is not in that."""
    module = importlib.import_module(f"warmstart.importers.{MODULES[name]}")
    items: Iterator[Item] = module.read(path, namespace, report)
    return items
