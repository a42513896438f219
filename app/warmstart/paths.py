"""Where things lie on a client's machine; imported by what must start fast."""

from __future__ import annotations

from pathlib import Path


def default_home() -> Path:
    return Path.home() / ".local" / "share" / "warmstart"
