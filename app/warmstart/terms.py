"""What full-text search reads: the derived text of a memory, and the words of a query.

Both sides go through the same rules, so that they meet in the index: combining
marks are folded, identifiers stand whole and (in memories) split, C++ and its
kin get a word of their own, Korean words get their pairs of syllables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from warmstart.memory import fold

#: A query with more distinct terms keeps the rarest of them.
MAX_TERMS: Final = 32

_COMPOUND = re.compile(r"[A-Za-z0-9]+(?:[_.\-/:\\]+[A-Za-z0-9]+)*")
_SEPARATORS = re.compile(r"[_.\-/:\\]+")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_HANGUL = re.compile("[\uac00-\ud7a3]{2,}")
#: Names that a word splitter reduces to one letter.
_SYMBOLIC = re.compile(r"(?<![A-Za-z0-9])(c\+\+|c#|f#|\.net)(?![A-Za-z0-9#+])", re.IGNORECASE)
_SYMBOLIC_WORDS: Final = {"c++": "cplusplus", "c#": "csharp", "f#": "fsharp", ".net": "dotnet"}


def split_identifiers(text: str) -> Iterator[str]:
    """The parts of each `camelCase`, `snake_case`, dotted or path-like word, in order."""
    for match in _COMPOUND.finditer(text):
        pieces = _SEPARATORS.split(match.group())
        if len(pieces) == 1:
            pieces = [pieces[0].lstrip("0123456789")]  # "20ms" is no identifier
        parts = [p for piece in pieces for p in _CAMEL.findall(piece)]
        if len(parts) > 1:
            yield from parts


def _added_words(text: str) -> Iterator[str]:
    for match in _SYMBOLIC.finditer(text):
        yield _SYMBOLIC_WORDS[match.group().lower()]
    for match in _HANGUL.finditer(text):
        run = match.group()
        yield from (run[i : i + 2] for i in range(len(run) - 1))


def search_text(
    title: str, content: str, facts: Sequence[str], tags: Sequence[str], entities: Sequence[str], kind: str
) -> str:
    """The text that the full-text index reads for a memory; what is shown stays as it was given."""
    declaration = [content.split("\n", 1)[0]] if kind == "code" else []
    shown = [content] if content.startswith(title) else [title, content]
    text = fold("\n".join([*shown, *facts, *tags, *entities, *declaration]))
    extra = _distinct([*(p.lower() for p in split_identifiers(text)), *_added_words(text)])
    return f"{text}\n{' '.join(extra)}" if extra else text


def query_text(query: str) -> str:
    """`query` under the same rules; never a query language, so quotes are only separators."""
    text = fold(query).replace('"', " ")
    extra = _distinct(_added_words(text))
    return f"{text} {' '.join(extra)}" if extra else text


def keep_rarest(terms: Sequence[tuple[str, str]], frequency: Callable[[str], int], most: int = MAX_TERMS) -> list[str]:
    """At most `most` words of `terms`, in their order: the rarest, and of equals the longest, then the first.

    `terms` are pairs of (indexed form, word as written); each indexed form counts once.
    """
    first: dict[str, str] = {}
    for indexed, word in terms:
        first.setdefault(indexed, word)
    kept = list(first)
    if len(kept) > most:
        position = {term: i for i, term in enumerate(kept)}
        ranked = sorted(kept, key=lambda t: (frequency(t), -len(t), position[t]))
        kept = sorted(ranked[:most], key=position.__getitem__)
    return [first[term] for term in kept]


def _distinct(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(words))
