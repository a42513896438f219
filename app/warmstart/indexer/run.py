"""One run: look at the tree, bring the server up to date, and say what was done."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from warmstart.context import TOKENIZER
from warmstart.indexer.plan import Plan
from warmstart.indexer.repository import Repository
from warmstart.indexer.state import State, Store
from warmstart.indexer.survey import Survey, survey
from warmstart.indexer.upload import Progress, Server, Upload, agrees, rebuilt


class Tokens(BaseModel):
    """Of the memories, one a symbol, as a prompt would have them; and of all files whole."""

    tokenizer: str
    mean: float
    median: float
    p90: int
    max: int
    files: int


class Summary(BaseModel):
    files: int
    symbols: int
    new: int
    changed: int
    gone: int
    tokens: Tokens
    seconds: float


@dataclass(frozen=True, slots=True)
class Result:
    summary: Summary
    plan: Plan
    #: path → what is wrong with it.
    problems: dict[str, str]


async def index(
    repository: Repository, server: Server | None, progress: Progress, *, take_over: bool = False
) -> Result:
    """Without a server it is a dry run: nothing is asked, sent or written, and the state is taken at its word.

    `take_over`: the namespace's memories are this repository's, whatever they say.
    """
    began = time.monotonic()
    store = Store(repository.root)
    if server is None:
        state = _known(store, repository) or State(repository.namespace)
        made = survey(repository, state, progress)
        return _result(began, made, _tokens_after(state, made.plan))
    with store.lock():
        state = await _state(store, repository, server, take_over=take_over)
        made = survey(repository, state, progress)
        state.files = made.files
        await Upload(server, store, state, made.plan, made.hashes, progress).run()
    return _result(began, made, [row.tokens for row in state.rows.values()])


def _known(store: Store, repository: Repository) -> State | None:
    """What was written for another namespace says nothing here."""
    state = store.load()
    return state if state is not None and state.namespace == repository.namespace else None


async def _state(store: Store, repository: Repository, server: Server, *, take_over: bool) -> State:
    state = _known(store, repository)
    if state is not None and await agrees(server, state):
        return state
    return await rebuilt(server, repository.namespace, repository.identity, take_over=take_over)


def _tokens_after(state: State, plan: Plan) -> list[int]:
    after = {memory_id: row.tokens for memory_id, row in state.rows.items()}
    for memory_id, _ in plan.gone:
        del after[memory_id]
    for pair in (*plan.changed, *plan.renumbered):
        after[pair.memory_id] = pair.wanted.tokens
    return [*after.values(), *(wanted.tokens for wanted in plan.new)]


def _result(began: float, made: Survey, tokens: Sequence[int]) -> Result:
    summary = Summary(
        files=len(made.files),
        symbols=len(tokens),
        new=len(made.plan.new),
        changed=len(made.plan.changed),
        gone=len(made.plan.gone),
        tokens=_tokens(tokens, sum(file.tokens for file in made.files.values())),
        seconds=round(time.monotonic() - began, 3),
    )
    return Result(summary, made.plan, made.problems)


def _tokens(counts: Sequence[int], files: int) -> Tokens:
    ordered = sorted(counts) or [0]
    middle = len(ordered) // 2
    return Tokens(
        tokenizer=TOKENIZER,
        mean=round(sum(ordered) / len(ordered), 1),
        median=(ordered[middle] + ordered[~middle]) / 2,
        p90=ordered[math.ceil(0.9 * len(ordered)) - 1],
        max=ordered[-1],
        files=files,
    )
