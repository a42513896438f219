"""The filter text that reaches LanceDB, attacked over query, count and update on a real table."""

from __future__ import annotations

import ast
import asyncio
import itertools
import operator
from collections.abc import Coroutine, Iterator
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import warmstart
from fakes.store import Store, open_store, row
from warmstart.memory import SearchRequest
from warmstart.store import predicates as where
from warmstart.store.predicates import MAX_VALUES, Predicate
from warmstart.store.reads import filters_of

T = TypeVar("T")

ATTACKS = [
    "x\\') OR (1=1) --",
    "\\'",
    "\\",
    "\\\\'",
    "\\\\",
    "'",
    "''",
    "'''",
    "' OR '1'='1",
    "' OR 1=1 --",
    "') OR true OR ('",
    "'; DROP TABLE memories; --",
    "' UNION SELECT * FROM memories --",
    "x' IN ('y",
    "a\nb",
    "a\r\nb",
    "'\n--",
    "/* c */",
    "--",
    "%",
    "_",
    "a_b",
    "100%",
    '"',
    '" OR "1"="1',
    "`user_id`",
    "NULL",
    "null",
    "true",
    "$1",
    "?",
    ":x",
    "{}",
    "${user_id}",
    "\x01",
    "\x1a",
    "\x7f",
    "\t",
    " ",
    "",
    "\ufeff",
    "\u202e",
    "\u2028",
    "ʼ",
    "’",
    "＇",
    "é",
    "e\u0301",
    "ﷺ",
    "日本語",
    "😀'",
    "U&'\\0041'",
    "E'\\x27'",
    "X'27'",
    "alice",
    "bob",
    "mallory",
    "'" * 8_000,
    "\\'" * 4_000,
    "long" * 4_000,
]
TENANTS = ["alice", "bob", "x\\') OR (1=1) --", "' OR 1=1 --", "\\'"]

storable = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=60)
hostile = st.one_of(
    st.sampled_from(ATTACKS),
    storable,
    st.text("'\\\"-;()= ORo1\n%_/*", max_size=30),
    st.tuples(st.sampled_from(ATTACKS), st.sampled_from(ATTACKS)).map("".join),
)
instants = st.datetimes(timezones=st.just(UTC))


class Attacked:
    """One table whose rows hold every attack in every tenant, beside what each row is known to be."""

    def __init__(self, runner: asyncio.Runner, directory: Path) -> None:
        self._runner = runner
        self._store = open_store(directory)
        self.store: Store = runner.run(self._store.__aenter__())
        self.rows: list[dict[str, Any]] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        self.run(self._store.__aexit__(None, None, None))

    def add(self, rows: list[dict[str, Any]]) -> None:
        for start in range(0, len(rows), 200):
            self.run(self.store.writer.insert(rows[start : start + 200]))
        self.rows += rows

    async def _ids(self, predicate: Predicate) -> tuple[list[str], int]:
        lance = self.store.table.lance
        found = await lance.query().where(predicate.sql).select(["id"]).to_arrow()
        return sorted(found["id"].to_pylist()), await lance.count_rows(predicate.sql)

    def check(self, predicate: Predicate, expected: Any) -> None:
        """`predicate` finds just the rows of which `expected` is true, by query and by count."""
        ids, count = self.run(self._ids(predicate))
        assert ids == sorted(r["id"] for r in self.rows if expected(r))
        assert count == len(ids)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with asyncio.Runner() as runner:
        table = Attacked(runner, tmp_path_factory.mktemp("attacked"))
        table.add(
            [
                row(f"memory {number}", user_id=tenant) | {"source": value, "tags": [value, f"t{number % 3}"]}
                for tenant in TENANTS
                for number, value in enumerate(ATTACKS)
            ]
        )
        yield table
        table.close()


@given(value=hostile)
@example(value="x\\') OR (1=1) --")
@settings(max_examples=50)
def test_a_value_equals_only_itself(attacked: Attacked, value: str) -> None:
    attacked.check(where.equals("source", value), lambda r: r["source"] == value)
    own = where.tenant("alice") & where.equals("source", value)
    attacked.check(own, lambda r: r["user_id"] == "alice" and r["source"] == value)


@given(user_id=st.one_of(st.sampled_from(TENANTS), hostile))
@settings(max_examples=40)
def test_a_tenant_sees_only_its_own(attacked: Attacked, user_id: str) -> None:
    attacked.check(where.tenant(user_id), lambda r: r["user_id"] == user_id)


@given(values=st.lists(hostile, max_size=6))
@settings(max_examples=50)
def test_lists_of_values(attacked: Attacked, values: list[str]) -> None:
    alice = where.tenant("alice")
    attacked.check(alice & where.one_of("source", values), lambda r: r["user_id"] == "alice" and r["source"] in values)
    attacked.check(
        alice & where.none_of("source", values),
        lambda r: r["user_id"] == "alice" and r["source"] not in values,
    )
    if values:
        attacked.check(
            alice & where.has_all("tags", values),
            lambda r: r["user_id"] == "alice" and set(values) <= set(r["tags"]),
        )


@given(value=hostile, name=st.sampled_from(["<", "<=", ">", ">="]))
@settings(max_examples=30)
def test_order_of_strings(attacked: Attacked, value: str, name: str) -> None:
    compared = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}[name]
    attacked.check(where.compare("source", name, value), lambda r: compared(r["source"].encode(), value.encode()))


@given(a=hostile, b=hostile, c=hostile)
@settings(max_examples=30)
def test_or_never_widens_the_tenant(attacked: Attacked, a: str, b: str, c: str) -> None:
    """However predicates are put together, an AND with the tenant holds for all of them."""
    either = where.equals("source", a) | where.equals("source", b)
    attacked.check(where.tenant("bob") & either, lambda r: r["user_id"] == "bob" and r["source"] in (a, b))
    attacked.check(
        where.all_of([where.tenant("bob"), where.any_of([where.equals("source", v) for v in (a, b, c)])]),
        lambda r: r["user_id"] == "bob" and r["source"] in (a, b, c),
    )


@given(value=hostile, written=hostile)
@settings(max_examples=40)
def test_updates_touch_only_the_row_they_name(tmp_attacked: Attacked, value: str, written: str) -> None:
    """Both sides of an update: the rows it finds, and the value it writes."""
    lance = tmp_attacked.store.table.lance
    mine = where.tenant("alice") & where.equals("source", value)
    matching = [r for r in tmp_attacked.rows if r["user_id"] == "alice" and r["source"] == value]

    async def update() -> dict[str, tuple[str, str, list[str]]]:
        result = await lance.update(
            where=mine.sql,
            updates_sql={"title": where.literal(written), "tags": where.literal([written, value])},
        )
        assert result.rows_updated == len(matching)
        table = await lance.query().select(["id", "source", "title", "tags"]).to_arrow()
        return {r["id"]: (r["source"], r["title"], r["tags"]) for r in table.to_pylist()}

    after = tmp_attacked.run(update())
    for changed in matching:
        changed |= {"title": written, "tags": [written, value]}
    assert after == {r["id"]: (r["source"], r["title"], r["tags"]) for r in tmp_attacked.rows}


@pytest.fixture(scope="module")
def tmp_attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    with asyncio.Runner() as runner:
        table = Attacked(runner, tmp_path_factory.mktemp("updated"))
        pairs = itertools.product(TENANTS[:3], enumerate(ATTACKS[:30]))
        table.add([row(f"memory {n}", user_id=tenant) | {"source": v} for tenant, (n, v) in pairs])
        yield table
        table.close()


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    edges = [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(1677, 9, 21, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(2026, 2, 28, 12, 0, 0, 1, tzinfo=UTC),
        datetime(2262, 4, 12, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    ]
    with asyncio.Runner() as runner:
        table = Attacked(runner, tmp_path_factory.mktemp("dated"))
        importances = [0.0, -0.0, 0.1, 0.3, 1 / 3, 0.5, 0.7, 1.0]
        table.add(
            [
                row(f"memory {i}", occurred_at=at, importance=importance)
                for i, (at, importance) in enumerate(zip(edges, importances, strict=True))
            ]
        )
        yield table
        table.close()


@given(at=instants, name=st.sampled_from(["=", "<", "<=", ">", ">="]), data=st.data())
@settings(max_examples=40)
def test_instants_of_every_year(dated: Attacked, at: datetime, name: str, data: st.DataObject) -> None:
    at = data.draw(st.sampled_from([at, *(r["occurred_at"] for r in dated.rows)]))
    compared = {"=": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}[name]
    dated.check(where.compare("occurred_at", name, at), lambda r: compared(r["occurred_at"], at))


@given(value=st.floats(0, 1, allow_nan=False), data=st.data())
@settings(max_examples=40)
def test_numbers_meet_their_float32(dated: Attacked, value: float, data: st.DataObject) -> None:
    value = data.draw(st.sampled_from([value, *(r["importance"] for r in dated.rows)]))
    for name, compared in (("=", operator.eq), (">=", operator.ge), ("<", operator.lt)):
        dated.check(
            where.compare("importance", name, value),
            lambda r, c=compared: c(np.float32(r["importance"]), np.float32(value)),
        )


def test_instants_in_other_zones_are_the_same_instants() -> None:
    at = datetime(2026, 1, 1, 2, tzinfo=timezone(timedelta(hours=2)))
    assert where.literal(at) == where.literal(datetime(2026, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    "build",
    [
        lambda: where.equals("source", "a\0b"),
        lambda: where.equals("source", "\0"),
        lambda: where.equals("source", "\ud800"),
        lambda: where.one_of("source", ["fine", "a\0b"]),
        lambda: where.has_all("tags", ["\udfff"]),
        lambda: where.has_all("tags", []),
        lambda: where.equals("source = 'x' OR 1", 1),
        lambda: where.equals("nothing", "x"),
        lambda: where.one_of("user_id) OR (id", ["x"]),
        lambda: where.is_null("deleted_at OR true"),
        lambda: where.is_not_null("nothing"),
        lambda: where.has_all("tags, ['x']) OR (true", ["x"]),
        lambda: where.compare("id", "= '' OR id >", "x"),
        lambda: where.compare("id", "LIKE", "x"),
        lambda: where.equals("importance", float("nan")),
        lambda: where.equals("importance", float("inf")),
        lambda: where.equals("occurred_at", datetime(2026, 1, 1)),
        lambda: where.one_of("id", ["x"] * (MAX_VALUES + 1)),
    ],
)
def test_what_has_no_place_in_a_predicate_is_refused(build: Any) -> None:
    with pytest.raises(ValueError, match=r".+"):
        build()


def test_a_boolean_is_no_value() -> None:
    with pytest.raises(TypeError):
        where.equals("importance", True)


def test_the_most_values_and_alternatives_are_served(attacked: Attacked) -> None:
    values = [f"v{i}" for i in range(MAX_VALUES - 1)]
    attacked.check(where.one_of("source", [*values, "alice"]), lambda r: r["source"] == "alice")
    attacked.check(
        where.any_of([where.equals("source", v) for v in [*values[:700], "bob"]]),
        lambda r: r["source"] == "bob",
    )


def test_nothing_is_asked_of_no_values(attacked: Attacked) -> None:
    attacked.check(where.one_of("source", []), lambda _: False)
    attacked.check(where.none_of("source", []), lambda _: True)
    attacked.check(where.any_of([]), lambda _: False)


def test_a_search_with_every_filter_renders(attacked: Attacked) -> None:
    request = SearchRequest(
        query="q",
        namespace="default",
        type=["fact", "code"],
        tags=["'", "t0"],
        entities=["\\'"],
        source="x\\') OR (1=1) --",
        min_importance=0.1,
        occurred_from=datetime(1, 1, 1, tzinfo=UTC),
        occurred_to=datetime(9999, 1, 1, tzinfo=UTC),
    )
    attacked.check(where.all_of([where.tenant("alice"), *filters_of(request)]), lambda _: False)


# -- nobody else builds filter text

SOURCES = sorted(Path(warmstart.__file__).parent.rglob("*.py"))
#: The names under which a filter reaches LanceDB.
_FILTERS = {"where", "count_rows", "delete", "only_if", "when_matched_update_all", "when_not_matched_by_source_delete"}
_KEYWORDS = {"where", "filter", "updates_sql", "updates"}


def _touches_the_table(tree: ast.Module) -> bool:
    """Whether the module can hold a handle of the table at all; a REST client's `delete` is none."""
    names = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names += [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    return any(n.startswith(("lancedb", "warmstart.store", "warmstart.runtime")) for n in names)


def _is_made_of_text(node: ast.AST) -> bool:
    """A string in the making: a literal, an f-string, `+`, `%`, `.format`, `.join`, a dict of them."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.JoinedStr | ast.BinOp) and not _is_predicate_and(inner):
            return True
        if (
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Attribute)
            and inner.func.attr in ("format", "join")
        ):
            return True
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str)
    if isinstance(node, ast.Dict):
        return any(v is not None and _is_made_of_text(v) for v in node.values)
    return isinstance(node, ast.IfExp) and (_is_made_of_text(node.body) or _is_made_of_text(node.orelse))


def _is_predicate_and(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr)


def built_elsewhere(path: Path) -> list[str]:
    tree = ast.parse(path.read_text())
    if not _touches_the_table(tree):
        return []
    found = []
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        text = list(call.args) if name in _FILTERS else []
        text += [k.value for k in call.keywords if k.arg in _KEYWORDS]
        if name == "Predicate" or any(_is_made_of_text(t) for t in text):
            found.append(f"{path.name}:{call.lineno}: {ast.unparse(call)[:100]}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(SOURCES[0].parent)))
def test_no_other_module_builds_filter_text(path: Path) -> None:
    if path.name != "predicates.py":
        assert built_elsewhere(path) == []


@pytest.mark.parametrize(
    "line",
    [
        "q.where('a = 1')",
        "q.where(f'a = {x}')",
        "q.where('a = ' + x)",
        "q.where('a = %s' % x)",
        "q.where('a = {}'.format(x))",
        "t.count_rows('a')",
        "t.delete(f'{x}')",
        "t.update(where='a', updates_sql=v)",
        "t.update(where=p.sql, updates_sql={'a': '1'})",
        "t.update(where=p.sql, updates_sql={'a': f'{x}'})",
        "q.where(' AND '.join(x))",
        "Predicate('true')",
        "where.Predicate(x)",
        "q.where(p.sql + ' OR true')",
        "q.where('a' if x else p.sql)",
    ],
)
def test_the_scan_sees_what_it_looks_for(tmp_path: Path, line: str) -> None:
    source = tmp_path / "module.py"
    source.write_text(f"from warmstart.store import predicates as where\n{line}\n")
    assert built_elsewhere(source)
