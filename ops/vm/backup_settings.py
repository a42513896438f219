"""What backups go by on this machine: /etc/warmstart/backup.env, its secrets made where none are given, and the
repository of this machine. The deploy gives the rest by standard input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from .repository import Backups
from .secrets import BYTES, read, render, write
from .stack import Refused, Stack

#: From the inventory, as they stand in the file.
SETTINGS: Final = ("RESTIC_REPOSITORY", "OFFSITE_REPOSITORY", "KEEP_DAILY", "KEEP_WEEKLY", "KEEP_MONTHLY")
SECRETS: Final = ("RESTIC_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
#: A file of its own: of ssh, for an sftp place.
KEY: Final = "OFFSITE_SSH_KEY"
MAX_STDIN: Final = 65_536


@dataclass(frozen=True)
class Wanted:
    """`given`: settings, and those secrets that the operator has; others stay as they are here."""

    stack: Stack
    given: Mapping[str, str]

    @classmethod
    def of(cls, stack: Stack, text: str) -> Wanted:
        """From JSON. Raises Refused."""
        try:
            given = json.loads(text)
            wrong = not isinstance(given, dict) or set(given) - {*SETTINGS, *SECRETS, KEY}
        except ValueError:
            wrong = True
        if wrong:
            raise Refused(f"standard input is no JSON object of {', '.join((*SETTINGS, *SECRETS, KEY))}")
        return cls(stack, {name: str(value) for name, value in given.items()})

    @property
    def path(self) -> Path:
        return self.stack.etc / "backup.env"

    @property
    def key_path(self) -> Path:
        return self.stack.etc / "offsite.key"

    def pending(self) -> list[str]:
        """What `apply` would do, never a value of a secret. Raises Refused."""
        there = read(self.path)
        wanted = self._values(there)
        lines = [f"set {name}" for name in wanted if name not in SECRETS and wanted[name] != there.get(name)]
        lines += [f"put {name}" for name in SECRETS if name in self.given and self.given[name] != there.get(name)]
        if "RESTIC_PASSWORD" not in wanted:
            lines.append("make RESTIC_PASSWORD")
        if self._key_differs():
            lines.append(f"put {KEY}")
        if not (Path(self.given["RESTIC_REPOSITORY"]) / "config").is_file():
            lines.append("make the repository on this machine")
        return lines

    def apply(self) -> dict[str, Any]:
        """Answers {"made": the password, where it was made here: to be shown once}."""
        values = self._values(read(self.path))
        made = {} if "RESTIC_PASSWORD" in values else {"RESTIC_PASSWORD": token_hex(BYTES)}
        write(self.path, render(values | made))
        if self._key_differs():
            write(self.key_path, self.given[KEY].rstrip("\n") + "\n")
        local = Backups.of(self.stack).local
        if not local.exists():
            Path(local.url).mkdir(parents=True, exist_ok=True, mode=0o700)
            local.create()
        return {"made": made.get("RESTIC_PASSWORD", "")}

    def _values(self, there: Mapping[str, str]) -> dict[str, str]:
        """Of the file to be. Raises Refused for a password that the repository does not know."""
        present, given = there.get("RESTIC_PASSWORD"), self.given.get("RESTIC_PASSWORD")
        if present and given and present != given:
            raise Refused(
                "RESTIC_PASSWORD of the inventory is not the one on the machine, which its repositories know. Give "
                f"that one ({self.path} has it), or none; `restic key passwd` on each repository would change it"
            )
        return dict(there) | {name: value for name, value in self.given.items() if name != KEY}

    def _key_differs(self) -> bool:
        if KEY not in self.given:
            return False
        there = self.key_path.read_text() if self.key_path.exists() else ""
        return there.strip() != self.given[KEY].strip()
