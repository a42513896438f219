"""`warmstart-vm backup`: memories, bookkeeping and secrets into restic, on this machine and elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from .apps import Apps
from .backup_settings import MAX_STDIN, Wanted
from .database import Live, rows_of_dump
from .datacopy import copy_data
from .repository import Backups, Repository
from .stack import Stack, VmError
from .task import Progress, last_success, only_one, recorded, size, stay_in_background

#: What a snapshot has at its top. `about.json`: when and of what; `rows.json`: rows by table of the dump.
CONTENT: Final = ("about.json", "data", "database.dump", "etc", "inventory.json", "rows.json")
FORMAT: Final = 1
#: A deploy under way may change the containers meanwhile, so it is waited for.
STACK_TIMEOUT_S: Final = 900.0
#: Left free whatever a backup takes: a full disk would stop the service itself.
RESERVE_BYTES: Final = 512 << 20


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "backup", help="a snapshot of memories, bookkeeping and secrets", description=__doc__
    )
    parser.add_argument("--configure", action="store_true", help="what backups go by, from standard input; as JSON")
    parser.add_argument("--pending", action="store_true", help="say what --configure would do")
    parser.add_argument(
        "--afresh", action="store_true",
        help="into a new repository on this machine; the one that is there is set aside, as one that is damaged",
    )  # fmt: skip
    parser.add_argument(
        "--forget-earlier", action="store_true",
        help="then remove every earlier snapshot and its data from all repositories, as when a tenant was deleted",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="the result as one JSON object in the last line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    if args.configure or args.pending:
        wanted = Wanted.of(stack, sys.stdin.read(MAX_STDIN))
        print(json.dumps(wanted.apply()) if args.configure else "\n".join(wanted.pending()))
        return 0
    with only_one(stack, "a backup"):
        stay_in_background()
        result = attempt(stack, Progress(), afresh=args.afresh, forget_earlier=args.forget_earlier)
    if args.json:
        print(json.dumps(result))
    return 0 if result["ok"] else 1


def attempt(stack: Stack, progress: Progress, *, afresh: bool = False, forget_earlier: bool = False) -> dict[str, Any]:
    """One backup, and its record in backup.json. A part that failed makes it a failed one."""
    progress.begin("settings")
    with recorded(stack.state / "backup.json", progress) as result:
        if afresh:
            _set_aside(Backups.of(stack).local, progress)
        _back_up(stack, progress, result)
        if forget_earlier:
            _forget_earlier(Backups.of(stack), progress)
    if result["ok"]:
        progress.done(f"done: snapshot {result['snapshot'][:8]}")
    return result


def _set_aside(repository: Repository, progress: Progress) -> None:
    progress.begin("set aside")
    place = Path(repository.url)
    if not place.exists():
        return
    aside = place.with_name(f"{place.name}.{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    place.rename(aside)
    progress.done(f"set aside: {aside}")


def _forget_earlier(backups: Backups, progress: Progress) -> None:
    """Each repository keeps its newest snapshot, and no data but that one's."""
    progress.begin("earlier snapshots")
    for repository in filter(None, (backups.local, backups.offsite)):
        gone = repository.keep_newest_alone()
        left = repository.snapshots()
        progress.done(
            f"{repository.name}: {gone} earlier snapshots removed with their data, left is "
            + ", ".join(f"{one.id[:8]} of {one.taken_at:%Y-%m-%d %H:%M:%S} UTC" for one in left)
        )


def _back_up(stack: Stack, progress: Progress, result: dict[str, Any]) -> None:
    backups, apps = Backups.of(stack), Apps.of(stack)
    # beside the volume's files, for links don't reach over to another file system; no container sees it
    staging = apps.volume.parent / "backup"
    with _fresh(staging):
        progress.begin("disk")
        _check_disk(apps, backups.local, _last_taken(stack))
        _stage(apps, staging, progress, result)
        progress.begin("snapshot")
        _prepare(backups.local, None)
        summary = backups.local.backup(staging, CONTENT, result["rows"])
        result["snapshot"] = backups.local.snapshot(summary["snapshot_id"]).id
        result |= {"bytes": summary["total_bytes_processed"], "added_bytes": summary["data_added"]}
        new, whole = size(result["added_bytes"]), size(result["bytes"])
        progress.done(f"snapshot {result['snapshot'][:8]}: {whole}, {new} of it new")
    if backups.offsite:
        progress.begin("offsite copy")
        result["offsite"] = {"ok": False, "repository": backups.offsite.name}
        _prepare(backups.offsite, backups.local)
        backups.offsite.copy_from(backups.local, result["snapshot"])
        result["offsite"]["ok"] = True
        progress.done(f"copied to {backups.offsite.name}")
    progress.begin("old snapshots")
    for repository in filter(None, (backups.local, backups.offsite)):
        repository.prune(backups.policy)
    progress.done("snapshots past their time removed")


def _stage(apps: Apps, staging: Path, progress: Progress, result: dict[str, Any]) -> None:
    """All that the snapshot is made of."""
    stack = apps.stack
    # links cost milliseconds and the bookkeeping is small: a deploy that waits won't wait for long
    with stack.lock("a backup", STACK_TIMEOUT_S):
        progress.begin("memories")
        taken_at = datetime.now(UTC)
        copied = copy_data(apps.volume, apps.volume / apps.store_path, staging / "data")
        result |= {"taken_at": taken_at.isoformat(), "files": copied.files, "held_ms": round(copied.held_s * 1000)}
        progress.done(f"memories: {copied.files} files, {size(copied.bytes)}; writers waited {result['held_ms']} ms")
        # after the memories: a tenant that they name is in it
        progress.begin("bookkeeping")
        Live(apps).dump(staging / "database.dump")
        _copy_settings(stack.etc, staging / "etc")
    rows = rows_of_dump(apps, staging / "database.dump")
    _write(staging / "rows.json", rows)
    progress.done(f"bookkeeping: {sum(rows.values())} rows in {len(rows)} tables")
    progress.begin("inventory")
    inventory = apps.inventory("backup-inventory", staging / "data")
    _write(staging / "inventory.json", inventory)
    about = {
        "format": FORMAT, "taken_at": result["taken_at"], "host": socket.gethostname(),
        "release": apps.release.id, "commit": apps.release.manifest.get("commit", ""),
    }  # fmt: skip
    _write(staging / "about.json", about)
    result |= {"rows": inventory["rows"], "tenants": len(inventory["tenants"]), "database_rows": sum(rows.values())}
    progress.done(f"inventory: {inventory['rows']} memories of {len(inventory['tenants'])} tenants, all of them whole")


@contextlib.contextmanager
def _fresh(staging: Path) -> Any:
    """An empty folder, whatever a killed backup left there."""
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(mode=0o700)
    try:
        yield
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _last_taken(stack: Stack) -> datetime | None:
    found = last_success(stack.state / "backup.json")
    return datetime.fromisoformat(found["taken_at"]) if found else None


def _check_disk(apps: Apps, repository: Repository, since: datetime | None) -> None:
    """Raises VmError where the repository could fill the disk. What is older than `since` is in it already."""
    if not repository.is_local:
        return
    place = Path(repository.url)
    while not place.exists():
        place = place.parent
    after = since.timestamp() if since and (Path(repository.url) / "config").is_file() else 0.0
    new = 0
    for folder, _, names in os.walk(apps.volume):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(folder, name))
                new += status.st_size if status.st_mtime >= after else 0
    free = shutil.disk_usage(place).free
    if free < new + RESERVE_BYTES:
        raise VmError(
            f"{size(free)} are free at {place}, and up to {size(new)} of new data and {size(RESERVE_BYTES)} in reserve "
            "are needed: free some space, or keep fewer snapshots (`backup` in the inventory)"
        )


def _copy_settings(source: Path, target: Path) -> None:
    target.mkdir(mode=0o700)
    for path in source.iterdir():
        if path.is_file() and not path.is_symlink():
            shutil.copy2(path, target / path.name)


def _prepare(repository: Repository, like: Repository | None) -> None:
    if not repository.exists():
        if repository.is_local:
            Path(repository.url).mkdir(parents=True, exist_ok=True, mode=0o700)
        repository.create(like)
    repository.unlock()


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content) + "\n")
