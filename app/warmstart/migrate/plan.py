"""What a migration would do, and whether disk and memory have room for it."""

from __future__ import annotations

import math
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lancedb.table import AsyncTable

from warmstart.allocation import allowed_memory
from warmstart.config import Space
from warmstart.errors import ConfigError, DiskFull
from warmstart.migrate.dump import KEPT, encode

#: Rows whose size in a dump is measured, evenly over the table.
SAMPLE: Final = 500
#: Bytes on the disk of a reloaded table for a byte of its dump: its rows, those rows once more while they
#: are compacted, and its indices. Some 1 was seen; this leaves room.
TABLE_FACTOR: Final = 2.0
#: Vectors as they return are compacted too, so they stand there twice.
VECTOR_FACTOR: Final = 2
VECTOR_NUMBER_BYTES: Final = 4
#: Bytes of memory, and so much more for a byte of the dump: its text index is put together in memory. 20,000 memories
#: took 317 MB, 100,000 with a dump of 202 MB took 454.
MEMORY_BYTES: Final = 290 << 20
MEMORY_FACTOR: Final = 0.85
#: For the writes of all else on the disk meanwhile.
SPARE_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Plan:
    source: Space
    target: Space
    #: `recreate` (dump, drop, recreate, reload), `reset` (the same width: dump, vectors taken out in place),
    #: `resume` (of one that was cut off), or `nothing`.
    action: str
    rows: int
    dump_bytes: int
    table_bytes: int
    vector_bytes: int
    free_bytes: int
    memory_bytes: int
    allowed_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Beside what the table takes now, which is freed only when nobody reads it any more."""
        if self.action == "nothing":
            return 0
        return self.dump_bytes + self.table_bytes + self.vector_bytes + SPARE_BYTES

    @property
    def disk_fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes

    @property
    def memory_fits(self) -> bool:
        return self.action == "nothing" or self.memory_bytes <= self.allowed_bytes

    @property
    def fits(self) -> bool:
        return self.disk_fits and self.memory_fits

    def refuse_too_small(self, directory: Path) -> None:
        """Raises DiskFull, or ConfigError for the memory."""
        self.refuse_too_little_memory()
        if not self.disk_fits:
            raise DiskFull(
                f"the disk of {directory} is too small: {self.needed_bytes:,} bytes are needed, "
                f"{self.free_bytes:,} are free; nothing was changed. Free space, then try again"
            )

    def refuse_too_little_memory(self) -> None:
        """Raises ConfigError: who is killed for it on the way leaves writes refused."""
        if not self.memory_fits:
            raise ConfigError([
                f"some {self.memory_bytes:,} bytes of memory are needed, {self.allowed_bytes:,} are allowed: raise the "
                "limit (of a container API_MEMORY), then run the same command again"
            ])  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"needed_bytes": self.needed_bytes, "fits": self.fits}


def action_of(source: Space, target: Space) -> str:
    if source == target:
        return "nothing"
    return "reset" if source.dim == target.dim else "recreate"


async def plan(lance: AsyncTable, directory: Path, source: Space, target: Space) -> Plan:
    rows = await lance.count_rows()
    dump = math.ceil(await _line_bytes(lance, rows) * rows)
    return Plan(
        source=source,
        target=target,
        action=action_of(source, target),
        rows=rows,
        dump_bytes=dump,
        table_bytes=math.ceil(dump * TABLE_FACTOR),
        vector_bytes=rows * target.dim * VECTOR_NUMBER_BYTES * VECTOR_FACTOR,
        free_bytes=shutil.disk_usage(directory).free,
        memory_bytes=_memory(dump),
        allowed_bytes=allowed_memory(),
    )


def _memory(dump_bytes: int) -> int:
    return MEMORY_BYTES + math.ceil(dump_bytes * MEMORY_FACTOR)


async def _line_bytes(lance: AsyncTable, rows: int) -> float:
    """The mean length of a row's line."""
    if not rows:
        return 0.0
    some = min(rows, SAMPLE)
    sample = await lance.take_offsets([i * rows // some for i in range(some)]).select(KEPT).to_arrow()
    return sum(len(encode(row)) for row in sample.to_pylist()) / some


def plan_rest(directory: Path, source: Space, target: Space, rows: int, dump_bytes: int) -> Plan:
    """Of a migration whose dump is there."""
    return Plan(
        source=source,
        target=target,
        action="resume",
        rows=rows,
        dump_bytes=0,
        table_bytes=math.ceil(dump_bytes * TABLE_FACTOR),
        vector_bytes=rows * target.dim * VECTOR_NUMBER_BYTES * VECTOR_FACTOR,
        free_bytes=shutil.disk_usage(directory).free,
        memory_bytes=_memory(dump_bytes),
        allowed_bytes=allowed_memory(),
    )
