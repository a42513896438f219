"""Runs a step's apply() against recorded facts: pyinfra itself, with its `@fake` connector in place of SSH.

A recording is what one real machine answered, command by command; `record.py` makes them. A command that is not in it
fails the test, so that a step can't rest on an answer nobody gave.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pyinfra.api.command import FileUploadCommand, FunctionCommand, StringCommand
from pyinfra.api.config import Config
from pyinfra.api.connect import connect_all
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory
from pyinfra.api.operations import run_ops
from pyinfra.api.state import State
from pyinfra.context import ctx_host, ctx_state

from ops.inventory import Target
from ops.runner import Deploy, Refused
from ops.source import Source

RECORDED: Final = Path(__file__).parent / "recorded"
#: stdout, or {"stdout": …, "stderr": …, "success": …}
Answer = str | list[str] | Mapping[str, Any]
Answers = dict[Any, Answer]
ANYTHING: Final = re.compile(r"(?s).*")


def recorded(name: str) -> Answers:
    """The answers of tests/unit/ops/recorded/NAME.json."""
    answers: dict[str, Answer] = json.loads((RECORDED / f"{name}.json").read_text())
    return {exactly(command): answer for command, answer in answers.items()}


def key(command: str) -> str:
    """A script of many lines is known by its first, so that a change within it keeps its recording."""
    return command.partition("\n")[0]


def exactly(first_line: str) -> re.Pattern[str]:
    return re.compile(rf"\A{re.escape(first_line)}(\n|\Z)")


@dataclass
class Ran:
    """What a step came to."""

    #: operation → its commands; operations that would change nothing are left out
    operations: dict[str, list[str]] = field(default_factory=dict)
    #: path → text that would be put there
    files: dict[str, str] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: every command that went to the machine, facts included
    sent: list[str] = field(default_factory=list)
    #: with execute=True: whether all operations succeeded
    succeeded: bool = True

    @property
    def commands(self) -> list[str]:
        return [command for commands in self.operations.values() for command in commands]


def run_step(
    apply: Callable[[Deploy], None], answers: Answers, *, dry: bool = True, execute: bool = False,
    break_lock: bool = False, **target: Any,
) -> Ran:  # fmt: skip
    """`answers` are looked through in order: what a test says otherwise comes before the recording.

    With `execute` the operations run as well; what they send is answered with success unless `answers` say otherwise.
    """
    fake = {**answers, ANYTHING: {"success": False, "stderr": "not recorded"}}
    inventory = Inventory(
        (["@fake"], {}), override_data={"fake_responses": fake, "fake_delay": 0, "fake_delay_jitter": 0}
    )
    state = State(inventory, Config())
    connect_all(state)
    host = next(iter(inventory))
    ran = Ran()
    deploy = Deploy(
        Target(host="203.0.113.10", **({"domain": "memory.example.com"} | target)),
        Source(Path(), "c0ffee" + "0" * 34, "ann@laptop"),
        dry=dry, break_lock=break_lock, notes=ran.notes, say=lambda line: None,
    )  # fmt: skip
    ran.sent = host.connector.executed_commands  # type: ignore[attr-defined]
    try:
        with ctx_state.use(state), ctx_host.use(host):
            apply(deploy)
            collect(state, host, ran)
    except Refused as refused:
        ran.refused = refused.faults
    finally:
        unknown = [command for command in ran.sent if not any(_matches(matcher, command) for matcher in answers)]
        assert not unknown, "not recorded: " + "\n".join(unknown)
    if execute and not ran.refused:
        del host.connector.data["fake_responses"][ANYTHING]
        with ctx_state.use(state), ctx_host.use(host):
            _execute(state, ran)
    return ran


def _execute(state: State, ran: Ran) -> None:
    from pyinfra.api.exceptions import PyinfraError

    try:
        run_ops(state)
    except PyinfraError:
        ran.succeeded = False


def _matches(matcher: Any, command: str) -> bool:
    return bool(matcher.search(command)) if isinstance(matcher, re.Pattern) else matcher in command


def collect(state: State, host: Host, ran: Ran) -> None:
    """Works out every operation's commands, which reads the facts they need, and runs none."""
    for op_hash in host.op_hash_order:
        commands = []
        for command in state.ops[host][op_hash].command_generator():
            if isinstance(command, FileUploadCommand):
                ran.files[command.dest] = _content(command.src)
                commands.append(f"put {command.dest}")
            elif isinstance(command, FunctionCommand):
                commands.append(f"call {command.function.__name__}")
            else:
                assert isinstance(command, StringCommand)
                commands.append(command.get_masked_value())
        if commands:
            ran.operations[", ".join(sorted(state.op_meta[op_hash].names))] = commands


def _content(source: Any) -> str:
    if not hasattr(source, "read"):
        return Path(source).read_text(errors="replace")
    source.seek(0)
    text = source.read()
    source.seek(0)
    return text if isinstance(text, str) else text.decode(errors="replace")
