"""One migration from its lock to its end, or from where it was cut off."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import structlog

from warmstart.config import Settings, Space
from warmstart.errors import ConfigError, Conflict, DiskFull, StoreUnavailable, WarmstartError
from warmstart.migrate import dump, rebuild
from warmstart.migrate.dump import Manifest
from warmstart.migrate.plan import Plan, action_of, plan, plan_rest
from warmstart.store import marker
from warmstart.store import predicates as where
from warmstart.store.bookkeeping import Bookkeeping
from warmstart.store.marker import Migration, Step
from warmstart.store.reads import Inspector
from warmstart.store.repair import has_version
from warmstart.store.table import Table, local_directory, open_table, translated

log = structlog.get_logger(__name__)

#: The step, what of it is done, and how much it is in all.
Progress = Callable[[str, int, int], None]
#: Postgres, where it can be reached; its own faults are no fault of the migration.
Books = Callable[[], AbstractAsyncContextManager[Bookkeeping]]
Outcome = Literal["migrated", "rolled-back", "nothing"]
#: The table is made anew from the dump once more where its rows are not those of the dump.
_TRIES: Final = 2


@dataclass(frozen=True, slots=True)
class Result:
    outcome: Outcome
    source: Space
    target: Space
    rows: int
    #: Rows that wait for their vector.
    queued: int = 0
    #: The dump's folder, which stays.
    dump: str | None = None
    #: A migration that was cut off was taken up.
    resumed: bool = False
    #: Status rows set back in Postgres; None: left to the worker.
    statuses: int | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Migrator:
    def __init__(self, settings: Settings, books: Books, progress: Progress) -> None:
        self._settings = settings
        self._books = books
        self._progress = progress
        directory = local_directory(settings.lancedb)
        if directory is None:
            raise ConfigError(
                [f"LANCEDB_URI {settings.lancedb!r}: only the store of a local directory can be migrated"]
            )
        self._directory: Path = directory
        self._began = time.monotonic()

    # -- what is asked for

    async def plan(self, to: int) -> Plan:
        """What `migrate` would do; changes nothing."""
        target = self._wanted(to)
        if not has_version(self._directory) and marker.standing(self._directory) is None:
            return Plan(target, target, "nothing", 0, 0, 0, 0, 0, 0, 0)
        if standing := self._standing(target):
            manifest = dump.manifest_of(self._directory / standing.dump)
            return plan_rest(self._directory, standing.source, target, manifest.rows, manifest.bytes)
        table = await self._open()
        return await plan(table.lance, self._directory, table.space, target)

    async def migrate(self, to: int) -> Result:
        """To the configured space, `to` wide. Raises ConfigError, Conflict, DiskFull or StoreUnavailable."""
        target = self._wanted(to)
        if not has_version(self._directory) and marker.standing(self._directory) is None:
            return await self._nothing()  # the first start makes the table as configured
        with marker.only_migrator(self._directory):
            if standing := self._standing(target):
                return await self._resume(standing)
            return await self._begin(target, rollback=False)

    async def rollback(self) -> Result:
        """Back to where the migration that was cut off, or else the last one, came from.

        Of one that had ended the rows are dumped anew: what was written since is kept.
        """
        with marker.only_migrator(self._directory):
            standing, last = marker.standing(self._directory), marker.last(self._directory)
            if standing is None:
                if last is None or last.rollback:
                    return await self._nothing()
                return await self._begin(last.source, rollback=True)
            if not standing.rollback:
                if await self._is_untouched(standing):
                    marker.withdraw(self._directory)
                    return Result(
                        "rolled-back", standing.source, standing.source, standing.rows, dump=self._place(standing)
                    )
                standing = replace(
                    standing,
                    source=standing.target,
                    target=standing.source,
                    rollback=True,
                    step=_first_step(standing.source, standing.target),
                )
                self._put(standing)
            return await self._resume(standing)

    def _wanted(self, to: int) -> Space:
        space = self._settings.space
        if to != space.dim:
            raise ConfigError([
                f"--to {to}, but EMBEDDING_DIM is {space.dim}: set EMBEDDING_DIM={to}, and EMBED_MODEL, EMBED_REVISION "
                f"and OPENAI_BASE_URL to a model that is {to} wide, for this command as for the server and the worker"
            ])  # fmt: skip
        return space

    def _standing(self, target: Space) -> Migration | None:
        """The marker, where it is of a migration to `target`. Raises Conflict."""
        standing = marker.standing(self._directory)
        if standing is None or standing.target == target:
            return standing
        under_way = f"to {standing.target.model}, {standing.target.dim} wide, is under way"
        if standing.rollback:
            raise Conflict(f"a rollback {under_way}: finish it with `warmstart migrate dimension --rollback` first")
        raise Conflict(
            f"a migration {under_way}: finish it with its own settings and --to {standing.target.dim}, "
            "or go back with --rollback"
        )

    # -- from the beginning to the marker

    async def _begin(self, target: Space, *, rollback: bool) -> Result:
        table = await self._open()
        if table.space == target:
            return await self._nothing()
        (await plan(table.lance, self._directory, table.space, target)).refuse_too_small(self._directory)
        # who wrote when the migration's lock was taken is done now, and nobody writes any more
        async with table.lock.hold():
            pass
        migration, manifest = await self._dump(table, target, rollback=rollback)
        self._put(migration)
        return await self._run(migration, manifest, resumed=False)

    async def _dump(self, table: Table, target: Space, *, rollback: bool) -> tuple[Migration, Manifest]:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        dumps = self._directory / marker.DUMPS
        dump.remove_unfinished(dumps)
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        folder = dumps / f"{stamp}-{table.space.dim}-to-{target.dim}"
        with translated("dump"):
            await table.lance.checkout_latest()  # type: ignore[no-untyped-call]
            manifest = await dump.write(table.lance, folder, at, lambda *done: self._progress("dump", *done))
        return Migration(
            step=_first_step(table.space, target),
            source=table.space,
            target=target,
            dump=str(folder.relative_to(self._directory)),
            rows=manifest.rows,
            rollback=rollback,
            started_at=at,
        ), manifest

    # -- from the marker to the end

    async def _resume(self, migration: Migration) -> Result:
        folder = self._directory / migration.dump
        manifest = dump.manifest_of(folder)
        dump.check(folder, manifest)
        rest = plan_rest(self._directory, migration.source, migration.target, manifest.rows, manifest.bytes)
        rest.refuse_too_little_memory()
        return await self._run(migration, manifest, resumed=True)

    async def _run(self, migration: Migration, manifest: Manifest, *, resumed: bool) -> Result:
        try:
            return await self._finish(migration, manifest, resumed=resumed)
        except DiskFull as error:
            raise DiskFull(
                f"the disk is full, and the migration has not ended; all memories are in {self._place(migration)}: "
                "free space, then run the same command again"
            ) from error

    async def _finish(self, migration: Migration, manifest: Manifest, *, resumed: bool) -> Result:
        for _ in range(_TRIES):
            migration, table = await self._rebuild(migration, manifest)
            statuses = await self._reset_statuses()
            migration = self._step(migration, "index")
            self._progress("index", 0, 1)
            await rebuild.index(table)
            self._progress("index", 1, 1)
            migration = self._step(migration, "verify")
            if await self._is_right(table, manifest):
                marker.end(self._directory, migration)
                break
            log.error("migration.rows.differ", dump=migration.dump)
            migration = self._step(migration, "recreate")
            await rebuild.recreate(self._directory, migration.target)
        else:
            raise StoreUnavailable(
                f"the rows in the table are not those of the dump {self._place(migration)}, which is whole: "
                "something else writes to the table. Stop it, then run the same command again",
                retry_after=60,
            )
        return Result(
            outcome="rolled-back" if migration.rollback else "migrated",
            source=migration.source,
            target=migration.target,
            rows=migration.rows,
            queued=await _queued(table),
            dump=self._place(migration),
            resumed=resumed,
            statuses=statuses,
            seconds=round(time.monotonic() - self._began, 3),
        )

    async def _rebuild(self, migration: Migration, manifest: Manifest) -> tuple[Migration, Table]:
        """The table with all rows and no vectors, whatever of that was done before."""
        if migration.step == "reset":
            table = await self._open()
            await self._refuse_changed(table, migration, manifest)
            self._progress("reset", 0, migration.rows)
            await rebuild.reset(table, migration.target)
            self._progress("reset", migration.rows, migration.rows)
            return migration, await self._open()
        if migration.step == "recreate":
            self._progress("recreate", 0, 1)
            if not has_version(self._directory):
                await rebuild.recreate(self._directory, migration.target)
            elif (table := await self._open()).space != migration.target:
                await self._refuse_changed(table, migration, manifest)
                await rebuild.recreate(self._directory, migration.target)
            migration = self._step(migration, "reload")
        table = await self._open()
        if migration.step == "reload":
            folder = self._directory / migration.dump
            await rebuild.reload(table, folder, migration.rows, lambda *done: self._progress("reload", *done))
        return migration, table

    async def _refuse_changed(self, table: Table, migration: Migration, manifest: Manifest) -> None:
        """Where somebody who does not know of markers, an older release, wrote behind the dump."""
        if migration.rollback or table.space != migration.source or await table.lance.version() == manifest.version:
            return
        if not await rebuild.is_whole(table, manifest, lambda *done: self._progress("compare", *done)):
            marker.withdraw(self._directory)
            raise StoreUnavailable(
                "something wrote to the table since it was dumped, and nothing was changed: "
                "stop what is of an older version, then run the same command again",
                retry_after=60,
            )

    async def _is_right(self, table: Table, manifest: Manifest) -> bool:
        whole = await rebuild.is_whole(table, manifest, lambda *done: self._progress("verify", *done))
        return whole and await rebuild.is_queued(table)

    async def _is_untouched(self, migration: Migration) -> bool:
        return has_version(self._directory) and (await self._open()).space == migration.source

    async def _reset_statuses(self) -> int | None:
        """How many status rows were set back; None where Postgres can't be had: the worker does it later."""
        try:
            async with self._books() as books:
                done = 0
                while more := await books.reset_statuses():
                    done += more
                return done
        except WarmstartError as error:
            log.warning("migration.statuses.later", reason=str(error)[:300])
            return None

    async def _nothing(self) -> Result:
        if not has_version(self._directory):
            return Result("nothing", self._settings.space, self._settings.space, 0)
        table = await self._open()
        return Result("nothing", table.space, table.space, await table.lance.count_rows(), await _queued(table))

    def _step(self, migration: Migration, step: Step) -> Migration:
        moved = replace(migration, step=step)
        self._put(moved)
        return moved

    def _put(self, migration: Migration) -> None:
        with translated("keep the state of the migration"):
            marker.put(self._directory, migration)

    async def _open(self) -> Table:
        return await open_table(str(self._directory), self._settings.space)

    def _place(self, migration: Migration) -> str:
        return str(self._directory / migration.dump)


def _first_step(source: Space, target: Space) -> Step:
    return "reset" if action_of(source, target) == "reset" else "recreate"


async def _queued(table: Table) -> int:
    return await Inspector(table).count(where.equals("embedding_status", "queued"), where.active())
