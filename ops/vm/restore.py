"""`warmstart-vm restore`: memories, bookkeeping and secrets from a backup, on this machine or a new one."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from . import secrets
from .apps import USER, Apps
from .database import BEFORE as DATABASE_BEFORE
from .database import Live, differences
from .drill import fetch, opened
from .gate import Signals
from .host import names
from .repository import Backups, Repository, Snapshot
from .rollout import RollOut
from .stack import SLOTS, Refused, Stack, VmError
from .task import Progress, ago, only_one

#: Those that write to what is replaced.
WRITERS: Final = (*SLOTS, "worker")
#: What was there before, beside what takes its place, until the restored is verified.
BEFORE: Final = "before-restore"
MAX_STDIN: Final = 65_536
GIVEN_NAMES: Final = frozenset({"RESTIC_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"})


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser("restore", help="bring a backup back", description=__doc__)
    parser.add_argument("--snapshot", default="", metavar="ID", help="default: the newest that has memories")
    parser.add_argument(
        "--repository", default="", metavar="local|offsite|URL",
        help="default: this machine's own where it has memories, else offsite. With a URL, a JSON object on standard "
        f"input may give {', '.join(sorted(GIVEN_NAMES))}",
    )  # fmt: skip
    parser.add_argument("--replace", default="", metavar="HOST", help="this host's name, where there are memories")
    parser.add_argument("--list", action="store_true", help="say which snapshots there are, and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    stack, progress = Stack.from_environment(), Progress()
    with only_one(stack, "a restore"):
        repository = _repository(stack, args.repository)
        if args.list:
            for one in repository.snapshots():
                rows = "?" if one.rows is None else one.rows
                print(f"{one.id[:8]}  {one.taken_at:%Y-%m-%d %H:%M:%S} UTC  {rows} memories")
            return 0
        chosen = repository.snapshot(args.snapshot, with_memories=True)
        with stack.lock("a restore"):
            Restore(stack, repository, chosen, progress).run(args.replace)
    return 0


def _repository(stack: Stack, wanted: str) -> Repository:
    given = _given() if wanted not in ("", "local", "offsite") else {}
    backups = Backups.of(stack, given)
    if wanted:
        return opened(backups.named(wanted))
    local = backups.local
    if not backups.offsite or (local.exists() and any(s.rows != 0 for s in local.snapshots())):
        return opened(local)
    return opened(backups.offsite)


def _given() -> Mapping[str, str]:
    """What comes by standard input, since a command line is for everybody to read."""
    text = "" if sys.stdin.isatty() else sys.stdin.read(MAX_STDIN)
    if not text.strip():
        return {}
    try:
        found = json.loads(text)
        wrong = not isinstance(found, dict) or set(found) - GIVEN_NAMES
    except ValueError:
        wrong = True
    if wrong:
        raise Refused(f"standard input is no JSON object with some of {', '.join(sorted(GIVEN_NAMES))}")
    return {name: str(value) for name, value in found.items()}


class Restore:
    """One restore, under the stack's lock. Nothing that was there is deleted before the restored is verified."""

    def __init__(self, stack: Stack, repository: Repository, snapshot: Snapshot, progress: Progress) -> None:
        self.stack, self.repository, self.snapshot, self.progress = stack, repository, snapshot, progress
        self.apps = Apps.of(stack)
        self._marker = stack.state / "restore-under-way"
        #: One was killed, and nothing has served since: what is there is of that one, and what it set aside counts.
        self._resumed = self._marker.exists() and not any(c.running for name in WRITERS for c in stack.containers(name))

    def run(self, replace: str) -> None:
        try:
            self._run(replace)
        except (OSError, KeyError, ValueError) as error:
            raise VmError(f"{self.progress.part}: {error!r}") from error
        except VmError as error:
            if not self._marker.exists():
                raise
            raise VmError(
                f"{self.progress.part}: {error}\nNothing that was there before has been deleted: memories in "
                f"{self._aside}, bookkeeping in the database {DATABASE_BEFORE}, secrets in {self.stack.state / BEFORE}"
                ". Run the same restore again when the cause is gone"
            ) from error

    def _run(self, replace: str) -> None:
        self.progress.begin("live data")
        self._make_volume()
        self._refuse_live_data(replace)
        folder, result = self.apps.volume.parent / "restore", dict[str, Any]()
        try:
            fetch(self.repository, self.snapshot, folder, self.progress, result)
            # before anything is stopped: a backup that is not whole must not take the place of what runs
            self.progress.begin("look at the backup")
            inventory = self.apps.inventory("restore-look", folder / "data", against=folder / "inventory.json")
            self.progress.done(f"it has {inventory['rows']} memories of {len(inventory['tenants'])} tenants, all whole")
            if not self._resumed:
                self._clear()
            self._marker.touch()
            self._stop_writers()
            self._put_secrets(folder / "etc")
            self._start(folder)
            self._verify(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._serve()
        Live(self.apps).drop_before()
        self._clear()
        self.progress.done(f"restored: {inventory['rows']} memories of {len(inventory['tenants'])} tenants serve again")
        print(
            f"Lost: what was saved after {result['taken_at'][:19].replace('T', ' ')} UTC, the time of the backup, "
            f"{ago(result['age_seconds'])} ago. API keys that were revoked since then work again: `make keys` lists "
            "them."
        )

    # -- before

    def _make_volume(self) -> None:
        labels = {"com.docker.compose.project": self.stack.project, "com.docker.compose.volume": "data"}
        words = [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]
        # one that is there stays as it is
        self.stack.run(["docker", "volume", "create", *words, f"{self.stack.project}_data"])

    def _refuse_live_data(self, replace: str) -> None:
        if replace and replace not in (known := names(self.stack)):
            raise Refused(f"--replace names {replace}, and this is {', '.join(sorted(known))}: nothing was done")
        if replace or self._resumed:
            return
        if found := self._live_data():
            raise Refused(f"there are {found} on this host. To replace them with the backup: --replace HOST")

    def _live_data(self) -> str:
        """What would be lost, in words; empty where nothing would."""
        store = self.apps.volume / self.apps.store_path
        if not store.is_dir() or not any(store.glob("*.lance/_versions/*")):
            return ""
        try:
            rows = self.apps.inventory("restore-look", self.apps.volume)["rows"]
        except VmError:
            return "memories that can't be read, or not all of them,"
        return f"{rows} memories" if rows else ""

    # -- in the place of what was there

    def _stop_writers(self) -> None:
        self.progress.begin("stop")
        for container in [c for name in WRITERS for c in self.stack.containers(name)]:
            self.stack.run(["docker", "stop", container.id])
            self.stack.run(["docker", "rm", "--volumes", container.id])
        self.progress.done("api and worker stopped")

    def _put_secrets(self, restored: Path) -> None:
        """Secrets of the machine that was backed up, in the place of those made for this one.

        The canary's key is known to the restored bookkeeping, and no other; the rest goes with it, so that whoever
        kept one of them elsewhere still has the right one.
        """
        self.progress.begin("secrets")
        aside = self.stack.state / BEFORE
        if not aside.exists():
            aside.mkdir(mode=0o700)
            for path in self.stack.etc.iterdir():
                if path.is_file():
                    shutil.copy2(path, aside / path.name)
        path = self.stack.etc / secrets.FILE
        values = secrets.read(path)
        # those that an operator gave are kept elsewhere, so what this machine's deploy brought is the newer one
        kept = {secrets.DATABASE_URL, *secrets.given_names(self.stack)}
        merged = values | {n: v for n, v in secrets.read(restored / secrets.FILE).items() if n not in kept}
        if self.apps.own_postgres:
            merged[secrets.DATABASE_URL] = secrets.OWN_DATABASE.format(password=merged["POSTGRES_PASSWORD"])
        secrets.write(path, secrets.render(merged))
        if (key := restored / "canary.key").is_file():
            secrets.write(self.stack.etc / key.name, key.read_text())
        self._adopt_password()
        self.apps = Apps.of(self.stack)  # it may have read the old ones
        changed = secrets.changed(values, merged)
        self.progress.done(f"secrets of the backup: {', '.join(changed) or 'the same as here'}")

    def _adopt_password(self) -> None:
        """The password that opened the backup is this machine's from now on; its own repository knows both."""
        path, password = self.stack.etc / "backup.env", self.repository.secrets["RESTIC_PASSWORD"]
        values = secrets.read(path)
        if values.get("RESTIC_PASSWORD") == password:
            return
        local = Backups.of(self.stack).local
        if local.exists():
            local.also_open_with(password)
        secrets.write(path, secrets.render(values | {"RESTIC_PASSWORD": password}))

    def _start(self, folder: Path) -> None:
        """Databases with the restored content; the service itself comes later."""
        from .smoke import run_smoke

        self.progress.begin("databases")
        self._roll_out = RollOut(
            self.stack, self.apps.release, Signals(), lambda stack, release, base: run_smoke(stack, release, base=base)
        )
        self._roll_out.services()
        self._restore_database(folder)
        self.progress.begin("memories")
        self._swap_memories(folder / "data")
        self.progress.done("memories in their place")

    def _restore_database(self, folder: Path) -> None:
        expected = json.loads((folder / "rows.json").read_text())
        rows = Live(self.apps).restore(folder / "database.dump", resumed=self._resumed)
        if rows is None:
            self.progress.done("bookkeeping: its server is not this machine and has its data, so it is left as it is")
            return
        if faults := differences(rows, expected):
            raise VmError(f"other numbers of rows than in the backup: {faults}")
        self.progress.done(f"bookkeeping: {sum(rows.values())} rows in {len(rows)} tables, as in the backup")

    @property
    def _aside(self) -> Path:
        return self.apps.volume.parent / BEFORE

    def _swap_memories(self, restored: Path) -> None:
        volume, moving = self.apps.volume, self._aside.with_name(f"{BEFORE}.new")
        if self._aside.exists():  # of a restore that was killed: what is in the volume is that one's
            _empty(volume)
        else:
            moving.mkdir(mode=0o700, exist_ok=True)
            for path in volume.iterdir():
                path.rename(moving / path.name)
            moving.rename(self._aside)
        for path in restored.iterdir():
            path.rename(volume / path.name)
        os.chown(volume, USER, USER)
        volume.chmod(0o700)

    # -- and is it whole

    def _verify(self, folder: Path) -> None:
        self.progress.begin("migration")
        self._roll_out.migrate()
        self.progress.begin("verification")
        found = self.apps.inventory(
            "restore-verify", self.apps.volume, against=folder / "inventory.json",
            network=self.apps.database_network, database_url=self.apps.database_url,
        )  # fmt: skip
        self.progress.done(f"verified in its place: {found['rows']} memories, counts and hashes as in the backup")

    def _serve(self) -> None:
        self.progress.begin("start")
        self._roll_out.rollout()

    def _clear(self) -> None:
        """What was set aside, by this restore or by one that was killed when it served already, is of no more use."""
        for folder in (self._aside, self._aside.with_name(f"{BEFORE}.new"), self.stack.state / BEFORE):
            shutil.rmtree(folder, ignore_errors=True)
        self._marker.unlink(missing_ok=True)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
