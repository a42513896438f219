"""Why a memory was found: the query's words where they stand in it, and its rank in each arm."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from warmstart.memory import Hit, fold
from warmstart.store.stop_words import STOP_WORDS
from warmstart.terms import query_text
from warmstart.web.dashboard.markdown import plain

SNIPPET: Final = 280
LEAD: Final = 60
MAX_WORDS: Final = 32
MAX_SAID: Final = 6
#: Letters of a word that must agree at its beginning, so that "migrations" is seen to be found by "migrate".
STEM: Final = 4


@dataclass(frozen=True, slots=True)
class Found:
    hit: Hit
    snippet: Markup
    reasons: list[str]


def explain(hit: Hit, query: str) -> Found:
    words = _words(query)
    content = plain(hit.content)
    spans, seen = _spans(content, words)
    elsewhere = fold(" ".join([hit.title, *hit.facts, *hit.tags, *hit.entities])).lower()
    seen += [word for word in words if word not in seen and word in elsewhere]
    reasons = []
    if hit.ranks.text is not None:
        said = f": {', '.join(seen[:MAX_SAID])}" if seen else ", in another form of the word"
        reasons.append(f"{_ordinal(hit.ranks.text)} by words{said}")
    if hit.ranks.vector is not None:
        reasons.append(f"{_ordinal(hit.ranks.vector)} by meaning")
    if not reasons:
        reasons.append(f"has it literally: {', '.join(seen[:MAX_SAID])}" if seen else "has it literally")
    return Found(hit, _marked(content, spans), reasons)


def _words(query: str) -> list[str]:
    """What full-text search looks for, folded: words that every memory has are none."""
    words = dict.fromkeys(re.findall(r"\w+", query_text(query).lower()))
    return [w for w in words if w not in STOP_WORDS and (len(w) > 1 or not w.isascii())][:MAX_WORDS]


def _spans(text: str, words: list[str]) -> tuple[list[tuple[int, int]], list[str]]:
    """Where words of `text` begin like one of `words`, accents aside; and which of these were met."""
    stems = {word: word[: max(STEM, len(word) - 3)] if len(word) > STEM else word for word in words}
    starts, unspaced = tuple(stems.values()), [w for w in words if not w.isascii()]
    spans, seen = [], dict[str, None]()
    for match in re.finditer(r"\w+", text):
        plain = fold(match[0]).lower()
        if starts and plain.startswith(starts):
            met = [w for w in words if plain == w or (len(w) > STEM and plain.startswith(stems[w]))]
            if met:
                spans.append(match.span())
                seen.update(dict.fromkeys(met))
                continue
        for word in unspaced:  # scripts without blanks between words: anywhere
            if (at := plain.find(word)) >= 0:
                spans.append((match.start() + at, match.start() + at + len(word)))
                seen[word] = None
                break
    return spans, list(seen)


def _marked(text: str, spans: list[tuple[int, int]]) -> Markup:
    """A part of `text` from a little before the first span on, with the spans marked."""
    first = spans[0][0] if spans else 0
    start = 0 if first < SNIPPET - LEAD else first - LEAD
    end = min(len(text), start + SNIPPET)
    parts, at = [Markup("… ") if start else Markup("")], start
    for a, b in spans:
        if a < at or b > end:
            continue
        parts += [Markup.escape(text[at:a]), Markup("<mark>"), Markup.escape(text[a:b]), Markup("</mark>")]
        at = b
    parts += [Markup.escape(text[at:end]), Markup(" …") if end < len(text) else Markup("")]
    return Markup("").join(parts)


def _ordinal(rank: int) -> str:
    ending = "th" if 10 < rank % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(rank % 10, "th")
    return f"{rank}{ending}"
