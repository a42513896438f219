"""The block that goes into a prompt: its format, its budget, and content that tries to break it."""

from __future__ import annotations

import functools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmstart import context
from warmstart.context import HEADER, assemble, count_tokens, entry
from warmstart.memory import MAX_CONTENT, MAX_CONTEXT_CHARS

#: The vocabulary's package reads its file the old way.
pytestmark = pytest.mark.filterwarnings("ignore:open_binary is deprecated:DeprecationWarning")

BLOCK = """\
## Prior observations from warmstart

### First

What happened.

- one
- two

### Second

Else.
"""


def headings(block: str) -> list[str]:
    """Every line that CommonMark reads as a heading, outside fenced code. Written apart from the code tested."""
    found, fence, before = [], None, ""
    for line in re.split(r"\r\n|\n|\r", block):
        opened = re.match(r" {0,3}(`{3,}|~{3,})(.*)$", line)
        if fence:
            if opened and opened[1][0] == fence[0] and len(opened[1]) >= len(fence) and not opened[2].strip():
                fence = None
        elif opened and not (opened[1][0] == "`" and "`" in opened[2]):
            fence = opened[1]
        elif re.match(r" {0,3}#{1,6}([ \t]|$)", line):
            found.append(line.strip())
        elif before.strip() and re.match(r" {0,3}(=+|-+)[ \t]*$", line):
            found.append(before.strip())
        before = "" if fence or opened else line
    assert fence is None, "a code fence is left open"
    return found


def test_the_format() -> None:
    entries = [("a", entry("First", "What happened.", ["one", "two"])), ("b", entry("Second", "Else.", []))]
    assert assemble(entries, 1_500) == (BLOCK, ["a", "b"])


def test_nothing_gives_nothing() -> None:
    assert assemble([], 1_500) == ("", [])
    assert assemble([("a", entry("T", "content", []))], 1) == ("", [])


def test_a_title_that_is_the_whole_content_is_not_printed_twice() -> None:
    assert entry("Just this", "Just this\n", []) == "\nJust this\n"


def test_no_ids_scores_or_dates_are_in_the_block() -> None:
    block, ids = assemble([("mem_0123", entry("T", "c", ["f"]))], 1_500)
    assert ids == ["mem_0123"]
    assert "mem_" not in block


def test_the_token_budget_at_and_one_below() -> None:
    entries = [("a", entry("First", "What happened.", ["one", "two"])), ("b", entry("Second", "Else.", []))]
    needed = count_tokens(BLOCK)
    assert assemble(entries, needed)[1] == ["a", "b"]
    block, ids = assemble(entries, needed - 1)
    assert ids == ["a"]
    assert count_tokens(block) <= needed - 1


def test_an_entry_that_does_not_fit_is_passed_over() -> None:
    entries = [("long", entry("L", "word " * 500, [])), ("short", entry("S", "fits", []))]
    assert assemble(entries, 60)[1] == ["short"]


def test_the_most_characters_at_and_one_above() -> None:
    room = MAX_CONTEXT_CHARS - len(HEADER) - len(entry("T", "", []))
    fits, ids = assemble([("a", entry("T", "x" * room, []))], 100_000)
    assert (len(fits), ids) == (MAX_CONTEXT_CHARS, ["a"])
    assert assemble([("a", entry("T", "x" * (room + 1), []))], 100_000) == ("", [])


def test_two_of_the_longest_do_not_both_fit() -> None:
    entries = [(i, entry("T", i * MAX_CONTENT, [])) for i in ("a", "b")]
    block, ids = assemble(entries, 100_000)
    assert ids == ["a"]
    assert len(block) <= MAX_CONTEXT_CHARS


BREAKERS = [
    "# Heading",
    "## Prior observations from warmstart",
    "text\n## Prior observations from warmstart\ntext",
    "   ### indented",
    "#",
    "##\n",
    "a\r\n## after crlf\r\nb",
    "a\r## after cr\rb",
    "Setext\n===",
    "Setext\n---",
    "Setext\r\n===\r\nrest",
    "Setext\r---\rrest",
    "Setext\n   ---   \n",
    "```\ncode",
    "```python\nx = 1",
    "~~~\ncode",
    "````\n```\nstill code",
    "~~~\n```\nstill code",
    "```\n~~~\nstill code",
    "```\n```python\nstill code",
    "```\ncode\n```\n# Heading behind it",
    "```\ncode\n``` \nplain\n```",
    "   ```\ncode",
    "``` `\nno fence\n# Heading",
    "a\n\n\n\n# b",
    "\t# code by its tab",
]


@pytest.mark.parametrize("content", BREAKERS)
def test_content_cannot_break_the_block(content: str) -> None:
    block, ids = assemble([("a", entry("T", content, [])), ("b", entry("Behind", "it", ["fact"]))], 1_500)
    assert ids == ["a", "b"]
    assert headings(block) == ["## Prior observations from warmstart", "### T", "### Behind"]


@given(
    content=st.text("#=-`~ \n\r\tab", min_size=1, max_size=40), title=st.text("#=-`~ \n\rab", min_size=1, max_size=10)
)
@settings(max_examples=400)
def test_no_content_and_no_title_can_break_the_block(content: str, title: str) -> None:
    block, _ = assemble([("a", entry(title, content, [])), ("b", entry("Behind", "it", []))], 100_000)
    found = headings(block)
    assert found[0] == "## Prior observations from warmstart"
    assert found[-1] == "### Behind"
    assert len(found) <= 3


def test_code_in_a_fence_stays_as_it_is() -> None:
    code = "```sh\n# install it\npip install x\n---\n```"
    assert code in entry("T", code + "\nrest", [])


def test_titles_and_facts_are_one_line() -> None:
    made = entry("a\nb  c", "content", ["one\n- two\n\n# three"])
    assert "### a b c\n" in made
    assert "- one - two # three\n" in made


@pytest.mark.parametrize("text", ["<|endoftext|>", "<|im_start|>system", "\u202e", "😀" * 50, "﷽" * 20])
def test_any_text_can_be_counted(text: str) -> None:
    assert count_tokens(text) > 0


@pytest.mark.parametrize(
    "text", ["word " * 50, "数据库迁移失败" * 20, "데이터베이스" * 20, "ฐานข้อมูล" * 20, "😀" * 40, "a1!" * 40]
)
def test_what_is_counted_before_the_vocabulary_is_there_is_no_less_than_the_truth(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_encoding", functools.cache(context._encoding.__wrapped__))
    loads: list[bool] = []
    monkeypatch.setattr(context, "_load_aside", lambda: loads.append(True))
    bound = context.count_tokens_now(text)
    assert loads == [True]
    assert bound >= context.count_tokens(text)
    assert context.count_tokens_now(text) == context.count_tokens(text)
