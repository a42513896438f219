"""What importers read of Markdown: front matter, headings, and lines that are no code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from warmstart.errors import Invalid

#: A larger file is no note.
MAX_FILE: Final = 4 << 20
_FRONT: Final = re.compile(r"\A---[ \t]*\r?\n(.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING: Final = re.compile(r" {0,3}(#{1,6})[ \t]+(.+?)[ \t]*#*[ \t]*$")
_SKIPPED: Final = frozenset({"node_modules", "__pycache__", "venv", "target", "dist", "build"})


def files(root: Path, hidden: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below `root`, in order, without what is hidden (but for `hidden`) or made by tools; follows no link."""
    for path in sorted(root.iterdir()):
        if path.is_symlink() or path.name in _SKIPPED or (path.name.startswith(".") and path.name not in hidden):
            continue
        if path.is_dir():
            yield from files(path, hidden)
        elif path.is_file():
            yield path


def read_text(path: Path) -> str:
    """Raises Invalid."""
    if path.stat().st_size > MAX_FILE:
        raise Invalid(f"{path} is over {MAX_FILE} bytes")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Invalid(f"{path} is no UTF-8 text (byte {error.start})") from None


def front_matter(text: str) -> tuple[dict[str, Any], str]:
    """The fields and the text behind them; a block that is no YAML is text."""
    found = _FRONT.match(text)
    if found is None:
        return {}, text
    try:
        fields = yaml.safe_load(found[1])
    except (yaml.YAMLError, ValueError):
        return {}, text
    return (
        ({str(name): value for name, value in fields.items()}, text[found.end() :])
        if isinstance(fields, dict)
        else ({}, text)
    )


def prose(text: str) -> Iterator[tuple[str, bool]]:
    """Each line, with its end, and whether it is outside of fenced code."""
    fence = ""
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence:
            yield line, False
            if mark and mark[1].startswith(fence) and not line[mark.end() :].strip():
                fence = ""
        else:
            if mark:
                fence = mark[1]
            yield line, not mark


@dataclass(slots=True)
class Section:
    """A heading with the text below it, up to the next of any level; `path` has the headings above it, too."""

    path: tuple[str, ...]
    text: str = ""


def sections(text: str) -> list[Section]:
    found = [Section(())]
    above: list[tuple[int, str]] = []
    for line, outside in prose(text):
        heading = _HEADING.match(line.rstrip("\r\n")) if outside else None
        if heading:
            level = len(heading[1])
            above = [(depth, title) for depth, title in above if depth < level] + [(level, heading[2])]
            found.append(Section(tuple(title for _, title in above)))
        else:
            found[-1].text += line
    return found
