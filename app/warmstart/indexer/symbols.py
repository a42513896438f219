"""The symbols of one file: a pure function of its language and its text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tree_sitter import Node, Tree

from warmstart.indexer.comments import Comments, docstring
from warmstart.indexer.languages import BY_NAME, matches

MAX_SIGNATURE: Final = 600
#: Of each list: what is called, what calls, what a type holds.
MAX_NAMES: Final = 40
MODULE: Final = "(module)"

_CLASSES: Final = frozenset({"class", "type", "interface", "enum"})
_SCOPES: Final = frozenset({"scope", "impl"})
_HAVE_METHODS: Final = _CLASSES | {"impl"}
_FUNCTIONS: Final = frozenset({"function", "method", "macro"})
#: How names are joined, where not by a dot.
_SEPARATORS: Final = {"rust": "::", "cpp": "::", "php": "::", "ruby": "::"}
_OF_ANOTHER: Final = (b".", b"->", b"::")
_ANONYMOUS: Final = re.compile("function|lambda|closure|func_literal|do_block")
_GENERICS: Final = re.compile(r"[<\[].*", re.DOTALL)
_TAIL: Final = re.compile(r"(?:\s|=>|[{:=;,])+$")


@dataclass(frozen=True, slots=True)
class Symbol:
    """One thing that has a name. `name` is unique in its file; `line` counts from 1."""

    name: str
    kind: str
    line: int
    signature: str = ""
    doc: str = ""
    members: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    called_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Extraction:
    symbols: list[Symbol]
    #: Whether the whole file could be parsed; where not, the symbols are those of its sound parts.
    parsed: bool


class _Call(NamedTuple):
    name: str
    #: `x.name()`, which may be anybody's.
    of_another: bool


@dataclass(slots=True)
class _Definition:
    node: Node
    kind: str
    name: str
    #: Only where a comment explains it.
    needs_doc: bool
    body: Node | None = None
    head: Node | None = None
    owner: str = ""
    parent: _Definition | None = None
    above: str = ""
    qualified: str = ""
    doc: str = ""
    members: list[str] = field(default_factory=list)
    #: By name.
    calls: dict[str, _Call] = field(default_factory=dict)
    called_by: list[str] = field(default_factory=list)

    @property
    def simple(self) -> str:
        return re.split(r"[.:]+", self.name)[-1]


def extract(language: str, source: bytes) -> Extraction:
    """`source` is UTF-8 with line feeds only."""
    grammar = BY_NAME[language]
    if grammar.otherwise and re.search(grammar.otherwise_if.encode(), source):
        language = grammar.otherwise
    found = _parse(language, source)
    return Extraction(found.symbols(), not found.tree.root_node.has_error)


def _parse(language: str, source: bytes) -> _Found:
    tree, found_by_query = matches(language, source)
    found = _Found(language, source, tree)
    for _, captures in found_by_query:
        found.take(captures)
    return found


class _Found:
    """What the query found in one tree."""

    def __init__(self, language: str, source: bytes, tree: Tree) -> None:
        self.tree = tree
        self._source = source
        self._separator = _SEPARATORS.get(language, ".")
        self._definitions: dict[int, _Definition] = {}
        #: By where the name of its symbol starts; -1 is the file's own.
        self._docs: dict[int, str] = {}
        self._outer_rows: dict[int, tuple[int, int]] = {}
        self._calls: dict[int, _Call] = {}
        self._fields: dict[int, str] = {}
        self._strings: list[Node] = []
        self._comments = Comments(source)

    # -- taking in

    def take(self, captures: dict[str, list[Node]]) -> None:
        for name, nodes in captures.items():
            if name == "comment":
                self._comments.add(nodes[0])
            elif name == "attribute":
                self._comments.pass_over(nodes[0])
            elif name == "call":
                at = nodes[0].start_byte
                self._calls[at] = _Call(self._text(nodes[0]), self._source[max(0, at - 2) : at].endswith(_OF_ANOTHER))
            elif name == "field":
                self._fields |= {node.start_byte: self._text(node) for node in nodes}
            elif name == "string":
                self._strings += nodes
            elif name == "outer":
                self._take_outer(captures["inner"][0], nodes[0])
            elif name == "doc":
                at = captures["name"][0].start_byte if "name" in captures else -1
                self._docs.setdefault(at, docstring(self._text(nodes[0])))
            elif name == "scope" or "." in name:  # @def.KIND and its like
                self._define(name, nodes[0], captures)

    def _take_outer(self, inner: Node, outer: Node) -> None:
        if outer.start_byte < inner.start_byte:
            self._outer_rows[inner.start_byte] = (outer.start_byte, outer.start_point.row)

    def _define(self, capture: str, node: Node, captures: dict[str, list[Node]]) -> None:
        certainty, _, kind = capture.partition(".")
        names = captures.get("name")
        if names is None:  # the file itself
            self._definitions[-1] = _Definition(node, "module", MODULE, needs_doc=True)
            return
        [name] = names[:1]
        made = _Definition(node, kind or "scope", self._name(name), needs_doc=certainty == "declared")
        made.body = captures.get("body", [None])[0]
        heads = captures.get("head", [])
        made.head = max(heads, key=lambda head: head.end_byte) if heads else None
        if owners := captures.get("owner"):
            made.owner = _GENERICS.sub("", self._text(owners[0]).lstrip("*& "))
        there = self._definitions.get(name.start_byte)
        # what is surely a symbol, and of equals what says where its body begins
        if there is None or (there.needs_doc, there.body is None) > (made.needs_doc, made.body is None):
            self._definitions[name.start_byte] = made

    def _name(self, node: Node) -> str:
        text = " ".join(self._text(node).split())
        return _GENERICS.sub("", text) or text

    # -- putting together

    def symbols(self) -> list[Symbol]:
        ordered = sorted(self._definitions.items(), key=lambda item: (item[1].node.start_byte, -item[1].node.end_byte))
        kept = self._nest(ordered)
        self._collect_members(kept)
        kept = [d for d in kept if d.doc or not d.needs_doc]
        kept = _merge_declarations(kept)
        functions = [d for d in kept if d.kind in _FUNCTIONS]
        self._collect_calls(functions)
        _collect_callers(functions)
        symbols = [self._symbol(d, name) for d, name in _numbered(kept)]
        if (doc := self._comments.of_file()) and -1 not in self._definitions:
            symbols.insert(0, Symbol(MODULE, "module", 1, doc=doc))
        return symbols

    def _nest(self, ordered: Sequence[tuple[int, _Definition]]) -> list[_Definition]:
        """The definitions that are no function's own, each with its parent, qualified name and doc."""
        kept: list[_Definition] = []
        stack: list[_Definition] = []
        for at, made in ordered:
            if made.kind == "module":
                made.qualified = MODULE
                made.doc = self._docs.get(at, "") or self._comment(made)
                kept.append(made)
                continue
            while stack and stack[-1].node.end_byte <= made.node.start_byte:
                stack.pop()
            made.parent = stack[-1] if stack else None
            if made.parent and (made.parent.kind in _FUNCTIONS or made.parent.kind == "constant"):
                continue
            above = made.above = made.parent.qualified if made.parent else made.owner
            if made.parent and made.parent.node.type == "type_definition":
                continue  # typedef struct x {…} y
            made.qualified = f"{above}{self._separator}{made.name}" if above else made.name
            stack.append(made)
            if made.kind in _SCOPES:
                continue
            if made.kind == "function" and (made.owner or (made.parent and made.parent.kind in _HAVE_METHODS)):
                made.kind = "method"
            made.doc = self._docs.get(at, "") or self._comment(made)
            if made.kind == "constant" and made.doc and _in_anonymous(made.node):
                continue
            kept.append(made)
        return kept

    def _comment(self, made: _Definition) -> str:
        at, row = made.node.start_byte, made.node.start_point.row
        while outer := self._outer_rows.get(at):
            at, row = outer
        doc = self._comments.above(row)
        if not doc and made.needs_doc and made.kind != "module":
            doc = self._comments.beside(made.node.end_point.row, made.node.end_byte)
        return doc

    def _collect_members(self, kept: Sequence[_Definition]) -> None:
        named = {made.node.start_byte: made.simple for made in kept if made.parent and made.parent.kind in _CLASSES}
        at = {**self._fields, **named}
        containers = sorted((d for d in kept if d.kind in _CLASSES), key=lambda d: d.node.start_byte)
        stack: list[_Definition] = []
        position = 0
        for start in sorted(at):
            while position < len(containers) and containers[position].node.start_byte < start:
                stack.append(containers[position])
                position += 1
            while stack and stack[-1].node.end_byte <= start:
                stack.pop()
            if stack and len(stack[-1].members) < MAX_NAMES and at[start] not in stack[-1].members:
                stack[-1].members.append(at[start])

    def _collect_calls(self, functions: Sequence[_Definition]) -> None:
        starts = [made.node.start_byte for made in functions]
        for at in sorted(self._calls):
            index = bisect_right(starts, at) - 1
            if index >= 0 and at < functions[index].node.end_byte:
                calls = functions[index].calls
                if len(calls) < MAX_NAMES:
                    calls.setdefault(self._calls[at].name, self._calls[at])

    def _symbol(self, made: _Definition, name: str) -> Symbol:
        return Symbol(
            name,
            made.kind,
            made.node.start_point.row + 1,
            "" if name == MODULE else self._signature(made),
            made.doc,
            tuple(made.members),
            tuple(made.calls),
            tuple(made.called_by),
        )

    def _signature(self, made: _Definition) -> str:
        start = made.node.start_byte
        if made.head is not None:
            end = made.head.end_byte
        elif made.body is not None:
            end = made.body.start_byte
        else:
            end = made.node.end_byte
        end = min(end, start + 4 * MAX_SIGNATURE)
        text = " ".join(self._without_values(start, end).split())
        text = _TAIL.sub("", text)
        if made.simple not in text:  # typedef struct {…} x
            text = f"{text} {made.name}"
        return text if len(text) <= MAX_SIGNATURE else text[: MAX_SIGNATURE - 1] + "…"

    def _without_values(self, start: int, end: int) -> str:
        """The text of a signature: strings in it, which may be secrets, and comments are left out."""
        spans = [(n.start_byte, n.end_byte, b'"\xe2\x80\xa6"') for n in self._strings]
        spans += [(*span, b"") for span in self._comments.spans()]
        pieces, at = [], start
        for first, last, instead in sorted(s for s in spans if start <= s[0] < end):
            if first < at:
                continue
            pieces += [self._source[at:first], instead]
            at = last
        pieces.append(self._source[at:end])
        return b"".join(pieces).decode(errors="replace")

    def _text(self, node: Node) -> str:
        return self._source[node.start_byte : node.end_byte].decode(errors="replace")


def _in_anonymous(node: Node) -> bool:
    above = node.parent
    while above is not None:
        if _ANONYMOUS.search(above.type):
            return True
        above = above.parent
    return False


def _merge_declarations(kept: Sequence[_Definition]) -> list[_Definition]:
    """Signatures without a body belong to what else has their name: overloads to their implementation."""
    first: dict[str, _Definition] = {}
    merged: list[_Definition] = []
    for made in kept:
        there = first.setdefault(made.qualified, made)
        if there is made:
            merged.append(made)
        elif made.kind in _FUNCTIONS and (made.body is None or there.body is None) and made.head is None:
            there.doc = there.doc or made.doc
            if "method" in (there.kind, made.kind):
                there.kind = made.kind = "method"
            if there.body is None and made.body is not None:
                # the calls are in the implementation; the doc and the line are the first signature's
                made.doc = there.doc
                merged[merged.index(there)] = made
                first[made.qualified] = made
        else:
            merged.append(made)
    return sorted(merged, key=lambda made: made.node.start_byte)


def _collect_callers(functions: Sequence[_Definition]) -> None:
    """Who calls whom within the file, where a name can only mean one."""
    named: dict[str, list[_Definition]] = defaultdict(list)
    for made in functions:
        named[made.simple].append(made)
    for caller in functions:
        for call in caller.calls.values():
            candidates = [callee for callee in named.get(call.name, []) if _can_mean(call, caller, callee)]
            for callee in candidates if len(candidates) == 1 else ():
                known = callee.called_by
                if callee is not caller and caller.qualified not in known and len(known) < MAX_NAMES:
                    known.append(caller.qualified)


def _can_mean(call: _Call, caller: _Definition, callee: _Definition) -> bool:
    """A method is only surely meant from within its own type."""
    if callee.above:
        return callee.above == caller.above
    return not call.of_another


def _numbered(kept: Iterable[_Definition]) -> list[tuple[_Definition, str]]:
    """Each with its name; the second of one name is `name#2`."""
    seen: dict[str, int] = defaultdict(int)
    named = []
    for made in kept:
        seen[made.qualified] += 1
        count = seen[made.qualified]
        named.append((made, made.qualified if count == 1 else f"{made.qualified}#{count}"))
    return named
