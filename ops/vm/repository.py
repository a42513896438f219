"""The restic repositories of this machine: what backup.env says of them, and calls of restic."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from .children import run_child
from .secrets import read
from .stack import Refused, Stack, VmError

#: On each snapshot of ours, whatever else is in the repository.
TAG: Final = "warmstart"
#: And beside it how many memories it has, so that who chooses one need not fetch it.
ROWS_TAG: Final = "rows="
#: How long one call of restic may take: a first upload over a thin line is the longest.
RESTIC_TIMEOUT_S: Final = 12 * 3600.0
#: Two days keep every snapshot: the last good one must outlive those taken after a mishap on the same day.
KEEP_WITHIN: Final = "2d"


@dataclass(frozen=True)
class Snapshot:
    id: str
    taken_at: datetime
    #: memories in it; None where its tag does not say
    rows: int | None = None


@dataclass(frozen=True)
class Repository:
    """`url` is a directory, sftp:user@host:/path, or s3:https://host/bucket."""

    url: str
    #: RESTIC_PASSWORD, and what its place needs
    secrets: Mapping[str, str] = field(repr=False)
    #: for an sftp place: its key, and the hosts' keys seen so far
    ssh_folder: Path
    cache: Path

    @property
    def is_local(self) -> bool:
        return self.url.startswith("/")

    @property
    def name(self) -> str:
        """Without what an operator may have put into the URL."""
        return re.sub(r"//[^/@]*@", "//", self.url)

    def run(self, *words: str, cwd: Path | None = None, source: Repository | None = None, text: str = "") -> str:
        """Standard output of restic; raises VmError with its last words. `source`: the repository to copy from."""
        environment = {**self.secrets, "RESTIC_REPOSITORY": self.url}
        environment |= {"RESTIC_CACHE_DIR": str(self.cache), "RESTIC_PROGRESS_FPS": "0.02"}
        if source:
            environment |= {
                "RESTIC_FROM_REPOSITORY": source.url,
                "RESTIC_FROM_PASSWORD": source.secrets["RESTIC_PASSWORD"],
            }
        command = ["restic", *self._options(), *words]
        name = f"restic {words[0]} ({self.name})"
        return run_child(command, name, environment, cwd=cwd, text=text, timeout_s=RESTIC_TIMEOUT_S)

    def _options(self) -> list[str]:
        if self.is_local:
            return ["--no-cache"]
        if not self.url.startswith("sftp:"):
            return []
        host, port = _sftp_host(self.url)
        key, known = self.ssh_folder / "offsite.key", self.ssh_folder / "offsite.known_hosts"
        ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=30", "-o", "StrictHostKeyChecking=accept-new"]
        ssh += ["-o", f"UserKnownHostsFile={known}", *(["-i", str(key)] if key.exists() else []), "-p", port]
        return ["-o", "sftp.command=" + " ".join([*ssh, host, "-s", "sftp"])]

    # -- what is done with it

    def exists(self) -> bool:
        """Raises VmError where it is there and can't be opened, such as with another password."""
        if self.is_local:
            return (Path(self.url) / "config").is_file()
        try:
            self.run("cat", "config")
        except VmError as error:
            if re.search(r"does not exist|Is there a repository|no such file|NoSuchKey|404", str(error), re.IGNORECASE):
                return False
            raise
        return True

    def create(self, like: Repository | None = None) -> None:
        """`like`: cut files as that one does, so that a copy from it finds what is there already."""
        if like:
            self.run("init", "--copy-chunker-params", source=like)
        else:
            self.run("init")

    def unlock(self) -> None:
        """Locks of processes that are no more; a lock that is alive stays."""
        self.run("unlock")

    def snapshots(self) -> list[Snapshot]:
        """Ours, oldest first."""
        found = json.loads(self.run("snapshots", "--json", "--tag", TAG)) or []
        made = (Snapshot(s["id"], _time(s["time"]), _rows(s.get("tags") or [])) for s in found)
        return sorted(made, key=lambda s: s.taken_at)

    def snapshot(self, chosen: str = "", *, with_memories: bool = False) -> Snapshot:
        """The newest, or the one whose id begins like that. Raises VmError.

        `with_memories`: the newest that has any, if one has: a new machine backs up its empty memory, too.
        """
        found = self.snapshots()
        if with_memories and not chosen:
            found = [s for s in found if s.rows != 0] or found
        if chosen:
            found = [s for s in found if s.id.startswith(chosen)]
            if len(found) > 1:
                raise Refused(f"several snapshots begin with {chosen}: give more of the id")
        if not found:
            raise VmError(f"there is no {f'snapshot {chosen}' if chosen else 'backup'} in {self.name}")
        return found[-1]

    def backup(self, folder: Path, names: Sequence[str], rows: int) -> dict[str, Any]:
        """restic's summary. A snapshot that lacks a file is none: it is removed again."""
        try:
            # linking a file changes its ctime: without this all would be read again each time
            tags = f"{TAG},{ROWS_TAG}{rows}"
            said = self.run("backup", "--json", "--ignore-ctime", "--tag", tags, *names, cwd=folder)
        except VmError:
            with contextlib.suppress(VmError):
                self._forget_incomplete(folder)
            raise
        summary = [line for line in map(json.loads, said.splitlines()) if line.get("message_type") == "summary"]
        return dict(summary[-1])

    def _forget_incomplete(self, folder: Path) -> None:
        """Only what this call can have made: it is of this folder, and newer than what it holds."""
        since = folder.stat().st_mtime
        for made in self.snapshots():
            if made.taken_at.timestamp() >= since:
                self.run("forget", made.id)

    def copy_from(self, source: Repository, snapshot: str) -> None:
        self.run("copy", snapshot, source=source)

    def prune(self, policy: Mapping[str, str]) -> None:
        keep = [w for n in ("daily", "weekly", "monthly") for w in (f"--keep-{n}", policy[f"KEEP_{n.upper()}"])]
        # one group: another machine, or another number of memories, is no reason to keep more
        self.run("forget", "--tag", TAG, "--group-by", "", "--keep-within", KEEP_WITHIN, *keep, "--prune")

    def keep_newest_alone(self) -> int:
        """Forgets all others of ours, and leaves no data that only they had; how many they were."""
        *others, _ = self.snapshots()
        if others:
            self.run("forget", *(one.id for one in others))
        self.run("prune", "--max-unused", "0")
        return len(others)

    def also_open_with(self, password: str) -> None:
        """From now on this password opens it as well."""
        self.run("key", "add", "--new-password-file", "/dev/stdin", text=password + "\n")

    def size_of(self, snapshot: str) -> int:
        """Bytes that its files take."""
        return int(json.loads(self.run("stats", "--json", "--mode", "restore-size", snapshot))["total_size"])

    def restore(self, snapshot: str, folder: Path, *names: str) -> None:
        """Into `folder`, all of it, or only what is below one of `names`."""
        only = [word for name in names for word in ("--include", f"/{name}")]
        self.run("restore", snapshot, "--target", str(folder), *only)


def _rows(tags: Sequence[str]) -> int | None:
    return next((int(tag.removeprefix(ROWS_TAG)) for tag in tags if tag.startswith(ROWS_TAG)), None)


def _time(text: str) -> datetime:
    # restic gives nanoseconds, which Python refuses
    return datetime.fromisoformat(re.sub(r"(\.\d{6})\d+", r"\1", text).replace("Z", "+00:00")).astimezone(UTC)


def _sftp_host(url: str) -> tuple[str, str]:
    if found := re.fullmatch(r"sftp://([^/:]+@)?([^/:]+)(?::(\d+))?/.+", url):
        return (found[1] or "") + found[2], found[3] or "22"
    found = re.fullmatch(r"sftp:([^:/]+):.+", url)
    if not found:
        raise Refused(f"{url} is neither sftp:user@host:/path nor sftp://user@host:port//path")
    return found[1], "22"


# -- what backup.env says


@dataclass(frozen=True)
class Backups:
    """The repositories, and what is to be kept in them."""

    local: Repository
    offsite: Repository | None
    policy: Mapping[str, str]

    @property
    def farthest(self) -> Repository:
        """The one that counts when this machine is lost."""
        return self.offsite or self.local

    @classmethod
    def of(cls, stack: Stack, given: Mapping[str, str] | None = None) -> Backups:
        """`given`: what stands above backup.env. Raises Refused."""
        path = stack.etc / "backup.env"
        values = read(path) | dict(given or {})
        if missing := [n for n in ("RESTIC_REPOSITORY", "RESTIC_PASSWORD") if not values.get(n)]:
            raise Refused(f"{path} lacks {' and '.join(missing)}: `make deploy` writes it")
        names = ("RESTIC_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        secrets = {name: values[name] for name in names if values.get(name)}

        def made(url: str) -> Repository:
            return Repository(url, secrets, stack.etc, stack.state / "restic-cache")

        offsite = values.get("OFFSITE_REPOSITORY", "")
        policy = {name: values.get(name, "0") for name in ("KEEP_DAILY", "KEEP_WEEKLY", "KEEP_MONTHLY")}
        return cls(made(values["RESTIC_REPOSITORY"]), made(offsite) if offsite else None, policy)

    def named(self, url: str) -> Repository:
        """That of `url`, `local` or `offsite`; without one the farthest. Any other URL with the same secrets."""
        if url in ("local", self.local.url):
            return self.local
        if url in ("", "offsite") or (self.offsite and url == self.offsite.url):
            if url and not self.offsite:
                raise Refused("no offsite repository is configured: see `backup` in the inventory")
            return self.farthest
        return Repository(url, self.local.secrets, self.local.ssh_folder, self.local.cache)
