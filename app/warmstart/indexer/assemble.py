"""The memory of a symbol. What is in it is what leaves the machine: docs/index.md says the same in words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from warmstart.context import count_tokens, entry
from warmstart.indexer.symbols import MODULE, Symbol
from warmstart.memory import MAX_TAG, MAX_TITLE, MemoryPatch, NewMemory
from warmstart.scrub import scrub

SOURCE: Final = "index"
MAX_NAME: Final = 300
#: Characters of a list of names.
MAX_LIST: Final = 600


@dataclass(frozen=True, slots=True)
class Wanted:
    """A symbol as it is in the tree, and the memory it is to have."""

    path: str
    name: str
    line: int
    memory: NewMemory
    content_hash: str
    #: The same for the same symbol in another file.
    shape: str
    tokens: int

    def patch(self) -> MemoryPatch:
        memory = self.memory
        return MemoryPatch(
            content=memory.content,
            title=memory.title,
            entities=memory.entities,
            tags=memory.tags,
            metadata=memory.metadata,
        )


def assemble(
    path: str, language: str, symbols: Sequence[Symbol], namespace: str, identity: str, *, tokens: bool = True
) -> list[Wanted]:
    """The memories of one file's symbols; two that would say the same are one."""
    found: dict[str, Wanted] = {}
    for written in symbols:
        symbol = replace(written, signature=scrub(written.signature), doc=scrub(written.doc))
        name = _cut_name(symbol.name)
        content = _content(path, name, symbol)
        title = _title(path, name, symbol)
        memory = NewMemory(
            content=content,
            title=title,
            namespace=namespace,
            type="code",
            tags=[language],
            entities=_entities(name, symbol),
            source=SOURCE,
            metadata=metadata(path, language, symbol.kind, symbol.line, name, identity),
        )
        digest = hashlib.sha256(content.encode()).hexdigest()
        count = count_tokens(entry(title, content, [])) if tokens else 0
        found.setdefault(digest, Wanted(path, name, symbol.line, memory, digest, shape(content, path), count))
    return list(found.values())


def metadata(path: str, language: str, kind: str, line: int, name: str, identity: str) -> dict[str, Any]:
    return {"path": path, "language": language, "kind": kind, "line": line, "name": name, "repository": identity}


def shape(content: str, path: str) -> str:
    return hashlib.sha256(content.replace(path, "").encode()).hexdigest()[:16]


def _content(path: str, name: str, symbol: Symbol) -> str:
    plain = "" if symbol.name == MODULE else " " + name.partition("#")[0] if symbol.kind != "section" else " " + name
    lines = [symbol.signature or path, f"{symbol.kind}{plain} in {path}"]
    if symbol.doc:
        lines += ["", symbol.doc, ""]
    for label, names in (("Has", symbol.members), ("Calls", symbol.calls), ("Called by", symbol.called_by)):
        if names:
            lines.append(f"{label}: {_joined(names)}")
    return "\n".join(lines).rstrip()


def _title(path: str, name: str, symbol: Symbol) -> str:
    """The name and what it takes: `Client.send(request, *, stream=False)`."""
    if symbol.name == MODULE:
        return path[-MAX_TITLE:]
    if symbol.kind == "section":
        return name[:MAX_TITLE]
    plain = name.partition("#")[0] or name
    # of a name that ends in a separator nothing is left
    _, found, rest = symbol.signature.partition(_simple(plain) or plain)
    title = plain + (rest if found and rest.startswith(("(", "<", "[")) else "")
    return title if len(title) <= MAX_TITLE else title[: MAX_TITLE - 1] + "…"


def _entities(name: str, symbol: Symbol) -> list[str]:
    if symbol.name == MODULE or symbol.kind == "section":
        return []
    plain = name.partition("#")[0]
    return [e for e in dict.fromkeys([_simple(plain), plain]) if 0 < len(e) <= MAX_TAG]


def _simple(name: str) -> str:
    return name.replace("::", ".").rpartition(".")[2]


def _cut_name(name: str) -> str:
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9]}…{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _joined(names: Sequence[str]) -> str:
    kept: list[str] = []
    room = MAX_LIST
    for name in names:
        room -= len(name) + 2
        if room < 0:
            return ", ".join([*kept, "…"])
        kept.append(name)
    return ", ".join(kept)
