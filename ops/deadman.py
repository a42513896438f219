"""Changes that could lock the operator out: the VM takes them back by itself, unless a new connection proves them.

In order: a timer is armed on the VM which undoes the change; the change is made; this machine logs in anew, with the
same key; only then the timer is stopped. A deploy that dies, or a machine that reboots, in between leaves the timer
armed: it is enabled as a unit, so it also fires after a boot.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Generator, Sequence
from io import StringIO
from typing import Any, Final

from pyinfra.api import FactBase, FunctionCommand, QuoteString, StringCommand, operation
from pyinfra.operations import files

from ops import ssh
from ops.inventory import Target
from ops.runner import Deploy

UNDO_AFTER_S: Final = 120
LOGIN_TIMEOUT_S: Final = 25
#: A first attempt may fall into the service's reload.
LOGIN_ATTEMPTS: Final = 2
FOLDER: Final = "/var/lib/warmstart/undo"
#: A connection of its own, by key alone, through no master connection that is open already.
ANEW: Final = (
    "-o", "ControlMaster=no", "-o", "ControlPath=none", "-o", "PreferredAuthentications=publickey",
    "-o", "PasswordAuthentication=no", "-o", "NumberOfPasswordPrompts=0",
)  # fmt: skip


class Armed(FactBase[bool]):
    """Whether an earlier change of this name was neither proved nor taken back."""

    default = staticmethod(lambda: False)

    def command(self, change: str) -> str:
        return f"systemctl is-enabled --quiet {unit(change)}.timer 2>/dev/null && echo yes || echo no"

    def process(self, output: list[str]) -> bool:
        return output == ["yes"]


def unit(change: str) -> str:
    return f"warmstart-undo-{change}"


def login_fault(target: Target) -> str:
    """Why a new connection with the key fails; empty where it works."""
    words = ssh.command(target, "true")
    command = [words[0], *ANEW, *words[1:]]
    said = ""
    for attempt in range(LOGIN_ATTEMPTS):
        if attempt:
            time.sleep(1)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=LOGIN_TIMEOUT_S, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            said = f"no answer in {LOGIN_TIMEOUT_S} s"
            continue
        if done.returncode == 0:
            return ""
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return said


@operation()
def guarded(
    change: str, deploy: Deploy, note: str, undo: str, do: Sequence[Any], keep: Sequence[Any] = ()
) -> Generator[Any, None, None]:  # fmt: skip
    """Runs `do`; then `keep`, what makes it last, once a new connection was seen to work; else the script `undo`.

    `note` is run before, to keep what `undo` needs. For what has to change only: whether it must isn't asked again.
    """
    name, script = unit(change), f"{FOLDER}/{change}.sh"
    # one that is still armed is of a deploy that died: back to the known state first
    yield f"if systemctl is-enabled --quiet {name}.timer 2>/dev/null; then sh {script}; fi"
    yield f"mkdir -p -m 700 {FOLDER} && {note}"
    for path, text in {
        script: f"{undo.strip()}\n{disarm(change)}\n",
        f"/etc/systemd/system/{name}.service": _service(script),
        f"/etc/systemd/system/{name}.timer": _timer(change),
    }.items():
        yield from files.put._inner(StringIO(text), path, mode="644", create_remote_dir=False, force=True)
    yield f"systemctl daemon-reload && systemctl enable --quiet {name}.timer && systemctl restart {name}.timer"
    for command in do:
        # what goes wrong here need not wait for the timer
        yield f"{{ {command}; }} || {{ sh {script}; exit 1; }}" if isinstance(command, str) else command
    faults: list[str] = []
    yield FunctionCommand(_prove, (change, deploy, faults), {})
    if faults:
        yield StringCommand(f"sh {script}; echo", QuoteString(faults[0]), ">&2; exit 1")
    yield from keep
    yield disarm(change)


def disarm(change: str) -> str:
    name = unit(change)
    return (
        f"systemctl disable --quiet {name}.timer; systemctl stop {name}.timer; rm -f {FOLDER}/{change}.* "
        f"/etc/systemd/system/{name}.service /etc/systemd/system/{name}.timer; systemctl daemon-reload"
    )


def _service(script: str) -> str:
    unit_ = "[Unit]\nDescription=Take back a change that was not proved\n"
    return f"{unit_}\n[Service]\nType=oneshot\nExecStart=/bin/sh {script}\n"


def _timer(change: str) -> str:
    return (
        f"[Unit]\nDescription=Take back the change of {change}, unless it is proved\n\n"
        f"[Timer]\nOnActiveSec={UNDO_AFTER_S}\nAccuracySec=1\n\n[Install]\nWantedBy=timers.target\n"
    )


def _prove(change: str, deploy: Deploy, faults: list[str]) -> None:
    if fault := login_fault(deploy.target):
        faults.append(
            f"with the new {change} settings no new connection came about ({fault}): they are taken back, at once or, "
            f"where this connection is lost too, by the VM itself within {UNDO_AFTER_S} s"
        )
        deploy.say(f"    {faults[0]}")
