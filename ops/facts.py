"""What more than one step asks the VM, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyinfra import host
from pyinfra.api import FactBase, StringCommand
from pyinfra.facts.files import FileContents

#: For one command that is not an operation: several times what a slow VM takes.
REMOTE_TIMEOUT_S: Final = 300


@dataclass(frozen=True)
class Remote:
    """How a command on the VM ended."""

    ok: bool
    out: str
    err: str

    @property
    def last_error(self) -> str:
        lines = (self.err or self.out).strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"


def remote(command: str, *, stdin: str = "") -> Remote:
    """Runs at once, as root: for what has to be known or done between operations."""
    try:
        ok, output = host.run_shell_command(
            StringCommand(command), _sudo=host.state.config.SUDO, _stdin=stdin or None, _timeout=REMOTE_TIMEOUT_S
        )
    except TimeoutError:
        return Remote(False, "", f"no answer within {REMOTE_TIMEOUT_S} s: {command[:100]}")
    return Remote(ok, output.stdout, output.stderr)


def text(path: str) -> str | None:
    """A file's text; None where there is none."""
    lines = host.get_fact(FileContents, path=path)
    return None if lines is None else "\n".join(lines) + "\n"


class InContainer(FactBase[bool]):
    """Whether the "VM" is a container: its kernel, swap and clock are then its host's."""

    default = staticmethod(lambda: False)

    def command(self) -> str:
        return "systemd-detect-virt --quiet --container && echo yes || echo no"

    def process(self, output: list[str]) -> bool:
        return output == ["yes"]
