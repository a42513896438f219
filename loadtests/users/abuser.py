"""Somebody who guesses keys, sends bodies that are too large, and storms: each must be refused, in the right words."""

from __future__ import annotations

import secrets
from collections import deque
from typing import Final

from loadtests.users.caller import Answer, Caller, Verdict, expects
from loadtests.users.world import World

#: Just above what a body may have.
HUGE_BYTES: Final = 1_048_576 + 1
#: Guesses a minute: half of what an address is allowed by default, since it is the address of all other users here.
GUESSES_PER_MINUTE: Final = 30


class Abuser:
    """Storms only where a key with a limit was given."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._guesses: deque[float] = deque(maxlen=GUESSES_PER_MINUTE)

    def visit(self, caller: Caller, due: float) -> None:
        kind = self._world.dice.choice(("guess", "huge", "storm"))
        if kind == "guess" and self._may_guess(due):
            # 503 where nobody could look the key up in time: it isn't let in either way
            key = f"ws_sk_{secrets.token_urlsafe(32)}"
            caller.call("abuse key", "/v1/search", {"query": "x"}, due, key=key, judge=expects(401, 503))
        elif kind == "storm" and self._world.limited_key:
            query = {"query": self._world.generator.query()}
            caller.call("abuse storm", "/v1/search", query, due, key=self._world.limited_key, judge=limited)
        else:
            body = '{"content": "' + "x" * HUGE_BYTES + '"}'
            caller.call("abuse huge", "/v1/memories", body, due, key=self._world.key(), judge=expects(413))

    def _may_guess(self, now: float) -> bool:
        if len(self._guesses) == GUESSES_PER_MINUTE and now - self._guesses[0] < 60:
            return False
        self._guesses.append(now)
        return True


def limited(answer: Answer) -> Verdict:
    """Within the limit an answer; above it a refusal that says when to come back."""
    if answer.status == 429:
        wait = answer.headers.get("retry-after", "")
        return Verdict(wait.isdigit() and int(wait) >= 1, 429, f"retry-after {wait!r}")
    return Verdict(answer.status == 200, answer.status, "" if answer.status == 200 else answer.text)
