"""Warmstart's own exports, read piece by piece: the lines of NDJSON, or the memories of JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, BinaryIO, Final

import ijson

from warmstart.errors import Invalid
from warmstart.exchange import MAX_CHUNK, MAX_CHUNK_MEMORIES, SCHEMA, Header
from warmstart.memory import parse

#: Aimed at; a memory larger than this goes alone.
_CHUNK: Final = 2 << 20
_CHUNK_MEMORIES: Final = 500
#: A first line longer than any header is a JSON export on one line.
_FIRST: Final = 1 << 16
_USE: Final = f"expected an export of Warmstart ({SCHEMA}); --from names other formats"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Memories for one request: NDJSON; the first of them is the file's `first`th memory, on line `line`."""

    lines: bytes
    memories: int
    first: int
    #: 0 where the file isn't one memory a line.
    line: int


@dataclass(frozen=True, slots=True)
class Opened:
    #: How many memories there are to be.
    count: int
    chunks: Iterator[Chunk]


def read(file: BinaryIO) -> Opened:
    """Raises Invalid for what is no export; while the chunks are read, for one that is damaged or was cut short."""
    first = file.readline(_FIRST)
    try:
        data = json.loads(first)
    except ValueError:
        data = None
    if isinstance(data, dict) and "memories" not in data:
        header = _header(data)
        return Opened(header.count, _chunks(_numbered(file), header.count))
    count, memories = _memories(_Rewound(first, file))
    return Opened(count, _chunks(memories, count))


def fault(error: Exception) -> str:
    """The parser's message on one line, without its picture of the place."""
    return " ".join(str(error).split("\n")[0].split())[:100]


def count_in(head: bytes) -> int:
    """How many memories an export has, by its first line."""
    text = head if head.endswith(b"}") else head.removesuffix(b'"memories":[').rstrip(b",") + b"}"
    try:
        return _header(json.loads(text)).count
    except ValueError:
        raise Invalid(_USE) from None


def _header(data: dict[str, Any]) -> Header:
    if data.get("schema") != SCHEMA:
        raise Invalid(f"schema is {data.get('schema')!r}: {_USE}", field="schema")
    return parse(Header, data)


def _numbered(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(iter(lambda: file.readline(MAX_CHUNK + 1), b""), 2):
        if len(line) > MAX_CHUNK:
            raise Invalid(f"line {number} is over {MAX_CHUNK} bytes: no memory is as large")
        if line.strip():
            yield number, line if line.endswith(b"\n") else line + b"\n"


def _memories(file: _Rewound) -> tuple[int, Iterator[tuple[int, bytes]]]:
    """The count that the head names, and the memories as lines."""
    head: dict[str, Any] = {}
    try:
        events = ijson.parse(file, use_float=True)
        for prefix, event, value in events:
            if prefix == "memories":
                break
            if prefix and "." not in prefix and event in ("string", "number"):
                head[prefix] = value
    except (ijson.JSONError, UnicodeDecodeError) as error:
        raise Invalid(f"can't be read as JSON ({fault(error)}): {_USE}") from None
    count = _header(head).count

    def lines() -> Iterator[tuple[int, bytes]]:
        try:
            opening = ("memories", "start_array", None)
            for memory in ijson.items(chain([opening], events), "memories.item"):
                yield 0, json.dumps(memory, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        except (ijson.JSONError, UnicodeDecodeError) as error:
            raise Invalid(f"the file is damaged or was cut short: {fault(error)}") from None

    return count, lines()


def _chunks(lines: Iterator[tuple[int, bytes]], count: int) -> Iterator[Chunk]:
    held: list[bytes] = []
    size = number = first_line = 0
    for line, content in lines:
        if held and (size + len(content) > _CHUNK or len(held) >= min(_CHUNK_MEMORIES, MAX_CHUNK_MEMORIES)):
            yield Chunk(b"".join(held), len(held), number - len(held) + 1, first_line)
            held, size = [], 0
        if not held:
            first_line = line
        held.append(content)
        size += len(content)
        number += 1
    if held:
        yield Chunk(b"".join(held), len(held), number - len(held) + 1, first_line)
    if number != count:
        raise Invalid(f"the file has {number} memories of {count}: it was cut short, or put together from several")


class _Rewound:
    """`file` as if `first` had not been read from it."""

    def __init__(self, first: bytes, file: BinaryIO) -> None:
        self._first = first
        self._file = file

    def read(self, size: int = -1) -> bytes:
        if size == 0:
            return b""
        if self._first:
            some, self._first = self._first[:size] if size > 0 else self._first, self._first[size:] if size > 0 else b""
            return some
        return self._file.read(size)
