from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warmstart.context import count_tokens, entry
from warmstart.indexer.assemble import assemble, shape
from warmstart.indexer.symbols import MODULE, Symbol
from warmstart.memory import MAX_CONTENT, MAX_METADATA_BYTES

SEND = Symbol(
    "Client.send", "method", 41, "async def send(self, request: Request) -> Response", "Sends it.", (),
    ("_retry", "log"), ("Client.get",),
)  # fmt: skip


def test_the_memory_of_a_symbol() -> None:
    [made] = assemble("src/client.py", "python", [SEND], "code-shop", "abc123")
    memory = made.memory
    assert memory.content == (
        "async def send(self, request: Request) -> Response\nmethod Client.send in src/client.py\n\nSends it.\n\n"
        "Calls: _retry, log\nCalled by: Client.get"
    )
    assert memory.title == "Client.send(self, request: Request) -> Response"
    assert (memory.type, memory.source, memory.namespace) == ("code", "index", "code-shop")
    assert memory.entities == ["send", "Client.send"]
    assert memory.metadata == {
        "path": "src/client.py", "language": "python", "kind": "method", "line": 41, "name": "Client.send",
        "repository": "abc123",
    }  # fmt: skip
    assert made.tokens == count_tokens(entry(memory.title or "", memory.content, [])) > 20


def test_secrets_in_comments_stay_here() -> None:
    key = "ghp_" + "Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8Qr9St0Uv1Wx2"
    symbol = Symbol(
        "f", "function", 1, "def f(a=b'hunter2hunter2')", f"Use the token {key}, or password: s3cr3t-pass1."
    )
    [made] = assemble("a.py", "python", [symbol], "n", "i")
    assert key not in repr(made)
    assert "s3cr3t-pass1" not in repr(made)
    assert "Use the token [REDACTED]" in made.memory.content


def test_the_shape_is_the_same_elsewhere() -> None:
    here, there = (assemble(path, "python", [SEND], "n", "i")[0] for path in ("a/x.py", "b/y.py"))
    assert here.shape == there.shape == shape(here.memory.content, "a/x.py")
    assert here.content_hash != there.content_hash


def test_a_module_and_a_section() -> None:
    module, section = assemble("README.md", "markdown", [
        Symbol(MODULE, "section", 1, doc="Before."), Symbol("Use > Install", "section", 3, "Install", "Type it."),
    ], "n", "i")  # fmt: skip
    assert (module.memory.title, module.memory.content) == ("README.md", "README.md\nsection in README.md\n\nBefore.")
    assert section.memory.title == "Use > Install"
    assert section.memory.content == "Install\nsection Use > Install in README.md\n\nType it."
    assert section.memory.entities == []


def test_two_that_say_the_same_are_one() -> None:
    twice = [
        Symbol("f", "function", 1, "f()"),
        Symbol("f#2", "function", 9, "f()"),
        Symbol("f#3", "function", 12, "f(a)"),
    ]
    assert [made.line for made in assemble("a.c", "c", twice, "n", "i")] == [1, 12]


PRINTABLE = st.characters(exclude_categories=("C", "Z"))
NAMES = st.text(PRINTABLE, min_size=1, max_size=60) | st.text("ab𝒳字", min_size=1, max_size=9).map(lambda t: t * 5_000)


@pytest.mark.parametrize("name", [".", "::", "a.", "#", "#a", "a#"])
def test_a_name_of_separators_is_a_name(name: str) -> None:
    symbol = Symbol(name, "class", 1, f"class {name}(x)", "", (), (), ())
    [made] = assemble("a.py", "python", [symbol], "n", "i", tokens=False)
    assert made.memory.title


@settings(max_examples=40, deadline=None)
@given(NAMES, st.lists(NAMES, max_size=8).map(tuple), NAMES.map(lambda t: t[:600]), NAMES.map(lambda t: t[:2_000]))
def test_whatever_is_in_a_file_can_be_stored(name: str, names: tuple[str, ...], signature: str, doc: str) -> None:
    path = "字" * 340 + ".py"
    [made] = assemble(
        path, "python", [Symbol(name, "class", 1, signature, doc, names, names, names)], "n", "i", tokens=False
    )
    assert len(made.memory.content) < MAX_CONTENT
    assert len(json.dumps(made.memory.metadata, ensure_ascii=False).encode()) < MAX_METADATA_BYTES
