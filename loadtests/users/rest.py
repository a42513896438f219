"""Those who speak REST: a hook before each prompt, the command line, an indexer."""

from __future__ import annotations

from typing import Final

from loadtests.users.caller import Answer, Caller, Verdict, expects
from loadtests.users.world import World

#: Of the command line's calls.
SEARCH_SHARE: Final = 0.7
BATCH: Final = 100
#: Prompts of one conversation, in which no memory is given twice.
PROMPTS: Final = 10


def search_verdict(answer: Answer) -> Verdict:
    """A right answer's note is the rung and what was missing."""
    if answer.status != 200:
        return Verdict(False, answer.status, answer.text)
    try:
        found = answer.json()
        return Verdict(isinstance(found["hits"], list), 200, mode(found))
    except (ValueError, KeyError) as error:
        return Verdict(False, 200, f"no search result: {error!r}")


def mode(found: dict[str, object]) -> str:
    degraded = found["degraded"]
    return " ".join([str(found["mode"]), *(map(str, degraded) if isinstance(degraded, list) else ())])


class Hook:
    """Before a prompt, the context for it. It must never fail, only be empty."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._prompts = 0

    def visit(self, caller: Caller, due: float) -> None:
        self._prompts += 1
        world = self._world
        body = {"query": world.generator.query(), "conversation_id": f"load-{self._prompts // PROMPTS}"}
        caller.call("context", "/v1/context", body, due, key=world.key(), judge=self._judge)

    @staticmethod
    def _judge(answer: Answer) -> Verdict:
        if answer.status != 200:
            return Verdict(False, answer.status, answer.text)
        return Verdict(True, 200, str(answer.json().get("mode") or "empty"))


class CommandLine:
    """`warmstart search` and `warmstart save`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def visit(self, caller: Caller, due: float) -> None:
        world = self._world
        if world.dice.random() < SEARCH_SHARE:
            body = {"query": world.generator.query()}
            caller.call("search", "/v1/search", body, due, key=world.key(), judge=search_verdict)
        else:
            caller.call("save", "/v1/memories", world.generator.item().memory, due, key=world.key())


class Indexer:
    """A repository's symbols, in batches as large as they may be."""

    def __init__(self, world: World) -> None:
        self._world = world

    def visit(self, caller: Caller, due: float) -> None:
        memories = [item.memory for item in self._world.generator.items(BATCH)]
        caller.call(
            "batch", "/v1/memories/batch", {"memories": memories}, due, key=self._world.key(), judge=expects(200)
        )
