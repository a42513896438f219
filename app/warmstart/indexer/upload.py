"""Brings the server's memories to what the plan says, and notes in the state what was acknowledged."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, Protocol, TypeVar

from warmstart.client import MemoryClient
from warmstart.errors import Conflict, Duplicate, Migrating, NotFound, ServerUnreachable, WarmstartError
from warmstart.indexer.assemble import SOURCE, Wanted, shape
from warmstart.indexer.plan import Pair, Plan
from warmstart.indexer.retry import persistently
from warmstart.indexer.state import Row, State, Store
from warmstart.memory import MAX_BATCH, MAX_PAGE, Batch, ListRequest, Memory, MemoryPatch

#: Edits on their way at once; the server writes as many with one sync.
CONCURRENT: Final = 16

T = TypeVar("T")


class Progress(Protocol):
    def __call__(self, phase: str, done: int, total: int) -> None: ...


class Server:
    """The memory, for one run. `find` gives a new client where the old one's server went away."""

    def __init__(
        self, find: Callable[[], Awaitable[MemoryClient]], on_pause: Callable[[float, WarmstartError], None]
    ) -> None:
        self._find = find
        self._on_pause = on_pause
        self._client: MemoryClient | None = None

    async def __call__(self, request: Callable[[MemoryClient], Awaitable[T]]) -> T:
        async def once() -> T:
            if self._client is None:
                self._client = await self._find()
            return await request(self._client)

        return await persistently(once, on_pause=self._on_pause, on_unreachable=self.close)

    async def open(self) -> None:
        """Finds the server, and starts it where none runs."""
        await self(lambda client: client.namespaces())

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


async def agrees(server: Server, state: State) -> bool:
    """Whether the server has what the state says: as many memories, and the newest is a known one."""
    found = await server(lambda client: client.namespaces())
    if found.degraded:
        raise _migrating()
    count = next((n.active for n in found.namespaces if n.name == state.namespace), 0)
    if count != len(state.rows) + state.foreign:
        return False
    newest = ListRequest(namespace=state.namespace, source=SOURCE, limit=1)
    page = await server(lambda client: client.list(newest))
    return page.memories[0].id in state.rows if page.memories else not state.rows


async def rebuilt(server: Server, namespace: str, identity: str, *, take_over: bool) -> State:
    """The state as the server's rows tell it. Raises Conflict where they are another repository's."""
    state = State(namespace)
    request = ListRequest(namespace=namespace, limit=MAX_PAGE)
    while True:
        asked = request
        page = await server(lambda client, asked=asked: client.list(asked))  # type: ignore[misc]
        if page.degraded:
            raise _migrating()
        for memory in page.memories:
            row = _row(memory)
            if row is None:
                state.foreign += 1
                continue
            if memory.metadata.get("repository") != identity and not take_over:
                raise _another_repository(namespace)
            state.rows[memory.id] = row
        if not page.next_cursor:
            return state
        request = request.model_copy(update={"cursor": page.next_cursor})


def _row(memory: Memory) -> Row | None:
    path, name = memory.metadata.get("path"), memory.metadata.get("name")
    if memory.source != SOURCE or not isinstance(path, str) or not isinstance(name, str):
        return None
    return Row(path, name, memory.content_hash, shape(memory.content, path), 0)


def _migrating() -> Migrating:
    return Migrating(
        "a migration runs on the server, and not all memories are back: run this again when it is over",
        retry_after=60,
    )


def _another_repository(namespace: str) -> Conflict:
    return Conflict(
        f"{namespace} holds the index of another repository of this name: give this one its own with "
        f"--namespace NAME; or, where it is this one from another place, take it over with --namespace {namespace}"
    )


class Upload:
    """`hashes` are those of the files that were looked at; a file's is noted when nothing of it is on its way."""

    def __init__(
        self, server: Server, store: Store, state: State, plan: Plan, hashes: Mapping[str, str], progress: Progress
    ) -> None:
        self._server = server
        self._store = store
        self._state = state
        self._plan = plan
        self._hashes = hashes
        self._progress = progress
        self._done = 0
        #: path → how much of it is on its way.
        self._open: Counter[str] = Counter()

    async def run(self) -> None:
        """What was acknowledged is in the state, also on an error."""
        plan = self._plan
        for pair in [*plan.changed, *plan.renumbered]:
            self._open[pair.wanted.path] += 1
        for wanted in plan.new:
            self._open[wanted.path] += 1
        for _, row in plan.gone:
            self._open[row.path] += 1
        for pair in plan.kept:
            self._note(pair.memory_id, pair.wanted)
        for path in self._hashes:
            self._seal(path)
        try:
            await self._each(plan.changed, self._change)
            await self._each(plan.renumbered, self._renumber)
            await self._each(plan.gone, self._remove)
            for at in range(0, len(plan.new), MAX_BATCH):
                await self._create(plan.new[at : at + MAX_BATCH])
        finally:
            self._store.save(self._state)

    async def _each(self, items: Sequence[T], work: Callable[[T], Awaitable[None]]) -> None:
        for at in range(0, len(items), CONCURRENT):
            some = items[at : at + CONCURRENT]
            outcomes = await asyncio.gather(*(work(item) for item in some), return_exceptions=True)
            for outcome in outcomes:
                if isinstance(outcome, BaseException):
                    raise outcome
            self._advance(len(some))

    async def _change(self, pair: Pair) -> None:
        memory_id, _, wanted = pair
        try:
            await self._server(lambda client: client.update(memory_id, wanted.patch()))
        except Duplicate as error:
            # saved meanwhile by somebody else: that one is it
            self._acknowledge(str(error.extra.get("id", "")) or memory_id, wanted)
            await self._delete(memory_id)
        except (NotFound, Conflict):
            await self._replace(memory_id, wanted)
        else:
            self._acknowledge(memory_id, wanted)

    async def _renumber(self, pair: Pair) -> None:
        memory_id, _, wanted = pair
        try:
            await self._server(lambda client: client.update(memory_id, MemoryPatch(metadata=wanted.memory.metadata)))
        except (NotFound, Conflict):
            await self._replace(memory_id, wanted)
        else:
            self._acknowledge(memory_id, wanted)

    async def _replace(self, memory_id: str, wanted: Wanted) -> None:
        """Somebody deleted the memory of a symbol that is there."""
        self._state.rows.pop(memory_id, None)
        result = await self._server(lambda client: client.save_batch(Batch(memories=[wanted.memory])))
        self._acknowledge(result.results[0].id, wanted)

    async def _remove(self, gone: tuple[str, Row]) -> None:
        memory_id, row = gone
        await self._delete(memory_id)
        self._open[row.path] -= 1
        self._seal(row.path)

    async def _delete(self, memory_id: str) -> None:
        with suppress(NotFound):
            await self._server(lambda client: client.delete(memory_id))
        self._state.rows.pop(memory_id, None)

    async def _create(self, some: Sequence[Wanted]) -> None:
        batch = Batch(memories=[wanted.memory for wanted in some])
        result = await self._server(lambda client: client.save_batch(batch))
        if len(result.results) != len(some):
            raise ServerUnreachable(
                "the server answered a batch with another number of results: is it of this version?"
            )
        for item, wanted in zip(result.results, some, strict=True):
            self._acknowledge(item.id, wanted)
        self._advance(len(some))

    def _advance(self, count: int) -> None:
        self._done += count
        self._store.save_when_due(self._state)
        self._progress("upload", self._done, self._plan.steps())

    def _note(self, memory_id: str, wanted: Wanted) -> None:
        row = Row(wanted.path, wanted.name, wanted.content_hash, wanted.shape, wanted.tokens)
        self._state.rows[memory_id] = row

    def _acknowledge(self, memory_id: str, wanted: Wanted) -> None:
        self._note(memory_id, wanted)
        self._open[wanted.path] -= 1
        self._seal(wanted.path)

    def _seal(self, path: str) -> None:
        if not self._open[path] and path in self._state.files and path in self._hashes:
            self._state.files[path].sha256 = self._hashes[path]
