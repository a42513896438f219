"""The one place where filter text for LanceDB is made.

LanceDB takes no parameters and silently ignores what follows a complete
expression, so every value is rendered here, by its type, and a column must be
one of the schema's. Nothing else in the project builds filter text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from warmstart.store.schema import COLUMNS, HISTORY_COLUMNS

Value = str | int | float | datetime | None

_COLUMNS: Final = frozenset({*COLUMNS, *HISTORY_COLUMNS})
#: A predicate with more values is refused: callers page.
MAX_VALUES: Final = 2_000


@dataclass(frozen=True, slots=True)
class Predicate:
    """A complete boolean expression; `sql` is read only where it is handed to LanceDB."""

    sql: str

    def __and__(self, other: Predicate) -> Predicate:
        return Predicate(f"({self.sql}) AND ({other.sql})")

    def __or__(self, other: Predicate) -> Predicate:
        return Predicate(f"({self.sql}) OR ({other.sql})")


def literal(value: Value | Sequence[str]) -> str:
    """`value` as SQL text of its own type."""
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise ValueError("a naive datetime has no place in a predicate")
        return f"timestamp '{value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec='microseconds')}Z'"
    if isinstance(value, bool):
        raise TypeError("no column is boolean")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("a number in a predicate must be finite")
        # columns are float32: without the cast 0.1 would not equal itself
        return f"CAST({value!r} AS FLOAT)"
    return f"make_array({', '.join(_string(v) for v in value)})"


def _string(value: str) -> str:
    if "\x00" in value:
        raise ValueError("NUL has no place in a predicate")
    value.encode()  # a lone surrogate raises here, not in the engine
    return "'" + value.replace("'", "''") + "'"


def _column(name: str) -> str:
    if name not in _COLUMNS:
        raise ValueError(f"no column {name!r}")
    return name


def unchanged(column: str) -> dict[str, str]:
    """For an update to what is there already, which writes each row anew."""
    return {_column(column): _column(column)}


def compare(column: str, operator: str, value: Value) -> Predicate:
    if operator not in ("=", "<", "<=", ">", ">="):
        raise ValueError(f"no operator {operator!r}")
    return Predicate(f"{_column(column)} {operator} {literal(value)}")


def equals(column: str, value: Value) -> Predicate:
    return compare(column, "=", value)


def one_of(column: str, values: Sequence[str]) -> Predicate:
    """True for no row where `values` is empty."""
    if not values:
        return Predicate("false")
    if len(values) > MAX_VALUES:
        raise ValueError(f"at most {MAX_VALUES} values; these are {len(values)}")
    return Predicate(f"{_column(column)} IN ({', '.join(_string(v) for v in values)})")


def none_of(column: str, values: Sequence[str]) -> Predicate:
    """True for every row where `values` is empty."""
    return Predicate(f"NOT ({one_of(column, values).sql})")


def in_namespace(pattern: str) -> Predicate:
    """Rows of the namespace `pattern`, or where it ends with `*` of all that begin so."""
    if not pattern.endswith("*"):
        return equals("namespace", pattern)
    # a range, since LIKE would take the _ of a name for any character; no name has a character above z
    begin = pattern[:-1]
    return compare("namespace", ">=", begin) & compare("namespace", "<", begin + "{")


def has_all(column: str, values: Sequence[str]) -> Predicate:
    """Rows whose list holds every one of `values`, which must not be empty."""
    if not values:
        raise ValueError("has_all needs at least one value")
    return Predicate(f"array_has_all({_column(column)}, {literal(list(values))})")


def starts_with(column: str, prefix: str) -> Predicate:
    return Predicate(f"starts_with({_column(column)}, {literal(prefix)})")


def is_null(column: str) -> Predicate:
    return Predicate(f"{_column(column)} IS NULL")


def is_not_null(column: str) -> Predicate:
    return Predicate(f"{_column(column)} IS NOT NULL")


def tenant(user_id: str) -> Predicate:
    """Part of every read and write of a tenant's rows."""
    return equals("user_id", user_id)


def active() -> Predicate:
    return is_null("deleted_at")


def all_of(predicates: Sequence[Predicate]) -> Predicate:
    first, *rest = predicates
    for predicate in rest:
        first = first & predicate
    return first


def any_of(predicates: Sequence[Predicate]) -> Predicate:
    # flat, since a deep tree of ORs overflows the engine's parser
    return Predicate(" OR ".join(f"({p.sql})" for p in predicates)) if predicates else Predicate("false")
