"""Each language by one file with what its people write; then what nobody should write."""

from __future__ import annotations

import json

import pytest

from warmstart.indexer.languages import BY_EXTENSION, GRAMMARS
from warmstart.indexer.sections import sections
from warmstart.indexer.symbols import MODULE, Extraction, Symbol, extract

PYTHON = '''"""What the module is for."""
import os

#: How often a request is tried.
RETRIES = 5
SECRET = "sk-very-secret"
LIMIT: int = 3  # per minute

type Pair = tuple[int, int]


# said above
@decorated("x")
class Client(Base):
    """Talks to the server."""

    timeout = 5
    """Seconds."""

    def send(self, request: Request, key: str = "hunter2-default") -> Response:
        """Send it."""

        def inner():
            return helper()

        return self._retry(inner, os.path.join("body-text", key))

    async def _retry(self, f): ...


def helper(
    a,  # a comment in the signature
    *args,
) -> None:
    # a comment in the body
    Client().send(a)
'''

GO = """// Package wire speaks the protocol.
package wire

// MaxSize is the limit.
const MaxSize = 1 << 20

// Frame is one message.
type Frame struct {
	Length int
	Body   []byte
}

// Encode writes it.
func (f *Frame) Encode(w io.Writer) error {
	return write(w, f.Body)
}

func write(w io.Writer, b []byte) error { return nil }
"""

CASES: dict[str, tuple[str, set[tuple[str, str, str]]]] = {
    # language: source, {(kind, name, a piece of its doc)}
    "go": (GO, {
        ("module", MODULE, "speaks the protocol"), ("constant", "MaxSize", "the limit"),
        ("type", "Frame", "one message"),
        ("method", "Frame.Encode", "writes it"), ("function", "write", ""),
    }),
    "javascript": ("""
/** Adds. */
export function add(a, b) { return a + b }
// twice
const twice = (x) => add(x, x)
/** A queue. */
class Queue extends Base {
  /** Puts it in. */
  push(item) { this.items.push(item) }
  static of = () => new Queue()
}
exports.run = function (task) {}
const plain = 3
// explained
const LIMIT = 'a-secret-value'
""", {
        ("function", "add", "Adds."), ("function", "twice", "twice"), ("class", "Queue", "A queue."),
        ("method", "Queue.push", "Puts it in."), ("method", "Queue.of", ""), ("function", "run", ""),
        ("constant", "LIMIT", "explained"),
    }),
    "typescript": ("""
/** What it holds. */
export interface Options<T> {
  /** Milliseconds. */
  delay: number
  retry?(n: number): void
}
type Id = string | number
enum Level { Low, High }
namespace Deep { export abstract class Store { abstract get(key: string): Id } }
function over(a: string): void
function over(a: number): void
/** Both. */
function over(a: any): void { helper(a) }
""", {
        ("interface", "Options", "What it holds."), ("property", "Options.delay", "Milliseconds."), ("type", "Id", ""),
        ("enum", "Level", ""), ("class", "Deep.Store", ""), ("function", "over", "Both."),
    }),
    "tsx": ("""
/** Shows it. */
export const View = ({ name }: Props) => <div onClick={() => go(name)}>{name}</div>
""", {("function", "View", "Shows it.")}),
    "rust": ("""//! What the crate does.

/// A point.
#[derive(Debug)]
pub struct Point<T> { x: T }
impl<T> Point<T> {
    /// Moves it.
    pub fn shift(&mut self, by: T) -> bool { apply(self, by) }
}
/// Can be drawn.
pub trait Draw { /// On it.
    fn draw(&self); }
mod deep { pub fn inside() {} }
/// How many.
const MANY: usize = 4;
macro_rules! twice { () => {} }
""", {
        ("module", MODULE, "the crate"), ("type", "Point", "A point."), ("method", "Point::shift", "Moves it."),
        ("interface", "Draw", "Can be drawn."), ("function", "deep::inside", ""), ("constant", "MANY", "How many."),
        ("macro", "twice", ""),
    }),
    "java": ("""package a;
/** A service. */
public class Service {
  /** The limit. */
  static final int LIMIT = 3;
  /** Starts. */
  @Override public void start(String name) throws Broken { helper.run(name); }
  Service() {}
}
interface Port { int size(); }
enum Color { RED, BLUE }
record Pair(int a, int b) { }
""", {
        ("class", "Service", "A service."), ("constant", "Service.LIMIT", "The limit."),
        ("method", "Service.start", "Starts."), ("method", "Service.Service", ""), ("interface", "Port", ""),
        ("method", "Port.size", ""), ("enum", "Color", ""), ("class", "Pair", ""),
    }),
    "c": ("""
/* How many. */
#define MANY 100
/* A node. */
typedef struct node { int value; } node_t;
/* Makes one. */
struct node *make(int value) { return alloc(value); }
static int plain(void) { return 0; }
/* Declared elsewhere. */
int later(void);
enum kind { A, B };
""", {
        ("constant", "MANY", "How many."), ("type", "node_t", "A node."),
        ("function", "make", "Makes one."), ("function", "plain", ""), ("function", "later", "Declared elsewhere."),
        ("enum", "kind", ""),
    }),
    "cpp": ("""
namespace net {
/// A socket.
class Socket {
 public:
  /// Closes it.
  void close();
  int fd() const { return fd_; }
};
/// The largest.
template <typename T> T largest(T a, T b) { return a > b ? a : b; }
}
void net::Socket::close() { ::close(fd_); }
""", {
        ("class", "net::Socket", "A socket."), ("method", "net::Socket::close", "Closes it."),
        ("method", "net::Socket::fd", ""), ("function", "net::largest", "The largest."),
    }),
    "csharp": ("""
namespace A {
/// <summary>A job.</summary>
public class Job {
  /// <summary>Its name.</summary>
  public string Name { get; set; }
  /// <summary>Runs.</summary>
  public async Task<int> Run(string name) { return await Helper.Go(name); }
}
interface IJob { void Stop(); }
struct Size { }
enum State { On }
}
""", {
        ("class", "A.Job", "A job."), ("property", "A.Job.Name", "Its name."), ("method", "A.Job.Run", "Runs."),
        ("interface", "A.IJob", ""), ("method", "A.IJob.Stop", ""), ("class", "A.Size", ""), ("enum", "A.State", ""),
    }),
    "ruby": ("""
# Speaks.
module Speech
  # How loud.
  VOLUME = 'a-secret-value'
  # A voice.
  class Voice < Base
    # Says it.
    def say(text, loud: false)
      emit(text)
    end
    def self.make; new; end
  end
end
""", {
        ("class", "Speech", "Speaks."), ("constant", "Speech::VOLUME", "How loud."),
        ("class", "Speech::Voice", "A voice."),
        ("method", "Speech::Voice::say", "Says it."), ("method", "Speech::Voice::make", ""),
    }),
    "php": ("""<?php
/** A cart. */
class Cart extends Base {
    /** Its size. */
    private int $size = 0;
    /** Adds. */
    public function add(Item $item, string $note = 'a-secret-value'): void { $this->push($item); }
}
interface Shop { }
trait Sells { }
/** Sums up. */
function total(array $items): int { return array_sum($items); }
""", {
        ("class", "Cart", "A cart."), ("property", "Cart::$size", "Its size."), ("method", "Cart::add", "Adds."),
        ("interface", "Shop", ""), ("class", "Sells", ""), ("function", "total", "Sums up."),
    }),
}  # fmt: skip


def by_name(found: Extraction) -> dict[str, Symbol]:
    named = {symbol.name: symbol for symbol in found.symbols}
    assert len(named) == len(found.symbols)
    return named


def test_python() -> None:
    found = extract("python", PYTHON.encode())
    assert found.parsed
    named = by_name(found)
    assert set(named) == {
        MODULE, "RETRIES", "LIMIT", "Pair", "Client", "Client.timeout", "Client.send", "Client._retry", "helper",
    }  # fmt: skip
    assert named[MODULE].doc == "What the module is for."
    assert named["RETRIES"] == Symbol("RETRIES", "constant", 5, "RETRIES", "How often a request is tried.")
    assert named["LIMIT"].doc == "per minute"
    assert named["Client.timeout"].doc == "Seconds."
    assert named["Client"].doc == "Talks to the server."
    assert named["Client"].line == 14
    assert named["Client"].members == ("timeout", "send", "_retry")
    send = named["Client.send"]
    assert send.kind == "method"
    assert send.signature == 'def send(self, request: Request, key: str = "…") -> Response'
    assert send.calls == ("helper", "_retry", "join")
    # what its inner function calls is its own doing; what somebody's object calls is not known to be this one's
    assert named["Client._retry"].called_by == ("Client.send",)
    assert named["helper"].called_by == ("Client.send",)
    assert send.called_by == ()
    assert named["helper"].signature == "def helper( a, *args, ) -> None"


@pytest.mark.parametrize("language", CASES)
def test_a_language(language: str) -> None:
    source, expected = CASES[language]
    found = extract(language, source.encode())
    assert found.parsed
    assert {(s.kind, s.name) for s in found.symbols} == {(kind, name) for kind, name, _ in expected}
    named = by_name(found)
    for _, name, doc in expected:
        assert doc in named[name].doc
        assert bool(doc) == bool(named[name].doc), named[name]
    assert "a-secret-value" not in repr(found)


def test_every_language_of_the_contract_is_there() -> None:
    assert {g.name for g in GRAMMARS} == {*CASES, "python", "markdown"}
    assert len(BY_EXTENSION) == sum(len(g.extensions) for g in GRAMMARS)


def test_go_says_whose_method_what_is_called_and_what_a_type_holds() -> None:
    named = by_name(extract("go", GO.encode()))
    assert named["Frame"].members == ("Length", "Body")
    assert named["Frame.Encode"].calls == ("write",)
    assert named["write"].called_by == ("Frame.Encode",)
    assert named["Frame.Encode"].signature == "func (f *Frame) Encode(w io.Writer) error"
    assert named["MaxSize"].signature == "MaxSize"


def test_no_body_and_no_value_is_taken() -> None:
    every = json.dumps([repr(extract("python", PYTHON.encode()))])
    for secret in ("sk-very-secret", "hunter2-default", "body-text", "a comment in the body"):
        assert secret not in every


def test_a_header_of_cpp_is_read_as_such() -> None:
    found = extract("c", b"#pragma once\nclass Socket {\npublic:\n  /* Closes. */\n  void close();\n};\n")
    assert found.parsed
    assert {(s.kind, s.name) for s in found.symbols} == {("class", "Socket"), ("method", "Socket::close")}


def test_a_licence_explains_nothing_and_directives_are_for_tools() -> None:
    found = extract(
        "go", b"// Copyright 2020 Somebody. All rights reserved.\npackage a\n\n//go:noinline\n// Real.\nfunc f() {}\n"
    )
    assert {(s.name, s.doc) for s in found.symbols} == {("f", "Real.")}


def test_the_sound_parts_of_a_broken_file_are_kept() -> None:
    found = extract("python", b'def good():\n    """Fine."""\n\ndef broken(:\n    pass\n\nclass Also: pass\n')
    assert not found.parsed
    assert {"good", "Also"} <= {s.name for s in found.symbols}


def test_a_long_go_file_is_no_tangle() -> None:
    source = "package a\n" + "".join(f"func f{i}() {{}}\n" for i in range(6_000))
    assert len(extract("go", source.encode()).symbols) == 6_000


def test_ten_thousand_symbols_and_lines_of_fifty_thousand_characters() -> None:
    many = "".join(f"def f{i}(): return f{(i + 1) % 10_000}()\n" for i in range(10_000))
    found = extract("python", many.encode())
    assert len(found.symbols) == 10_000
    assert found.symbols[7].calls == ("f8",)
    assert found.symbols[8].called_by == ("f7",)
    x, y, z, w = (letter * 50_000 for letter in "xyzw")
    long = f"def {x}(): pass\ndef g(a='{y}', b={z}): pass\n# {w}\ndef h(): pass\n"
    for symbol in extract("python", long.encode()).symbols:
        assert len(symbol.signature) <= 600
        assert len(symbol.doc) <= 2_000


@pytest.mark.parametrize("grammar", [g.name for g in GRAMMARS])
@pytest.mark.parametrize("piece", ["(", '"', "\x00"])
def test_what_is_no_source_ends(grammar: str, piece: str) -> None:
    """A query over a wide tree of nameless signs takes the square of their number."""
    source = (piece * 20_000).encode()
    try:
        found = sections(source) if grammar == "markdown" else extract(grammar, source)
    except Exception as error:
        assert type(error).__name__ == "Tangled"  # noqa: PT017
    else:
        assert len(found.symbols) <= 100_000


MARKDOWN = """---
title: front matter
---
Before.

# Install

Two ways.

```sh
export TOKEN=a-secret-value
```

After.

## From source

Clone it.

## Empty

Other
=====

Setext prose.

# Install

Again.
"""


def test_markdown_by_heading() -> None:
    named = by_name(sections(MARKDOWN.encode()))
    assert {name: symbol.doc for name, symbol in named.items()} == {
        MODULE: "Before.",
        "Install": "Two ways.\n\nAfter.",
        "Install > From source": "Clone it.",
        "Other": "Setext prose.",
        "Install#2": "Again.",
    }
    assert named["Install > From source"].line == 16
    assert "a-secret-value" not in repr(named)


def test_markdown_without_a_heading() -> None:
    assert [(s.name, s.doc) for s in sections(b"Just text.\n").symbols] == [(MODULE, "Just text.")]
    assert sections(b"").symbols == []
