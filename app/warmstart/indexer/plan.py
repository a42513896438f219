"""What has to change so that the memories say what the tree says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from warmstart.indexer.assemble import Wanted
from warmstart.indexer.state import Row


class Pair(NamedTuple):
    memory_id: str
    row: Row
    wanted: Wanted


@dataclass(slots=True)
class Plan:
    kept: list[Pair] = field(default_factory=list)
    #: Another content: edited in place.
    changed: list[Pair] = field(default_factory=list)
    #: The same content, counted otherwise among those of one name.
    renumbered: list[Pair] = field(default_factory=list)
    new: list[Wanted] = field(default_factory=list)
    gone: list[tuple[str, Row]] = field(default_factory=list)

    def steps(self) -> int:
        return len(self.changed) + len(self.renumbered) + len(self.new) + len(self.gone)


def plan(rows: Mapping[str, Row], wanted: Iterable[Wanted], renamed: Mapping[str, str]) -> Plan:
    """Pairs memories with symbols: of one content, of one place, of a renamed file, of one shape.

    `renamed` is new path → old path. Since what is there with the right content
    is paired first, no edit ever gives a memory the content of another one.
    """
    made = Plan()
    left = dict(sorted(rows.items(), key=lambda item: (item[1].path, item[1].name, item[0])))
    open_ = list(wanted)

    def pair(of_row: Callable[[Row], Hashable], of_wanted: Callable[[Wanted], Hashable]) -> None:
        nonlocal open_
        waiting: dict[Hashable, list[str]] = defaultdict(list)
        for memory_id, row in left.items():
            waiting[of_row(row)].append(memory_id)
        unpaired = []
        for one in open_:
            if ids := waiting.get(of_wanted(one)):
                memory_id = ids.pop(0)
                row = left.pop(memory_id)
                _sort(made, Pair(memory_id, row, one))
            else:
                unpaired.append(one)
        open_ = unpaired

    pair(lambda row: row.content_hash, lambda one: one.content_hash)
    pair(lambda row: (row.path, row.name), lambda one: (one.path, one.name))
    pair(lambda row: (row.path, row.name), lambda one: (renamed.get(one.path), one.name))
    pair(lambda row: row.shape, lambda one: one.shape)
    made.new = open_
    made.gone = list(left.items())
    return made


def _sort(made: Plan, pair: Pair) -> None:
    if pair.row.content_hash != pair.wanted.content_hash:
        made.changed.append(pair)
    elif pair.row.name != pair.wanted.name:
        made.renumbered.append(pair)
    else:
        made.kept.append(pair)
