"""The text of a source file, whatever its encoding; or that it is none."""

from __future__ import annotations

import codecs
import io
import tokenize
from typing import Final

#: Where a binary shows itself, if it does.
_SAMPLE_BYTES: Final = 8_192
#: Of text gone astray; more NULs than that are somebody's data.
_NUL_SHARE: Final = 0.01
#: UTF-32's begins with UTF-16's, so it comes first.
_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def decode(data: bytes) -> str | None:
    """Line feeds only, no NUL, no mark; None for what is no text."""
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            return _plain(data.decode(encoding, errors="replace"))
    sample = data[:_SAMPLE_BYTES]
    if sample.count(0) > len(sample) * _NUL_SHARE:
        return None
    try:
        return _plain(data.decode())
    except UnicodeDecodeError:
        return _plain(_in_another(data))


def _in_another(data: bytes) -> str:
    try:
        declared, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        return data.decode(declared)
    except (SyntaxError, UnicodeDecodeError, LookupError):
        pass
    from charset_normalizer import from_bytes

    best = from_bytes(data).best()
    return str(best) if best else data.decode("latin-1")


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\x00", " ").encode(errors="replace").decode()
