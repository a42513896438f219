"""What a power cut leaves of a table, and the way back to the newest version that is whole.

LanceDB writes data, then a manifest that names it, and syncs neither: after a
power cut the newest manifests, or files they name, may be cut short. A manifest
is moved aside only where a cut is seen in the files themselves, never because of
an error that something else may have caused, and of those that were synced at
most the newest.
"""

from __future__ import annotations

import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import structlog
from lancedb.table import AsyncTable

from warmstart.errors import StoreUnavailable
from warmstart.store.schema import HISTORY, TABLE

log = structlog.get_logger(__name__)

#: What a file ends with once all of it is written.
_ENDINGS: Final = {".manifest": b"LANC", ".lance": b"LANC", ".idx": b"LANC", ".arrow": b"ARROW1"}
_DATA_FILE: Final = re.compile(rb"[0-9a-f]{50}\.lance")
#: More versions than one group of writes, or one compaction, makes between two syncs.
MAX_REPAIRS: Final = 24
_SYNCED: Final = {TABLE: "synced-version", HISTORY: "synced-version-history"}
_SET_ASIDE: Final = "set-aside"


def mark_synced(directory: Path, version: int, table: str = TABLE) -> None:
    """Note that `version` of `table` is on the disk for good. A note that a power cut takes back is only older."""
    # best effort: a full disk must not turn a write that is safe into an error
    with contextlib.suppress(OSError):
        fd = os.open(directory / _SYNCED[table], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, b"%020d" % version, 0)
        finally:
            os.close(fd)


def go_back_to_whole_version(directory: Path, table: str = TABLE) -> list[str]:
    """Move aside the newest manifests that are cut short or name a file that is; the files moved.

    Raises StoreUnavailable, with everything back in its place, where that would lose what was answered.
    """
    moved: list[tuple[Path, Path]] = []
    versions = directory / f"{table}.lance" / "_versions"
    synced = _synced(directory / _SYNCED[table], versions)
    while (manifests := _manifests(versions)) and (damaged := _cut_short(manifests[0])):
        # one version may always go, since a disk may have said it was synced and lied
        answered = bool(moved) and _version(manifests[0]) <= synced
        if len(manifests) < 2 or len(moved) >= MAX_REPAIRS or answered:
            for source, target in reversed(moved):
                target.rename(source)
            raise StoreUnavailable(
                f"the table {table} is damaged: {damaged} is cut short or missing, and to leave it out would lose "
                "memories that were saved; nothing was changed. Restore a backup",
                retry_after=60,
            )
        aside = directory / _SET_ASIDE
        aside.mkdir(exist_ok=True, mode=0o700)
        # numbers of two tables' versions may be the same
        target = _unused(aside / (manifests[0].name if table == TABLE else f"{table}-{manifests[0].name}"))
        manifests[0].rename(target)
        moved.append((manifests[0], target))
    if moved:
        log.error(
            "store.repaired",
            table=table,
            set_aside=[str(target) for _, target in moved],
            meaning="the newest version of the table was cut short and is left out; "
            "what was not yet answered may be missing",
        )
    return [str(target) for _, target in moved]


def has_set_aside(directory: Path) -> bool:
    return (directory / _SET_ASIDE).is_dir() and any((directory / _SET_ASIDE).iterdir())


def set_table_aside(directory: Path, table: str) -> str:
    """Move all of a table that can't be repaired out of the way; where it is now."""
    aside = directory / _SET_ASIDE
    aside.mkdir(exist_ok=True, mode=0o700)
    target = _unused(aside / f"{table}.lance")
    (directory / f"{table}.lance").rename(target)
    (directory / _SYNCED[table]).unlink(missing_ok=True)
    return str(target)


def has_version(directory: Path, table: str = TABLE) -> bool:
    """Whether there is a table; a creation that was killed leaves a directory without any version."""
    return bool(_manifests(directory / f"{table}.lance" / "_versions"))


def has_damaged_index(directory: Path, name: str = TABLE) -> bool:
    """Whether a file of an index that the newest version uses is cut short."""
    table = directory / f"{name}.lance"
    manifests = _manifests(table / "_versions")
    if not manifests:
        return False
    manifest = manifests[0].read_bytes()
    return any(
        not is_whole(path)
        for folder in (table / "_indices").glob("*-*")
        if uuid.UUID(folder.name).bytes in manifest
        for path in folder.iterdir()
    )


async def drop_damaged_indices(lance: AsyncTable) -> None:
    """No row is lost with an index: those of full-text and scalars are made anew, the worker makes the vectors'."""
    for index in await lance.list_indices():
        try:
            await lance.prewarm_index(index.name)
        except Exception as error:
            log.error("store.index.dropped", index=index.name, reason=str(error)[:300])
            await lance.drop_index(index.name)


def is_whole(path: Path) -> bool:
    """Whether the file has its end; of a kind without a mark, whether it has anything."""
    ending = _ENDINGS.get(path.suffix, b"")
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - len(ending)))
        return size > 0 and file.read() == ending


def _manifests(versions: Path) -> list[Path]:
    """Newest first: names count down from the largest number."""
    return sorted(versions.glob("*.manifest")) if versions.is_dir() else []


def _version(manifest: Path) -> int:
    return 2**64 - 1 - int(manifest.stem)


def _synced(note: Path, versions: Path) -> int:
    """The newest version known to be synced; 0 where none is, or the note is of a table that was dropped."""
    try:
        synced = int(note.read_bytes())
    except (OSError, ValueError):
        return 0
    manifests = _manifests(versions)
    return synced if manifests and synced <= _version(manifests[0]) else 0


def _cut_short(manifest: Path) -> Path | None:
    """The manifest, or a file with rows that it names, where that is not whole."""
    if not is_whole(manifest):
        return manifest
    for path in _named(manifest):
        if not path.exists() or not is_whole(path):
            return path
    return None


def _named(manifest: Path) -> Iterator[Path]:
    """The files with rows, and those with deletions, that `manifest` names; files of killed writers are not."""
    table = manifest.parent.parent
    content = manifest.read_bytes()
    for name in sorted(set(_DATA_FILE.findall(content))):
        yield table / "data" / name.decode()
    for path in (table / "_deletions").glob("*-*-*.*"):
        # the name is fragment-version-number, of which a manifest holds the number, as field 3 of a message
        if b"\x18" + _varint(int(path.stem.rsplit("-", 1)[1])) in content:
            yield path


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _unused(path: Path) -> Path:
    """`path`, or with a number behind it: a version's number comes again after it was set aside."""
    candidate, n = path, 1
    while candidate.exists():
        candidate, n = path.with_name(f"{path.name}.{n}"), n + 1
    return candidate
