"""Runs a runbook as its reader does: the commands as they are printed, what they say compared with what is printed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from runbooks.book import Book, BookError, Step, match

#: The longest command is a deploy that carries images.
COMMAND_TIMEOUT_S: Final = 900.0
#: Who is called by an alert comes minutes after the fault, and what Act did needs a moment to show: so long, what a
#: look at the machine says may be another. The index tells the reader.
PATIENCE_S: Final = 90.0
PAUSE_S: Final = 1.0


class Lied(AssertionError):
    """A runbook that is not true."""


@dataclass
class Reader:
    """Somebody at a shell in the tree, with the inventory named."""

    cwd: Path
    environment: Mapping[str, str]
    #: What they know, or have read in an output.
    values: dict[str, str]
    #: Puts a python block into the inventory.
    edit: Callable[[str], None]
    patience_s: float = PATIENCE_S
    say: Callable[[str], None] = print

    def run(self, step: Step) -> tuple[int, str]:
        script = step.filled(self.values)
        began = time.monotonic()
        done = subprocess.run(
            ["sh", "-c", script], cwd=self.cwd, env=self.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_TIMEOUT_S,
        )  # fmt: skip
        said = done.stdout.decode(errors="replace")
        self.say(f"-- {step.section}, line {step.line}: {script}\n{said}({done.returncode}, {_since(began)} s)")
        return done.returncode, said

    # -- sections

    def look(self, step: Step, *, patiently: bool, must_succeed: bool) -> str:
        """Empty where it says what is printed; else what it said."""
        deadline = time.monotonic() + (self.patience_s if patiently else 0.0)
        while True:
            code, said = self.run(step)
            found = match(step.output or "", said, self.values)
            if found is not None and (code == 0 or not must_succeed):
                self.values |= found
                return ""
            if time.monotonic() > deadline:
                return f"it ended with {code} and said:\n{said}"
            time.sleep(PAUSE_S)

    def act(self, step: Step, *, again: bool) -> None:
        if step.kind == "python":
            self.edit(step.filled(self.values))
            return
        code, said = self.run(step)
        found = match(step.output or "", said, self.values)
        # done once more, a command has less to do, and may say so
        if code or (found is None and not again):
            raise Lied(f"line {step.line}{' (again)' if again else ''}: {step.text}\nended with {code}\n{said}")
        if found and not again:
            self.values |= found


def play(book: Book, reader: Reader) -> float:
    """Seconds that Check, Act and Verify took. The fault is there when this begins. Raises Lied."""
    began = time.monotonic()
    for step in book.of("Check"):
        if step.kind == "python":
            reader.edit(step.filled(reader.values))
        elif said := reader.look(step, patiently=True, must_succeed=False):
            raise Lied(f"line {step.line}: {step.text}\nprinted:\n{step.output}\n{said}")
    looked = time.monotonic()
    _must_not_hold(book, reader)
    told = time.monotonic() - looked
    for step in book.of("Act"):
        reader.act(step, again=False)
    _must_hold(book, reader)
    seconds = time.monotonic() - began - told
    for step in book.of("Act"):
        reader.act(step, again=True)
    _must_hold(book, reader)
    for step in book.of("Undo"):
        reader.act(step, again=False)
    return seconds


def _must_not_hold(book: Book, reader: Reader) -> None:
    values = dict(reader.values)
    for step in book.of("Verify"):
        if _unknown(step, values):
            continue
        if reader.look(step, patiently=False, must_succeed=True):
            reader.values = values
            return
    raise Lied("Verify holds before Act, so it would not tell whether Act helped")


def _unknown(step: Step, values: Mapping[str, str]) -> bool:
    """Whether it needs what only Check or Act will show."""
    try:
        step.filled(values)
    except BookError:
        return True
    return False


def _must_hold(book: Book, reader: Reader) -> None:
    for step in book.of("Verify"):
        if said := reader.look(step, patiently=True, must_succeed=True):
            raise Lied(f"line {step.line}: {step.text}\nprinted:\n{step.output}\n{said}")


def _since(began: float) -> int:
    return round(time.monotonic() - began)
