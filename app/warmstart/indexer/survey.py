"""One look at the tree: what changed since the state was written, and what the memories are to be."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Final

from warmstart.context import count_tokens
from warmstart.errors import ConfigError
from warmstart.indexer.assemble import Wanted, assemble
from warmstart.indexer.files import Looked, digest, look_at_all
from warmstart.indexer.plan import Plan, plan
from warmstart.indexer.repository import Repository
from warmstart.indexer.state import File, State
from warmstart.indexer.upload import Progress
from warmstart.indexer.walk import Found, Walk, read

#: Files looked at between two signs of life.
_STEP: Final = 25
_UNPARSED: Final = "does not parse as a whole: the symbols of its sound parts are kept"


@dataclass(slots=True)
class Survey:
    files: dict[str, File] = field(default_factory=dict)
    #: Of the files that are not as the state has them: path → SHA-256.
    hashes: dict[str, str] = field(default_factory=dict)
    #: As the state has them.
    untouched: set[str] = field(default_factory=set)
    #: Nothing is known of them now, so their memories stay.
    unreadable: set[str] = field(default_factory=set)
    unreadable_directories: tuple[str, ...] = ()
    #: path → what is wrong with it.
    problems: dict[str, str] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)


def survey(repository: Repository, state: State, progress: Progress) -> Survey:
    # the tokenizer's vocabulary takes a second to load, which can pass meanwhile; nothing changed: it is not needed
    loading = threading.Thread(target=count_tokens, args=("",), daemon=True)
    made = Survey()
    walk = Walk(repository.root)
    found = walk.files()
    made.problems |= walk.problems
    if "./" in walk.problems:
        raise ConfigError([f"{repository.root} can't be read: {walk.problems['./']}"])
    made.unreadable_directories = tuple(path for path in walk.problems if path.endswith("/"))
    wanted: list[Wanted] = []
    changed: list[Found] = []
    for one in found:
        if not _is_untouched(one, state, made):
            if not changed:
                loading.start()
            changed.append(one)
    progress("look", 0, len(changed))
    for number, looked in enumerate(look_at_all(changed), 1):
        loading.join()
        wanted += _take(looked, state, made, repository)
        if number % _STEP == 0 or number == len(changed):
            progress("look", number, len(changed))
    known = {i: row for i, row in state.rows.items() if row.path not in made.untouched and not _stays(row.path, made)}
    made.files |= {path: file for path, file in state.files.items() if path not in made.files and _stays(path, made)}
    made.plan = plan(known, wanted, _renamed(state, made))
    return made


def _is_untouched(found: Found, state: State, made: Survey) -> bool:
    known = state.files.get(found.path)
    if known is None or not known.sha256:
        return False
    try:
        data = read(found.file)
    except OSError:
        return False  # said by who looks closer
    if data is None or digest(data) != known.sha256:
        return False
    made.files[found.path] = known
    made.untouched.add(found.path)
    if not known.parsed:
        made.problems[found.path] = _UNPARSED
    return True


def _take(looked: Looked, state: State, made: Survey, repository: Repository) -> list[Wanted]:
    if looked.outcome == "unreadable":
        made.unreadable.add(looked.path)
        made.problems[looked.path] = looked.problem
        return []
    if looked.outcome != "symbols":
        return []
    if looked.problem:
        made.problems[looked.path] = looked.problem
    elif not looked.parsed:
        made.problems[looked.path] = _UNPARSED
    made.files[looked.path] = File("", count_tokens(looked.text), looked.parsed)
    made.hashes[looked.path] = looked.sha256
    return assemble(looked.path, looked.language, looked.symbols, repository.namespace, repository.identity)


def _stays(path: str, made: Survey) -> bool:
    return path in made.unreadable or path.startswith(made.unreadable_directories)


def _renamed(state: State, made: Survey) -> dict[str, str]:
    """New path → old path, where the bytes are the same and the old one is gone."""
    vanished = {
        file.sha256: path for path, file in sorted(state.files.items()) if file.sha256 and path not in made.files
    }
    renamed = {}
    for path, sha256 in sorted(made.hashes.items()):
        if path not in state.files and (old := vanished.pop(sha256, None)):
            renamed[path] = old
    return renamed
