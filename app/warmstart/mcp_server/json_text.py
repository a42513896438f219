"""JSON texts that a strict parser would refuse without saying to whom."""

from __future__ import annotations

import json
import re
from typing import Final

_ESCAPED: Final = re.compile(rb"\\u[dD][89a-fA-F]")
_LONE: Final = re.compile("[\ud800-\udfff]")


def mended(text: bytes) -> bytes:
    """`text` with NUL for each lone surrogate.

    The protocol's own parser drops such a message: over stdio the client waits
    for an answer that never comes. With NUL it reaches the rules that hold
    for both: queries lose it, content is refused for it.
    """
    if not _ESCAPED.search(text):
        return text
    try:
        parsed = json.dumps(json.loads(text), ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return text
    if not _LONE.search(parsed):
        return text
    return _LONE.sub(r"\\u0000", parsed).encode()
