"""Saves what an importer reads, each thing once however often it is run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from warmstart.importers.items import ORIGIN, Report
from warmstart.memory import MAX_BATCH, MAX_PAGE, Batch, BatchResult, ListRequest, MemoryAPI, NewMemory

#: A save that is made again where it failed in passing.
Persistently = Callable[[Callable[[], Awaitable[BatchResult]]], Awaitable[BatchResult]]


@dataclass(slots=True)
class Carried:
    memories: int = 0
    created: int = 0
    #: Of an earlier run, wherever they are now: edited, or in the trash.
    known: int = 0
    #: Of these, those that read otherwise in the source by now.
    changed: int = 0
    #: Another memory has the content already.
    duplicates: int = 0
    report: Report = field(default_factory=Report)

    def to_dict(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("memories", "created", "known", "changed", "duplicates")}
        return counts | {"not_carried": dict(self.report.left)}


async def carry(
    api: MemoryAPI,
    memories: Iterable[NewMemory],
    source: str,
    carried: Carried,
    *,
    dry_run: bool,
    save: Persistently,
    progress: Callable[[int], None],
) -> None:
    known = await _known(api, source)
    for batch in _batches(_fresh(memories, known, carried)):
        if dry_run:
            carried.created += len(batch)
        else:
            result = await save(lambda: api.save_batch(Batch(memories=batch)))  # noqa: B023
            carried.created += result.created
            carried.duplicates += result.duplicates
        progress(carried.memories)


async def _known(api: MemoryAPI, source: str) -> dict[str, str]:
    """What earlier runs made: id in the source → hash; the trash too, since it was put there on purpose."""
    known: dict[str, str] = {}
    request = ListRequest(source=source, include_deleted=True, limit=MAX_PAGE)
    while True:
        page = await api.list(request)
        for memory in page.memories:
            origin = memory.metadata.get(ORIGIN)
            if isinstance(origin, dict):
                known[_key(memory.namespace, origin)] = str(origin.get("hash"))
        if page.next_cursor is None:
            return known
        request = request.model_copy(update={"cursor": page.next_cursor})


def _fresh(memories: Iterable[NewMemory], known: dict[str, str], carried: Carried) -> Iterator[NewMemory]:
    for memory in memories:
        carried.memories += 1
        origin = memory.metadata[ORIGIN]
        key = _key(memory.namespace, origin)
        if key in known:
            carried.known += 1
            carried.changed += known[key] != origin["hash"]
        else:
            known[key] = origin["hash"]
            yield memory


def _key(namespace: str, origin: dict[str, Any]) -> str:
    return f"{namespace}/{origin.get('id')}"


def _batches(memories: Iterator[NewMemory]) -> Iterator[list[NewMemory]]:
    while batch := list(islice(memories, MAX_BATCH)):
        yield batch
