"""What was given is known again, and a cache that answers anything else is one that knows nothing."""

from __future__ import annotations

from typing import Any

import pytest

from warmstart.errors import CacheUnavailable
from warmstart.given import Given
from warmstart.local_cache import Command, LocalCache

WRONG: list[Any] = [None, {}, float("inf"), "mem_a", [], [{}], [1, float("nan")], [None] * 9]


class Answering(LocalCache):
    """With `answer` to every command, or an error."""

    answer: Any = None

    async def pipeline(self, *commands: Command) -> list[Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer for _ in commands]


@pytest.mark.parametrize("answer", [*WRONG, CacheUnavailable("down")], ids=repr)
async def test_a_cache_that_answers_anything_knows_nothing(answer: Any) -> None:
    cache = Answering()
    cache.answer = answer
    given = Given(cache, "usr_a")
    assert await given.to("conversation") == set()
    assert await given.recognise(["the walrus", "the otter"]) == [None, None]
    await given.remember("conversation", [])


async def test_nothing_is_asked_for_nothing() -> None:
    cache = Answering()
    cache.answer = ["mem_a"]
    given = Given(cache, "usr_a")
    assert await given.to(None) == set()
    assert await given.recognise(["", "?!"]) == [None, None]
    assert await given.recognise(["the walrus"]) == ["mem_a"]
