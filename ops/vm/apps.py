"""What backup, drill and restore ask of the release: the stack as it is configured, the service's word on a store.

Containers of a moment are named, so that what a killed run left is found again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Final

from .children import run_child
from .stack import Refused, Release, Stack, VmError, last_json

#: For one look through a whole store, or one dump.
WORK_TIMEOUT_S: Final = 3600.0
MEMORY: Final = "512m"
#: As in the stack: no rights, nothing written, and no network unless it is given one.
HARDENED: Final = ("--cap-drop=ALL", "--security-opt=no-new-privileges:true", "--read-only", "--pids-limit=256")
#: Owner of the data volume.
USER: Final = 10001


@dataclass(frozen=True)
class Apps:
    stack: Stack
    release: Release

    @classmethod
    def of(cls, stack: Stack) -> Apps:
        release = stack.current()
        if release is None:
            raise Refused("nothing has been rolled out on this machine: `make deploy` comes first")
        return cls(stack, release)

    # -- the stack as it is configured

    @cached_property
    def _services(self) -> Mapping[str, Any]:
        # it has secrets: it is read here, and shown to nobody
        said = self.stack.run(self.stack.compose(self.release, "config", "--format", "json"))
        found: Mapping[str, Any] = json.loads(said)["services"]
        return found

    @property
    def own_postgres(self) -> bool:
        return "postgres" in self._services

    def _setting(self, service: str, name: str) -> str:
        # Compose doubles the sign of its variables in what it prints
        return str(self._services[service]["environment"][name]).replace("$$", "$")

    @property
    def database_url(self) -> str:
        return self._setting("api", "DATABASE_URL")

    @property
    def postgres_password(self) -> str:
        return self._setting("postgres", "POSTGRES_PASSWORD")

    @property
    def store_path(self) -> Path:
        """The store's folder below that of the data volume. Raises Refused where it is somewhere else."""
        uri = self._setting("api", "LANCEDB_URI")
        path = Path(uri.removeprefix("file://"))
        if not path.is_relative_to("/data") or path == Path("/data") or ".." in path.parts:
            raise Refused(f"LANCEDB_URI is {uri}: only a store on the data volume, such as /data/lancedb, is backed up")
        return path.relative_to("/data")

    @cached_property
    def volume(self) -> Path:
        """Where the data volume lies on this machine. Raises VmError where there is none."""
        name = f"{self.stack.project}_data"
        return Path(self.stack.run(["docker", "volume", "inspect", "--format", "{{.Mountpoint}}", name]).strip())

    def image(self, service: str) -> str:
        found = self.release.images[service]
        return found.id or found.name

    # -- containers of a moment

    @property
    def database_network(self) -> str:
        """The service's own way to its database."""
        return f"{self.stack.project}_{'backend' if self.own_postgres else 'edge'}"

    def name(self, what: str) -> str:
        return f"{self.stack.project}-{what}"

    def remove(self, *what: str) -> None:
        """Containers of these names with what they wrote, however they were left."""
        for one in what:
            with suppress(VmError):
                self.stack.run(["docker", "rm", "--force", "--volumes", self.name(one)])

    def app(
        self, what: str, data: Path, *words: str,
        network: str = "none", environment: Mapping[str, str] | None = None, stdin: IO[bytes] | None = None,
    ) -> str:  # fmt: skip
        """Standard output of the service's command on the folder `data`, which it can't write to. Raises VmError."""
        self.remove(what)
        given = {"LANCEDB_URI": f"/data/{self.store_path}", **(environment or {})}
        command = [
            "docker", "run", "--rm", "--interactive", "--name", self.name(what), "--network", network,
            *HARDENED, "--memory", MEMORY, "--tmpfs", "/tmp", "--volume", f"{data}:/data:ro",  # noqa: S108
            *(word for name in given for word in ("--env", name)), self.image("api"), *words,
        ]  # fmt: skip
        return run_child(command, "warmstart " + " ".join(words), given, stdin=stdin, timeout_s=WORK_TIMEOUT_S)

    def inventory(
        self, what: str, data: Path, *, against: Path | None = None, network: str = "none", database_url: str = ""
    ) -> dict[str, Any]:
        """What the service finds in the store below `data`. Raises VmError with its faults and differences."""
        words = ["store", "inventory", "--search", "--json"]
        environment = {"DATABASE_URL": database_url} if database_url else {}
        if against is None:
            said = self.app(what, data, *words, network=network, environment=environment)
        else:
            with against.open("rb") as file:
                said = self.app(
                    what, data, *words, "--against", "-", network=network, environment=environment, stdin=file
                )
        found: dict[str, Any] = last_json(said)
        return found
