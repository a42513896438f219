"""The block of memories that goes into a prompt: fixed format, within a token budget."""

from __future__ import annotations

import functools
import re
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

from warmstart.memory import MAX_CONTEXT_CHARS

HEADER: Final = "## Prior observations from warmstart\n"
#: Named so that a budget means the same everywhere; its vocabulary ships in a package.
TOKENIZER: Final = "cl100k_base"

#: What CommonMark takes for a heading, the line under one, and the ends of a block of code.
_HEADING = re.compile(r"^( {0,3})(#{1,6}(?:[ \t]|$)|=+[ \t]*$|-+[ \t]*$)")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")


@functools.cache
def _encoding() -> Any:
    with warnings.catch_warnings():
        # its package reads its own file the old way
        warnings.simplefilter("ignore", DeprecationWarning)
        import bpe_openai

        return bpe_openai.get_encoding(TOKENIZER)


def count_tokens(text: str) -> int:
    """Exactly; the first call loads the vocabulary, which takes up to a second."""
    return len(_encoding().encode_ordinary(text))


@functools.cache
def _load_aside() -> None:
    threading.Thread(target=_encoding, name="tokenizer", daemon=True).start()


def count_tokens_now(text: str) -> int:
    """Exactly where the vocabulary is there; else it is sent for, and this is more than there can be.

    It takes 90 MB, so it is loaded when a first block is asked for, and that
    block must not wait for it. No token is shorter than a byte.
    """
    if _encoding.cache_info().currsize:
        return count_tokens(text)
    _load_aside()
    return len(text.encode())


def entry(title: str, content: str, facts: Sequence[str]) -> str:
    """One memory of the block. The title is left out where the content says just that."""
    heading = "" if title == content.strip() else f"### {_one_line(title)}\n\n"
    bullets = "".join(f"- {_one_line(fact)}\n" for fact in facts)
    return "\n" + heading + _contained(content.strip()) + "\n" + ("\n" + bullets if bullets else "")


def assemble(
    entries: Sequence[tuple[str, str]], token_budget: int, count: Callable[[str], int] = count_tokens
) -> tuple[str, list[str]]:
    """The block of (id, entry), best first, and the ids in it; whole entries only.

    An entry that doesn't fit is passed over for the next; nothing fits: empty.
    """
    block, ids = HEADER, []
    for memory_id, text in entries:
        longer = block + text
        if len(longer) <= MAX_CONTEXT_CHARS and count(longer) <= token_budget:
            block = longer
            ids.append(memory_id)
    return (block, ids) if ids else ("", [])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _contained(content: str) -> str:
    """`content` whose headings are plain text and whose code ends with it; code stays as it is."""
    lines, fence = [], ""
    for line in content.splitlines():
        mark = match.group(1) if (match := _FENCE.match(line)) else ""
        if fence:
            if mark.startswith(fence) and line.strip() == mark:
                fence = ""
        elif mark:
            fence = mark
        else:
            line = _HEADING.sub(r"\1\\\2", line)
        lines.append(line)
    return "\n".join([*lines, fence] if fence else lines)
