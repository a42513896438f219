from __future__ import annotations

import pytest

from warmstart.indexer.text import decode

TEXT = "# größe 大きさ\nx = 1\n"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be"])
def test_unicode(encoding: str) -> None:
    mark = {"utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}.get(encoding, b"")
    assert decode(mark + TEXT.encode(encoding)) == TEXT


@pytest.mark.parametrize(("encoding", "text"), [
    ("latin-1", "# Überraschung: die Größe ändert sich über Nacht, natürlich für alle Kühlschränke\n"),
    ("shift_jis", "# 日本語のコメントです。これは文字コードの検出を試すための文章です。\n"),
    ("gb18030", "# 这是一个中文注释，用来测试编码检测是否正确工作，希望一切顺利。\n"),
])  # fmt: skip
def test_other_encodings(encoding: str, text: str) -> None:
    found = decode((text * 4).encode(encoding))
    assert found is not None
    assert len(found) == len(text * 4)
    assert "x = 1" in (decode((text + "x = 1\n").encode(encoding)) or "")


def test_a_declared_encoding_is_believed() -> None:
    assert decode("# -*- coding: koi8-r -*-\n# мир\n".encode("koi8-r")) == "# -*- coding: koi8-r -*-\n# мир\n"


def test_line_ends_marks_and_stray_nuls() -> None:
    assert decode(b"\xef\xbb\xbfa\r\nb\rc\n") == "a\nb\nc\n"
    assert decode(b"x" * 500 + b"\x00" + b"y" * 500) == "x" * 500 + " " + "y" * 500
    assert decode(b"") == ""


def test_binaries_are_none() -> None:
    assert decode(b"\x7fELF\x02\x01\x01" + bytes(100)) is None
    assert decode(bytes(range(256)) + bytes(64)) is None


def test_lone_surrogates_are_replaced() -> None:
    found = decode(b"\xff\xfe" + b"a\x00" + b"\x00\xd8" + b"b\x00")
    assert found is not None
    found.encode()
