"""A text file that somebody has to be told of."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from io import StringIO
from typing import Any

from pyinfra.api import operation
from pyinfra.operations import files


@operation()
def written(path: str, text: str, mode: str = "644", then: Sequence[str] = ()) -> Generator[Any, None, None]:
    """The file has this text; `then` runs where it had not."""
    changed = False
    for command in files.put._inner(StringIO(text), path, mode=mode):
        changed = True
        yield command
    if changed:
        yield from then
