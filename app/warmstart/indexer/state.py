"""`.warmstart/index-state.json`: what the server has of each file, so that the next run looks only at what changed.

It may be lost or damaged at any time: the server's own rows say the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from warmstart import scrub
from warmstart.errors import ConfigError, Conflict
from warmstart.indexer import assemble, comments, languages, sections, symbols, text, walk

DIRECTORY: Final = ".warmstart"
FILE: Final = "index-state.json"
FORMAT: Final = 1
MAX_STATE_BYTES: Final = 256 << 20
#: Of a run's time, writing the state may take one part in so many.
_PATIENCE: Final = 20


class Row(NamedTuple):
    """A memory of a symbol, as the server has it."""

    path: str
    name: str
    content_hash: str
    shape: str
    tokens: int


@dataclass(slots=True)
class File:
    #: Empty as long as something of it is on its way.
    sha256: str
    tokens: int = 0
    parsed: bool = True


@dataclass(slots=True)
class State:
    namespace: str
    files: dict[str, File] = field(default_factory=dict)
    #: By memory id.
    rows: dict[str, Row] = field(default_factory=dict)
    #: Memories of the namespace that are not the index's.
    foreign: int = 0

    def to_json(self) -> bytes:
        by_path: dict[str, list[Any]] = {}
        for memory_id, (path, *rest) in self.rows.items():
            by_path.setdefault(path, []).append([memory_id, *rest])
        files = {path: [file.sha256, file.tokens, file.parsed] for path, file in self.files.items()}
        return json.dumps(
            {
                "format": FORMAT, "rules": rules(), "namespace": self.namespace,
                "foreign": self.foreign, "files": files, "symbols": by_path,
            },
            ensure_ascii=False, separators=(",", ":"),
        ).encode()  # fmt: skip

    @classmethod
    def from_json(cls, data: bytes) -> State:
        """Raises ValueError, TypeError, KeyError or AttributeError for what is no state."""
        found = json.loads(data)
        if found["format"] != FORMAT or found["rules"] != rules():
            raise ValueError("of another version")
        state = cls(_text(found["namespace"]), foreign=max(0, int(found["foreign"])))
        for path, (sha256, tokens, parsed) in found["files"].items():
            state.files[_text(path)] = File(_text(sha256), int(tokens), bool(parsed))
        for path, rows in found["symbols"].items():
            for memory_id, name, content_hash, shape, tokens in rows:
                state.rows[_text(memory_id)] = Row(
                    _text(path), _text(name), _text(content_hash), _text(shape), int(tokens)
                )
        return state


class Store:
    """The directory `.warmstart` of a repository; one run at a time."""

    def __init__(self, root: Path) -> None:
        self._directory = root / DIRECTORY
        self.path = self._directory / FILE
        self._next_save = 0.0

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Raises Conflict where another run works on this repository, ConfigError where nothing can be written."""
        try:
            if self._directory.is_symlink():
                raise ConfigError([f"{self._directory} is a link, which is not followed: remove it"])
            self._directory.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileExistsError), (self._directory / ".gitignore").open("x") as ignore:
                ignore.write("*\n")
            fd = os.open(self._directory / "index.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError([
                f"{self._directory} can't be written ({error.strerror}): change its rights, "
                "or index a copy that is yours"
            ]) from None  # fmt: skip
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise Conflict("another run indexes this repository now: wait for it, or end it") from None
        finally:
            os.close(fd)

    def load(self) -> State | None:
        """None where there is none that can be used."""
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_STATE_BYTES + 1)
            return State.from_json(data) if len(data) <= MAX_STATE_BYTES else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None

    def save(self, state: State) -> None:
        """Whole or not at all, through a kill and a power cut."""
        fresh = self.path.with_suffix(".new")
        fresh.unlink(missing_ok=True)
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(state.to_json())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
        directory = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def save_when_due(self, state: State) -> None:
        """After something was acknowledged: at once, unless the file is so large that writing it would be the work."""
        began = time.monotonic()
        if began < self._next_save:
            return
        self.save(state)
        ended = time.monotonic()
        self._next_save = ended + (ended - began) * _PATIENCE


@cache
def rules() -> str:
    """Of what symbols are found by: other rules find other symbols in the same file."""
    digest = hashlib.sha256(languages.versions().encode())
    for module in (assemble, comments, languages, scrub, sections, symbols, text, walk):
        digest.update(Path(module.__file__ or "").read_bytes())
    return digest.hexdigest()[:16]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"not a string: {value!r:.50}")
    return value
