"""Where everything is on this machine, and what runs of it: paths, calls of Docker, containers, the stack's lock.

Nothing is remembered of a roll-out: what there is to know stands in Docker, in one flag file and in two symlinks.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from . import locks

#: Containers of the services that follow, of images that are here, and of no others.
UP: Final = ("up", "--detach", "--no-deps", "--no-build", "--pull", "never")
#: The services a roll-out runs the api in, in turn. Caddy asks the second where the flag file is there.
SLOTS: Final = ("api", "api-b")
#: Of the project's own image; the rest comes from outside.
APP_SERVICES: Final = (*SLOTS, "redis-rest", "worker")
COMMAND_TIMEOUT_S: Final = 120.0
#: How many times as long as elsewhere things may take, on a machine that is known to be slow, an emulated one say.
PATIENCE: Final = float(os.environ.get("WARMSTART_VM_PATIENCE", "1"))
#: How long to wait for another command on the stack, or for what a killed one left running.
LOCK_TIMEOUT_S: Final = 60.0
#: Last lines of a command that failed, and of a container's log.
ERROR_LINES: Final = 15
LOG_LINES: Final = 40


class VmError(Exception):
    """Something failed; the text is for the operator. Exit code 1."""


class Refused(VmError):
    """Nothing was done, for the reason that the text gives. Exit code 2."""


@dataclass(frozen=True)
class Image:
    name: str
    id: str


@dataclass(frozen=True)
class Release:
    """A folder releases/<id>, laid down whole by a deploy and never changed."""

    id: str
    folder: Path

    @cached_property
    def manifest(self) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = json.loads((self.folder / "manifest.json").read_text())
        except (OSError, ValueError) as error:
            raise Refused(f"release {self.id} can't be read: {error}: deploy it again") from None
        return found

    @property
    def compose_files(self) -> tuple[Path, Path]:
        return self.folder / "compose" / "compose.yml", self.folder / "compose.images.yml"

    @property
    def images(self) -> dict[str, Image]:
        """By service; an id may be empty where it is known by name alone."""
        return {name: Image(i["name"], i.get("id") or "") for name, i in self.manifest["images"].items()}


@dataclass(frozen=True)
class Container:
    id: str
    name: str
    service: str
    #: Docker's word: created, running, paused, restarting, exited, dead
    state: str
    #: starting, healthy, unhealthy; empty where the image has no health check
    health: str
    exit_code: int
    restarts: int
    started_at: str
    image_id: str
    config_hash: str
    #: The release whose files made it. It stays where a later one leaves the container as it is.
    release: str
    #: Its address by network, without the project's name.
    addresses: Mapping[str, str]
    #: Arguments for `docker exec` by which it finds itself healthy; empty where it can't.
    probe: tuple[str, ...] = field(default=(), repr=False)

    @property
    def running(self) -> bool:
        return self.state == "running"

    @property
    def detached(self) -> bool:
        """It is on no network: well by its own account, and nobody reaches it. Compose sees no difference."""
        return bool(self.id) and not self.addresses

    @classmethod
    def of(cls, found: Mapping[str, Any], project: str) -> Container:
        """From what `docker inspect` says."""
        state, config = found["State"], found["Config"]
        labels = config.get("Labels") or {}
        first_file = Path(labels.get("com.docker.compose.project.config_files", "").split(",")[0])
        # releases/<id>/compose/compose.yml
        release = first_file.parts[-3] if first_file.parts[-2:] == ("compose", "compose.yml") else ""
        networks = found["NetworkSettings"].get("Networks") or {}
        return cls(
            id=found["Id"], name=found["Name"].lstrip("/"), service=labels.get("com.docker.compose.service", ""),
            state=state["Status"], health=(state.get("Health") or {}).get("Status", ""),
            exit_code=state["ExitCode"], restarts=found["RestartCount"], started_at=state["StartedAt"],
            image_id=found["Image"], config_hash=labels.get("com.docker.compose.config-hash", ""), release=release,
            addresses={n.removeprefix(f"{project}_"): a["IPAddress"] for n, a in networks.items()},
            probe=_probe((config.get("Healthcheck") or {}).get("Test") or []),
        )  # fmt: skip


def _probe(test: Sequence[str]) -> tuple[str, ...]:
    match list(test):
        case ["CMD", *words]:
            return tuple(words)
        case ["CMD-SHELL", line]:
            return ("sh", "-c", line)
    return ()


@dataclass(frozen=True)
class Stack:
    """The one stack of this machine; with another root and project, a scratch one beside it."""

    root: Path = Path("/")
    project: str = "warmstart"
    #: In the place of settings.env: those that a deploy is to bring.
    settings_file: Path | None = None

    @classmethod
    def from_environment(cls) -> Stack:
        root = Path(os.environ.get("WARMSTART_VM_ROOT", "/"))
        return cls(root, os.environ.get("WARMSTART_VM_PROJECT", "warmstart"))

    # -- paths

    @property
    def opt(self) -> Path:
        """Releases, symlinks, and `config`, the folder that containers mount from."""
        return self.root / "opt/warmstart"

    @property
    def etc(self) -> Path:
        """Settings and secrets."""
        return self.root / "etc/warmstart"

    @property
    def state(self) -> Path:
        """What this machine keeps of itself: results of backups and drills, scratch folders, the model."""
        return self.root / "var/lib/warmstart"

    @property
    def run_dir(self) -> Path:
        """Locks; empty after a reboot."""
        return self.root / "run/warmstart"

    @property
    def config(self) -> Path:
        return self.opt / "config"

    @property
    def traffic_flag(self) -> Path:
        """Where it is there, caddy sends every request to the second slot. It mounts the folder around it."""
        return self.config / "caddy" / "traffic" / "b"

    # -- releases

    def release(self, release_id: str) -> Release:
        folder = self.opt / "releases" / release_id
        if not release_id or "/" in release_id or not (folder / "manifest.json").is_file():
            known = ", ".join(sorted(r.id for r in self.releases())) or "none"
            raise Refused(f"there is no release {release_id!r} on this machine; there are: {known}")
        return Release(release_id, folder)

    def releases(self) -> list[Release]:
        return [Release(m.parent.name, m.parent) for m in (self.opt / "releases").glob("*/manifest.json")]

    def current(self) -> Release | None:
        """The one that was rolled out last."""
        return self._linked("current")

    def previous(self) -> Release | None:
        """The one before it, for a rollback."""
        return self._linked("previous")

    def _linked(self, name: str) -> Release | None:
        try:
            target = os.readlink(self.opt / name)
        except OSError:
            return None
        return self.release(Path(target).name)

    def link(self, name: str, release: Release) -> None:
        """Point the symlink `name` at `release`, in one step."""
        new = self.opt / f".{name}.new"
        new.unlink(missing_ok=True)
        new.symlink_to(Path("releases") / release.id)
        new.replace(self.opt / name)

    # -- commands

    def compose(self, release: Release, *words: str) -> list[str]:
        """The command line of `docker compose` for `release`. Secrets are in files, never in it."""
        files = [word for file in release.compose_files for word in ("--file", str(file))]
        return [
            "docker", "compose", "--ansi", "never", "--project-name", self.project,
            "--project-directory", str(self.config),
            "--env-file", str(self.settings_file or self.etc / "settings.env"),
            "--env-file", str(self.etc / "secrets.env"),
            *files, *words,
        ]  # fmt: skip

    def run(self, command: Sequence[str], *, stdin: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Standard output of `command`; raises VmError with its last words where it fails."""
        timeout_s *= PATIENCE
        try:
            # A session of its own: a signal to this program is not one to Docker, which then would stop half way.
            # It holds on to the stack's lock, so that what it does is over before the next command begins.
            done = subprocess.run(
                command, input=stdin, stdin=subprocess.DEVNULL if stdin is None else None, capture_output=True,
                text=True, errors="replace", timeout=timeout_s, env=_environment(), start_new_session=True,
                pass_fds=_held,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise VmError(f"`{_shown(command)}` took over {timeout_s:.0f} s") from None
        except FileNotFoundError:
            raise Refused(f"{command[0]} is not installed on this machine: deploy to it") from None
        if done.returncode:
            lines = (done.stdout + done.stderr).strip().splitlines()[-ERROR_LINES:]
            raise VmError(f"`{_shown(command)}` ended with {done.returncode}:\n" + "\n".join(lines))
        return done.stdout

    def show(self, command: Sequence[str]) -> int:
        """Runs `command` with this program's output; its exit code. It too holds on to the stack's lock."""
        return subprocess.run(command, stdin=subprocess.DEVNULL, env=_environment(), pass_fds=_held).returncode

    def exec(self, service: str, *argv: str, stdin: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        """Standard output of `argv` in the running container of `service` (see `container`)."""
        found = self.container(service)
        if found is None or not found.running:
            raise VmError(f"{service} does not run: `warmstart-vm status` shows what does")
        return self.run(["docker", "exec", "--interactive", found.id, *argv], stdin=stdin, timeout_s=timeout_s)

    # -- what runs

    def containers(self, service: str = "") -> list[Container]:
        """All of this stack, or of exactly this service (slots are services); one-off ones left out."""
        labels = {"project": self.project, "oneoff": "False", **({"service": service} if service else {})}
        filters = [word for n, v in labels.items() for word in ("--filter", f"label=com.docker.compose.{n}={v}")]
        ids = self.run(["docker", "ps", "--all", "--quiet", "--no-trunc", *filters]).split()
        found = [self.inspect(i) for i in ids] if len(ids) == 1 else self._inspect_all(ids)
        return sorted((c for c in found if c), key=lambda c: (c.service, c.name))

    def _inspect_all(self, ids: Sequence[str]) -> list[Container | None]:
        if not ids:
            return []
        try:
            found = json.loads(self.run(["docker", "inspect", *ids]))
        except VmError:  # one of them went meanwhile
            return [self.inspect(i) for i in ids]
        return [Container.of(one, self.project) for one in found]

    def inspect(self, container_id: str) -> Container | None:
        """None where it is gone."""
        try:
            [found] = json.loads(self.run(["docker", "inspect", container_id]))
        except VmError as error:
            if "No such object" in str(error) or "no such object" in str(error):
                return None
            raise
        return Container.of(found, self.project)

    def container(self, service: str) -> Container | None:
        """The one of a service. `api` is the api as clients meet it: of its slots, the one with the traffic."""
        found = self.containers(self.serving() if service == SLOTS[0] else service)
        # one that a recreation was killed at has an older one beside it
        return max(found, key=lambda c: (c.running, c.started_at), default=None)

    def serving(self) -> str:
        """The slot that caddy sends requests to."""
        return SLOTS[self.traffic_flag.exists()]

    def log(self, container: Container, lines: int = LOG_LINES) -> str:
        """Its last lines of both streams."""
        done = subprocess.run(
            ["docker", "logs", "--tail", str(lines), container.id], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=_environment(),
            timeout=COMMAND_TIMEOUT_S,
        )  # fmt: skip
        return done.stdout

    # -- the lock

    @contextmanager
    def lock(self, what: str, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Held by each command while it changes the stack; `what` tells others why they wait. Raises Refused."""
        try:
            lock = locks.take(self.run_dir / "stack.lock", what, timeout_s)
        except TimeoutError as holder:
            raise Refused(f"another command has held the stack for over {timeout_s:.0f} s: {holder}") from None
        _held.append(lock)
        try:
            yield
        finally:
            _held.remove(lock)
            os.close(lock)


#: Locks of this process, for its children to hold on to.
_held: list[int] = []


def last_json(output: str) -> Any:
    """What a program that is asked for JSON says: its last line."""
    return json.loads(output.strip().splitlines()[-1])


def _environment() -> dict[str, str]:
    """Without what a shell may have set: Compose prefers that over the files."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "DOCKER_HOST") if name in os.environ}
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **kept}


def _shown(command: Sequence[str]) -> str:
    """What matters of a command line: of Compose's, what follows its files."""
    words = list(command)
    if "--file" in words:
        last = len(words) - 1 - words[::-1].index("--file")
        words = ["docker", "compose", *words[last + 2 :]]
    return " ".join(words)[:200]
