from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from warmstart.errors import Migrating, NotFound, RateLimited, ServerUnreachable, WarmstartError
from warmstart.indexer import retry
from warmstart.indexer.retry import MAX_RATE_LIMITED, MAX_TRIES, persistently


class Script:
    """Answers each error in turn, then "done"; pauses take no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, errors: Iterator[WarmstartError]) -> None:
        self._errors = errors
        self.pauses: list[float] = []
        self.reconnects = 0
        monkeypatch.setattr(retry.asyncio, "sleep", self._sleep)

    async def run(self) -> str:
        return await persistently(self._request, on_pause=lambda seconds, error: None, on_unreachable=self._reconnect)

    async def _request(self) -> str:
        for error in self._errors:
            raise error
        return "done"

    async def _reconnect(self) -> None:
        self.reconnects += 1

    async def _sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)


def times(count: int, make: Callable[[], WarmstartError]) -> Iterator[WarmstartError]:
    return (make() for _ in range(count))


async def test_what_the_server_says_is_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, iter([RateLimited("slow", retry_after=7), Migrating("soon", retry_after=3)]))
    assert await script.run() == "done"
    assert script.pauses == [7, 3]
    assert script.reconnects == 0


async def test_a_server_that_is_away_is_asked_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, times(100, lambda: ServerUnreachable("nothing answers")))
    with pytest.raises(ServerUnreachable):
        await script.run()
    assert len(script.pauses) == script.reconnects == MAX_TRIES - 1
    assert all(0.25 <= pause <= 15 for pause in script.pauses)
    assert 15 < sum(script.pauses) < 45


async def test_a_rate_limit_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, times(100, lambda: RateLimited("slow", retry_after=100_000)))
    with pytest.raises(RateLimited):
        await script.run()
    assert script.pauses == [120] * (MAX_RATE_LIMITED - 1)


async def test_what_no_other_try_helps_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(monkeypatch, iter([NotFound("gone")]))
    with pytest.raises(NotFound):
        await script.run()
    assert script.pauses == []
