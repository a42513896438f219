"""`warmstart-vm drill`: the newest backup, restored into a scratch place and looked through; nothing live changes."""

from __future__ import annotations

import argparse
import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from .apps import Apps
from .backup import FORMAT, RESERVE_BYTES
from .database import differences, remove_scratch, scratch
from .repository import Backups, Repository, Snapshot
from .stack import Refused, Stack, VmError
from .task import Progress, ago, only_one, recorded, size, stay_in_background

#: Containers of a drill.
_POSTGRES: Final = "drill-postgres"
_APP: Final = "drill-app"


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "drill", help="restore the newest backup aside, and look whether it is whole", description=__doc__
    )
    parser.add_argument("--repository", default="", metavar="local|offsite|URL", help="default: offsite, if any")
    parser.add_argument("--snapshot", default="", metavar="ID", help="default: the newest")
    parser.add_argument("--json", action="store_true", help="the result as one JSON object in the last line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    stack, progress = Stack.from_environment(), Progress()
    # one that can't run is a failed one, also where it has to wait for another for too long
    progress.begin("lock")
    with recorded(stack.state / "drill.json", progress) as result, only_one(stack, "a drill"):
        stay_in_background()
        progress.begin("settings")
        _drill(stack, Backups.of(stack).named(args.repository), args.snapshot, progress, result)
    if result["ok"]:
        progress.done(f"done: the backup is whole, and {ago(result['age_seconds'])} old")
    if args.json:
        print(json.dumps(result))
    return 0 if result["ok"] else 1


def _drill(stack: Stack, repository: Repository, snapshot: str, progress: Progress, result: dict[str, Any]) -> None:
    apps = Apps.of(stack)
    folder = stack.state / "scratch" / "drill"
    result["repository"] = repository.name
    try:
        progress.begin("snapshot")
        repository = opened(repository)
        fetch(repository, repository.snapshot(snapshot), folder, progress, result)
        _check(apps, folder, progress, result)
    finally:
        apps.remove(_APP)
        remove_scratch(apps, _POSTGRES)
        shutil.rmtree(folder, ignore_errors=True)


def opened(repository: Repository) -> Repository:
    """With the locks of dead processes taken away. Raises VmError where there is none, or it can't be opened."""
    if not repository.exists():
        raise VmError(f"there is no repository at {repository.name}")
    repository.unlock()
    return repository


def fetch(repository: Repository, chosen: Snapshot, folder: Path, progress: Progress, result: dict[str, Any]) -> None:
    """The snapshot into `folder`, which is made anew. Raises VmError."""
    progress.begin("snapshot")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    result["snapshot"] = chosen.id
    needed, free = repository.size_of(chosen.id), shutil.disk_usage(folder).free
    if free < needed + RESERVE_BYTES:
        raise VmError(
            f"{size(free)} are free at {folder}, and {size(needed)} and {size(RESERVE_BYTES)} in reserve are needed"
        )
    repository.restore(chosen.id, folder)
    about = json.loads((folder / "about.json").read_text())
    if about["format"] != FORMAT:
        raise Refused(f"snapshot {chosen.id[:8]} is of format {about['format']}, this program knows {FORMAT}")
    taken_at = datetime.fromisoformat(about["taken_at"])
    result |= {"taken_at": about["taken_at"], "release": about["release"], "bytes": needed}
    result["age_seconds"] = round((datetime.now(UTC) - taken_at).total_seconds())
    progress.done(
        f"snapshot {chosen.id[:8]} of {taken_at:%Y-%m-%d %H:%M:%S} UTC fetched from {repository.name}: {size(needed)}"
    )


def _check(apps: Apps, folder: Path, progress: Progress, result: dict[str, Any]) -> None:
    """Opens what `fetch` laid down as the service would, and compares it with what was written down of it."""
    progress.begin("bookkeeping")
    expected = json.loads((folder / "rows.json").read_text())
    with scratch(apps, _POSTGRES) as (server, network, url):
        rows = server.fill(folder / "database.dump")
        if faults := differences(rows, expected):
            raise VmError(f"other numbers of rows than in the backup: {faults}")
        progress.done(f"bookkeeping: {sum(rows.values())} rows in {len(rows)} tables, as in the backup")
        # this release must be able to go on with it
        progress.begin("migration")
        environment = {"DATABASE_URL": url}
        apps.app(_APP, folder / "data", "database", "migrate", "--json", network=network, environment=environment)
        progress.begin("memories")
        inventory = apps.inventory(
            _APP, folder / "data", against=folder / "inventory.json", network=network, database_url=url
        )
    searched = inventory["search"]
    result |= {
        "rows": inventory["rows"], "tenants": len(inventory["tenants"]), "database_rows": sum(rows.values()),
        "searched": searched["searched"], "found": searched["found"],
    }  # fmt: skip
    progress.done(
        f"memories: {inventory['rows']} of {len(inventory['tenants'])} tenants, hashes as in the backup; "
        f"{result['found']} of {result['searched']} searches found theirs"
    )
