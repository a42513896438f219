"""What full-text search reads, and the words of a query."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmstart.memory import MAX_CONTENT
from warmstart.terms import MAX_TERMS, keep_rarest, query_text, search_text, split_identifiers


def text_of(content: str, kind: str = "fact", **fields: list[str]) -> str:
    return search_text("", content, fields.get("facts", []), fields.get("tags", []), fields.get("entities", []), kind)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("getUserById", ["get", "User", "By", "Id"]),
        ("get_user_by_id", ["get", "user", "by", "id"]),
        ("HTTPServerError", ["HTTP", "Server", "Error"]),
        ("app/warmstart/store.py", ["app", "warmstart", "store", "py"]),
        ("C:\\Users\\me", ["C", "Users", "me"]),
        ("std::vector", ["std", "vector"]),
        ("ERR_CONN_42", ["ERR", "CONN", "42"]),
        ("utf8", ["utf", "8"]),
        ("v1.2.3", ["v", "1", "2", "3"]),
        ("kebab-case-name", ["kebab", "case", "name"]),
        ("plain words only", []),
        ("UPPER", []),
        ("20ms", []),
        ("1234", []),
        ("_private", []),
        ("", []),
        ("日本語", []),
    ],
)
def test_identifiers_are_split(text: str, parts: list[str]) -> None:
    assert list(split_identifiers(text)) == parts


@given(st.text("aB1_-./: \n\\é", max_size=40))
def test_splitting_is_what_the_slow_way_finds(text: str) -> None:
    """Against the plain definition, which takes quadratic time on a long run of digits."""
    compound = re.compile(r"[A-Za-z0-9]+(?:[_.\-/:\\]+[A-Za-z0-9]+)+|[A-Za-z][A-Za-z0-9]+")
    camel = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
    expected: list[str] = []
    for match in compound.finditer(text):
        parts = [p for piece in re.split(r"[_.\-/:\\]+", match.group()) for p in camel.findall(piece)]
        expected += parts if len(parts) > 1 else []
    assert list(split_identifiers(text)) == expected


@pytest.mark.parametrize(
    "unit", ["1", "⑳", "a", "1a", "_", "a_", "A1", "-a", "ﷺ", "가", "c++", "\\", "é", ".", "a" + "_" * 99]
)
def test_the_longest_content_is_read_in_no_time(unit: str) -> None:
    content = (unit * MAX_CONTENT)[:MAX_CONTENT]
    started = time.perf_counter()
    text_of(content)
    query_text(content * 2)
    assert time.perf_counter() - started < 1.0


def test_everything_that_can_be_searched_is_there() -> None:
    text = search_text("Title", "content", ["a fact"], ["tag"], ["Entity"], "fact")
    assert text == "Title\ncontent\na fact\ntag\nEntity"


def test_a_title_cut_from_the_content_is_not_counted_twice() -> None:
    assert search_text("first line", "first line\nsecond", [], [], [], "fact").count("first") == 1
    assert search_text("Other", "first line", [], [], [], "fact").startswith("Other\n")


def test_code_has_its_declaration_again() -> None:
    code = "def load(path):\n    return open(path)"
    assert text_of(code, "code").count("def load(path):") == 2
    assert text_of(code, "fact").count("def load(path):") == 1


def test_identifiers_stand_whole_and_split() -> None:
    words = text_of("call getUserById or ERR_CONN_42").split()
    assert {"getUserById", "get", "user", "by", "id", "ERR_CONN_42", "err", "conn", "42"} <= set(words)


@pytest.mark.parametrize(
    ("name", "word"),
    [("C++", "cplusplus"), ("c#", "csharp"), ("F#", "fsharp"), (".NET", "dotnet")],
)
def test_names_of_signs_get_words_on_both_sides(name: str, word: str) -> None:
    assert word in text_of(f"written in {name}.").split()
    assert word in query_text(f"the {name} compiler").split()


def test_only_whole_names_of_signs() -> None:
    assert "cplusplus" not in text_of("abc++ and c+++")
    assert "csharp" not in text_of("abc# and c##")


def test_korean_words_get_their_pairs_on_both_sides() -> None:
    assert {"데이", "이터", "터를"} <= set(text_of("데이터를").split())
    assert {"데이", "이터"} <= set(query_text("데이터").split())


def test_combining_marks_are_folded_on_both_sides() -> None:
    for word in ("résumé", "re\u0301sume\u0301", "resume"):
        assert "resume" in text_of(word)
        assert "resume" in query_text(word)
    assert text_of("ﬁle") == "file"


def test_a_query_is_never_a_query_language() -> None:
    assert query_text('"exact phrase"').split() == ["exact", "phrase"]
    assert '"' not in query_text('＂"“"')


storable = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=200)


@given(storable)
def test_any_text_goes_through(text: str) -> None:
    text_of(text).encode()
    assert '"' not in query_text(text)
    assert query_text(text) == query_text(text)


pairs = st.lists(st.text("abcdef", min_size=1, max_size=3), max_size=120).map(lambda ts: [(t, t.upper()) for t in ts])


@given(terms=pairs, seed=st.integers(1, 7))
def test_the_rarest_are_kept_in_their_order(terms: list[tuple[str, str]], seed: int) -> None:
    def frequency(term: str) -> int:
        return sum(map(ord, term)) * seed % 5

    distinct = list(dict.fromkeys(t for t, _ in terms))
    kept = keep_rarest(terms, frequency)
    assert len(kept) == min(len(distinct), MAX_TERMS)
    positions = [distinct.index(k.lower()) for k in kept]
    assert positions == sorted(positions)
    left_out = [t for t in distinct if t.upper() not in kept]
    if left_out:
        assert max(frequency(k.lower()) for k in kept) <= min(frequency(t) for t in left_out)


def test_the_limit_of_terms_below_at_and_above() -> None:
    assert MAX_TERMS == 32
    for count in (31, 32, 33):
        terms = [(f"t{i}", f"T{i}") for i in range(count)]
        kept = keep_rarest(terms, lambda t: 99 if t == "t5" else 1)
        assert len(kept) == min(count, 32)
        assert ("T5" in kept) == (count <= 32)


def test_of_equally_rare_words_the_longest_then_the_first_stay() -> None:
    terms = [("a", "a"), ("bbb", "bbb"), ("cc", "cc"), ("dd", "dd")]
    assert keep_rarest(terms, lambda _: 0, most=2) == ["bbb", "cc"]


def test_a_repeated_term_counts_once() -> None:
    assert keep_rarest([("run", "running"), ("run", "runs"), ("x", "x")], lambda _: 0) == ["running", "x"]
