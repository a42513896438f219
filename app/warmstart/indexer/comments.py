"""Comments: which of them explains what, and what they say without their marks."""

from __future__ import annotations

import inspect
import re
from typing import Final

from tree_sitter import Node

#: Characters of a doc that are kept; the embedding model reads some 500 tokens.
MAX_DOC: Final = 2_000
MAX_COMMENT_ROWS: Final = 400

_MARK: Final = re.compile(r"^[ \t]*(?:/\*+!?|\*+/|\*(?!/)|//[/!]*|#+[:!]?)[ \t]?")
_END: Final = re.compile(r"[ \t]*\*+/[ \t]*$")
#: Words to tools, not to people.
_DIRECTIVE: Final = re.compile(
    r"^\s*(?:eslint|tslint|jshint|jslint|prettier-|@ts-|noqa|nolint|type:\s*ignore|pylint:|mypy:|ruff:|fmt:|pragma|"
    r"go:\w|\+build|istanbul|v8 ignore|c8 ignore|biome-|rubocop:|clang-format|NOLINT|-\*-)"
)
_LICENCE: Final = re.compile(r"copyright|licen[cs]e|spdx-", re.IGNORECASE)
_OF_FILE: Final = re.compile(r"@(?:file|fileoverview|overview|module|packageDocumentation)\b")
_QUOTES: Final = re.compile(r"^[A-Za-z]{0,2}(\"\"\"|'''|\"|')(.*)\1$", re.DOTALL)
_UNSTORABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
_HEADER_ROWS: Final = 3


def clean(text: str) -> str:
    """What is said, without comment marks, words to tools and rules of dashes."""
    lines = []
    for line in text.split("\n"):
        said = _END.sub("", _MARK.sub("", line)).rstrip()
        if not _DIRECTIVE.match(said) and (not said or any(c.isalnum() for c in said)):
            lines.append(said)
    return _kept("\n".join(lines))


def docstring(text: str) -> str:
    match = _QUOTES.match(text.strip())
    return _kept(inspect.cleandoc(match.group(2) if match else text))


def _kept(text: str) -> str:
    text = _UNSTORABLE.sub("", inspect.cleandoc(text)).strip()
    return text if len(text) <= MAX_DOC else text[: MAX_DOC - 1].rstrip() + "…"


class Comments:
    """The comments of one file, by row."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        #: By last row: the first row and the bytes of each comment that has its lines for itself.
        self._own: dict[int, tuple[int, int, int]] = {}
        self._beside: dict[int, tuple[int, int]] = {}
        self._attributes: dict[int, int] = {}
        self._spans: list[tuple[int, int]] = []

    def add(self, node: Node) -> None:
        first, last = node.start_point, node.end_point
        # Rust's doc comments hold their line feed
        end_row = last.row - 1 if last.column == 0 and last.row > first.row else last.row
        self._spans.append((node.start_byte, node.end_byte))
        if self._source[node.start_byte - first.column : node.start_byte].strip():
            self._beside[first.row] = (node.start_byte, node.end_byte)
        else:
            self._own[end_row] = (first.row, node.start_byte, node.end_byte)

    def pass_over(self, node: Node) -> None:
        """An attribute: what explains its item stands above it."""
        self._attributes[node.end_point.row] = node.start_point.row

    def spans(self) -> list[tuple[int, int]]:
        return self._spans

    def above(self, row: int) -> str:
        """What the comments say that end right above `row`."""
        texts: list[str] = []
        first = lowest = row
        while first > 0 and lowest - first < MAX_COMMENT_ROWS:
            if (own := self._own.get(first - 1)) is not None:
                first = own[0]
                texts.append(self._text(*own[1:]))
            elif first - 1 in self._attributes:
                first = self._attributes[first - 1]
            else:
                break
        text = "\n".join(reversed(texts))
        if first < _HEADER_ROWS and _LICENCE.search(text):
            return ""
        return clean(text)

    def beside(self, row: int, end_byte: int) -> str:
        """What a comment says that follows on the same row."""
        span = self._beside.get(row)
        return clean(self._text(*span)) if span and span[0] >= end_byte else ""

    def of_file(self) -> str:
        """What the comments at the very top say of the whole file, where they are marked so."""
        texts: list[str] = []
        last = -1
        for end_row in sorted(self._own):
            first, start, end = self._own[end_row]
            if first > last + 1 + (last < 0) * _HEADER_ROWS:
                break
            text = self._text(start, end)
            if not (text.startswith(("//!", "/*!")) or _OF_FILE.search(text)):
                if texts:
                    break
                continue
            texts.append(text)
            last = end_row
        return clean("\n".join(texts))

    def _text(self, start: int, end: int) -> str:
        return self._source[start:end].decode(errors="replace").rstrip("\n")
