"""What agents are told by files: CLAUDE.md, AGENTS.md and their like, one memory a heading."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from warmstart.errors import Invalid
from warmstart.importers.items import Item, Report, instant, slug
from warmstart.importers.markdown import files, front_matter, prose, read_text, sections

NAMES: Final = ("CLAUDE.md", "CLAUDE.local.md", "AGENTS.md", "AGENTS.override.md", "GEMINI.md")
_IMPORT: Final = re.compile(r"(?:^|\s)@[\w~./-]+\.\w+")


def read(path: Path, namespace: str | None, report: Report) -> Iterator[Item]:
    """Of a file, or of all such files below a folder."""
    if path.is_file():
        found, root = [path], path.resolve().parent
    elif path.is_dir():
        found, root = [f for f in files(path, frozenset({".claude"})) if f.name in NAMES], path.resolve()
    else:
        raise Invalid(f"{path} is neither a file nor a folder")
    if not found:
        raise Invalid(f"{path} has none of {', '.join(NAMES)} in it")
    for file in found:
        yield from _of_file(file, file.resolve().relative_to(root).as_posix(), namespace or slug(root.name), report)


def _of_file(file: Path, name: str, namespace: str, report: Report) -> Iterator[Item]:
    _, text = front_matter(read_text(file))
    report.leave(
        "files included by @path: name them on their own",
        sum(len(_IMPORT.findall(line)) for line, outside in prose(text) if outside),
    )
    seen: Counter[str] = Counter()
    for section in sections(text):
        if not section.text.strip():
            if section.path:
                report.leave("headings with nothing below them")
            continue
        heading = " › ".join(section.path)
        seen[heading] += 1
        again = f" {seen[heading]}" if seen[heading] > 1 else ""
        yield Item(
            id=f"{name}#{heading}{again}",
            content=f"{section.path[-1]}\n\n{section.text.strip()}" if section.path else section.text.strip(),
            title=heading or name,
            kind="preference",
            namespace=namespace,
            tags=["agent-file"],
            entities=[name],
            metadata={"file": name},
            at=instant(file.stat().st_mtime),
        )
