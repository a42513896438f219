"""Every stop word is left out by the index itself, in the form it takes there."""

from pathlib import Path

import pytest

from warmstart.config import load
from warmstart.memory import fold
from warmstart.store.stop_words import STOP_WORDS
from warmstart.store.table import open_table


@pytest.mark.parametrize("form", [str, fold, str.capitalize])
async def test_no_stop_word_becomes_a_term(tmp_path: Path, form: type[str]) -> None:
    table = await open_table(str(tmp_path / "db"), load({}).space)
    words = [form(w) for w in sorted(STOP_WORDS) if w.isascii() or len(w) == 1 or w[0] < "\u2e80"]
    tokens = await table.lance.tokenize(" ".join(words), column="search_text")
    assert [t.text for t in tokens] == []
