"""The sections of a Markdown file: each heading with the prose below it, and no block of code."""

from __future__ import annotations

import re
from typing import Final

from tree_sitter import Node

from warmstart.indexer.comments import docstring
from warmstart.indexer.languages import matches
from warmstart.indexer.symbols import MODULE, Extraction, Symbol

_LEVEL: Final = re.compile(r"_h([1-6])_")
_UNDERLINE: Final = {"setext_h1_underline": 1, "setext_h2_underline": 2}
_MARKS: Final = re.compile(r"^ {0,3}#{1,6}[ \t]*|[ \t]+#+[ \t]*$")
_BLANKS: Final = re.compile(r"\n{3,}")


def sections(source: bytes) -> Extraction:
    tree, found_by_query = matches("markdown", source)
    lines = source.decode(errors="replace").split("\n")
    headings: list[tuple[int, int, int, str]] = []
    left_out: set[int] = set()
    for _, captures in found_by_query:
        for name, [node] in captures.items():
            first, last = node.start_point.row, _last_row(node)
            if name == "heading":
                text = " ".join(_MARKS.sub("", line).strip() for line in lines[first : _text_end(node) + 1])
                headings.append((first, last, _level(node), " ".join(text.split())))
            else:
                left_out.update(range(first, last + 1))
    headings.sort()
    found: list[Symbol] = []
    if preamble := _prose(lines, 0, headings[0][0] if headings else len(lines), left_out):
        found.append(Symbol(MODULE, "section", 1, doc=preamble))
    path: list[tuple[int, str]] = []
    seen: dict[str, int] = {}
    for number, (first, last, level, text) in enumerate(headings):
        path = [entry for entry in path if entry[0] < level] + [(level, text)]
        end = headings[number + 1][0] if number + 1 < len(headings) else len(lines)
        prose = _prose(lines, last + 1, end, left_out)
        if not prose or not text:
            continue
        name = " > ".join(part for _, part in path)
        seen[name] = seen.get(name, 0) + 1
        identity = name if seen[name] == 1 else f"{name}#{seen[name]}"
        found.append(Symbol(identity, "section", first + 1, signature=text, doc=prose))
    return Extraction(found, not tree.root_node.has_error)


def _prose(lines: list[str], first: int, end: int, left_out: set[int]) -> str:
    text = "\n".join(lines[row] for row in range(first, end) if row not in left_out)
    return docstring(_BLANKS.sub("\n\n", text))


def _last_row(node: Node) -> int:
    last = node.end_point
    return last.row - 1 if last.column == 0 and last.row > node.start_point.row else last.row


def _text_end(node: Node) -> int:
    """The last row of a heading's own words."""
    return _last_row(node) - (node.type == "setext_heading")


def _level(node: Node) -> int:
    for child in node.children:
        if child.type in _UNDERLINE:
            return _UNDERLINE[child.type]
        if match := _LEVEL.search(child.type):
            return int(match.group(1))
    return 6
