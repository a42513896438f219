"""How far long work is."""

from __future__ import annotations

import sys
import time
from typing import Any, Final

import click

#: How often it is said where there is no terminal.
LINE_S: Final = 1.0


class Progress:
    """A bar for each step on a terminal; elsewhere a line as a step begins, each second, and as it ends."""

    def __init__(self) -> None:
        self._step = ""
        self._began = self._said = 0.0
        self._first = 0
        self._bars: Any = None
        self._bar: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            columns = (
                progress.TextColumn("{task.description:9}"),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
            )
            self._bars = progress.Progress(*columns, console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, step: str, done: int, total: int) -> None:
        at = time.monotonic()
        began = step != self._step
        if began:
            self._step, self._began, self._first = step, at, done
        if self._bars is not None:
            if began:
                self._bar = self._bars.add_task(step, total=total)
            self._bars.update(self._bar, completed=done, total=total)
        elif began or done >= total or at - self._said >= LINE_S:
            self._said = at
            click.echo(f"{step} {done}/{total}{self._left(done, total, at)}", err=True)

    def _left(self, done: int, total: int, at: float) -> str:
        """The time left, as the rate of this step so far has it."""
        if done <= self._first or done >= total:
            return ""
        return f", about {(at - self._began) / (done - self._first) * (total - done):.0f} s left"
