"""Runs the steps of a deploy one after another over one connection.

pyinfra works out all operations before it runs the first. Here each step is worked out when the one before it has run,
so that its facts are those of the machine as it is by then.
"""

from __future__ import annotations

import importlib
import json
import logging
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

import click
from pyinfra import logger
from pyinfra.api.command import StringCommand
from pyinfra.api.config import Config
from pyinfra.api.connect import connect_all, disconnect_all
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.operations import run_ops
from pyinfra.api.state import BaseStateCallback, State, StateHostMeta
from pyinfra.context import ctx_host, ctx_state

from ops import ssh
from ops.inventory import Target
from ops.source import Source

STEPS: Final = (
    "preflight", "lock", "base", "ssh", "firewall", "docker", "layout", "images", "release", "database", "rollout",
    "smoke", "keys", "backup", "metrics", "prune",
)  # fmt: skip
CONNECT_TIMEOUT_S: Final = 10
# what pyinfra says is told where it matters, by the watcher below
logger.addHandler(logging.NullHandler())
logger.propagate = False
#: Lines of a failed operation's output that are shown.
LAST_LINES: Final = 40
#: Deploys that the VM remembers.
HISTORY: Final = 500
HISTORY_FILE: Final = "/var/lib/warmstart/deploys.jsonl"


class Refused(Exception):
    """A step won't go on: all its reasons, each with the way out."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(f"  - {fault}" for fault in faults))
        self.faults = list(faults)


class DeployError(Exception):
    """A step failed; what its operation said last."""

    def __init__(self, step: str, operation: str, output: str) -> None:
        super().__init__(f"{step} failed at: {operation}" + (f"\n{output}" if output else ""))
        self.step = step


@dataclass(frozen=True)
class Change:
    step: str
    operation: str
    seconds: float


@dataclass
class Deploy:
    """One run: what is to be, what was found on the way, and what was changed."""

    target: Target
    source: Source
    #: only look, and tell what would be changed
    dry: bool = False
    break_lock: bool = False
    #: filled in by the step that works out the release
    release: Any = None
    changes: list[Change] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    #: lines for the operator at the end; may hold a secret that is shown once, so they are printed and not kept
    notes: list[str] = field(default_factory=list)
    #: a line while a step works
    say: Callable[[str], None] = print

    @property
    def record(self) -> dict[str, Any]:
        """For the VM's history: nothing secret."""
        return {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "who": self.source.who,
            "commit": self.source.commit,
            "changes": [asdict(change) for change in self.changes],
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
        }


class _Watcher(BaseStateCallback, logging.Handler):
    """Tells of operations while they run, times them, and keeps what pyinfra says of faults."""

    def __init__(self, say: Callable[[str], None]) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self._say = say
        self.warnings: deque[str] = deque(maxlen=LAST_LINES)
        self._began: dict[str, float] = {}
        self.seconds: dict[str, float] = {}
        self.failed = ""

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().endswith("executed 0 commands"):  # its last word on each failure
            self.warnings.append(f"    {click.unstyle(record.getMessage())}")

    def operation_host_start(self, state: State, host: Host, op_hash: str) -> None:  # type: ignore[override]
        self._began[op_hash] = time.monotonic()
        if state.ops[host][op_hash].operation_meta.will_change:
            self._say(f"    {_name(state, op_hash)}")

    def operation_host_success(self, state: State, host: Host, op_hash: str, retry_count: int = 0) -> None:  # type: ignore[override]
        self.seconds[op_hash] = time.monotonic() - self._began[op_hash]

    def operation_host_error(  # type: ignore[override]
        self, state: State, host: Host, op_hash: str, retry_count: int = 0, max_retries: int = 0
    ) -> None:
        self.failed = op_hash


def _name(state: State, op_hash: str) -> str:
    return ", ".join(sorted(state.op_meta[op_hash].names))


@contextmanager
def connected(target: Target) -> Iterator[tuple[State, Host]]:
    """A pyinfra state with its one host, as root. Raises Refused where it can't be reached."""
    inventory = Inventory(([(target.host, ssh.pyinfra_data(target))], {}))
    state = State(inventory, Config(SUDO=target.ssh_user != "root", CONNECT_TIMEOUT=CONNECT_TIMEOUT_S))
    host = next(iter(inventory))
    with suppress(PyinfraError):  # told below, with the way out
        connect_all(state)
    if not host.connected:
        raise Refused([
            f"no SSH connection to {target.ssh_user}@{target.host}:{target.ssh_port}: try "
            f"`{shlex.join(ssh.command(target, 'true'))}`, which says why"
        ])  # fmt: skip
    try:
        with ctx_state.use(state), ctx_host.use(host):
            yield state, host
    finally:
        disconnect_all(state)


def run(deploy: Deploy, steps: Sequence[str] = STEPS) -> None:
    """All steps in order. Raises Refused, DeployError; the lock is given back in any case."""
    with connected(deploy.target) as (state, host):
        watcher = _Watcher(deploy.say)
        state.add_callback_handler(watcher)
        logger.addHandler(watcher)
        lock = importlib.import_module("ops.steps.lock")
        try:
            for name in steps:
                began = time.monotonic()
                if not deploy.dry and name != "preflight":
                    lock.beat(deploy, name)
                _run_step(deploy, state, host, name, watcher)
                deploy.seconds[name] = time.monotonic() - began
            if not deploy.dry and deploy.changes:
                _remember(host, deploy)
        finally:
            logger.removeHandler(watcher)
            if not deploy.dry:
                lock.release(deploy)


def _run_step(deploy: Deploy, state: State, host: Host, name: str, watcher: _Watcher) -> None:
    step = importlib.import_module(f"ops.steps.{name}")
    deploy.say(f"{name}: {_purpose(step.__doc__)}")
    _forget_operations(state, host)
    step.apply(deploy)
    to_do = [op_hash for op_hash in host.op_hash_order if state.ops[host][op_hash].operation_meta.will_change]
    if deploy.dry:
        for op_hash in to_do:
            deploy.changes.append(Change(name, _name(state, op_hash), 0.0))
            deploy.say(f"    would: {_name(state, op_hash)}")
        return
    if not to_do:  # running them would only read all facts again
        return
    try:
        run_ops(state)
    except PyinfraError:
        failed = watcher.failed
        output = _last_lines(state, host, failed) or "\n".join(watcher.warnings)
        raise DeployError(name, _name(state, failed), output) from None
    finally:
        deploy.changes += [
            Change(name, _name(state, op_hash), round(watcher.seconds.get(op_hash, 0.0), 2))
            for op_hash in host.op_hash_order
            if (meta := state.ops[host][op_hash].operation_meta).is_complete() and meta.did_change()
        ]


def _purpose(doc: str | None) -> str:
    return (doc or "").strip().partition("\n")[0].rstrip(".")


def _forget_operations(state: State, host: Host) -> None:
    """Those that ran must not run again with the next step."""
    state.op_meta = {}
    state.ops = {host: {}}
    state.meta = {host: StateHostMeta()}
    host.op_hash_order = []
    state.is_executing = False


def _last_lines(state: State, host: Host, op_hash: str) -> str:
    meta = state.ops[host][op_hash].operation_meta
    lines = [*meta.stdout_lines, *meta.stderr_lines] if meta.is_complete() else []
    return "\n".join(f"    {line}" for line in lines[-LAST_LINES:])


def _remember(host: Host, deploy: Deploy) -> None:
    line = json.dumps(deploy.record, ensure_ascii=False)
    keep = f"f={HISTORY_FILE}; {{ tail -n {HISTORY - 1} $f 2>/dev/null; cat; }} > $f.new && mv $f.new $f"
    host.run_shell_command(StringCommand(keep), _stdin=line, _sudo=host.state.config.SUDO)
