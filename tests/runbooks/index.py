"""The index of the runbooks, and in it how long each took when it was last run."""

from __future__ import annotations

import re
from typing import Final

from runbooks.book import FOLDER

PATH: Final = FOLDER / "README.md"
#: A row: what is seen, the runbook, and how long it took.
ROW: Final = re.compile(r"^\| (.+) \| \[([a-z0-9-]+)\]\(([a-z0-9-]+)\.md\) \|(.*)\|$", re.MULTILINE)


def rows() -> list[tuple[str, str, str]]:
    """Symptom, runbook, time."""
    return [(symptom, name, took.strip()) for symptom, name, _, took in ROW.findall(PATH.read_text())]


def write_time(name: str, seconds: float) -> None:
    """Into each row of the runbook."""

    def put(row: re.Match[str]) -> str:
        return f"| {row[1]} | [{name}]({name}.md) | {spoken(seconds)} |" if row[2] == name else row[0]

    PATH.write_text(ROW.sub(put, PATH.read_text()))


def spoken(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
