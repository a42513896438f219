"""Requests at a steady rate, whether or not the last one was answered: what clients see of a deploy."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

import httpx

from containers.stack import wait_until

#: A second, of each client.
RATE: Final = 2.0
NAMESPACE: Final = "load"
#: The longest that a request may take while an api is replaced by another.
MAX_STALL_S: Final = 1.0
#: Two cores that also do the deploying can stand still for longer than what is looked at here.
SLACK_S: Final = 2.0


@dataclass
class Load:
    """Saves and searches in turn, by `clients` at once, from the begin of the block to its end."""

    client: httpx.Client
    clients: int = 2
    #: when it was due (seconds since 1970), how long it took, and what it was
    answered: list[tuple[float, float, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    saved: dict[str, str] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _pool: ThreadPoolExecutor | None = None
    _source: threading.Thread | None = None

    def __enter__(self) -> Load:
        self._pool = ThreadPoolExecutor(32)
        self._source = threading.Thread(target=self._arrivals, daemon=True)
        self._source.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._source is not None
        assert self._pool is not None
        self._source.join()
        self._pool.shutdown(wait=True)

    def _arrivals(self) -> None:
        assert self._pool is not None
        period = 1 / (RATE * self.clients)
        began = time.monotonic()
        for number in itertools.count():
            due = began + number * period
            if self._stop.wait(max(0.0, due - time.monotonic())):
                return
            self._pool.submit(self._save if number % 2 else self._search, due)

    def _save(self, due: float) -> None:
        content = f"Written during a deploy: {uuid.uuid4()}"
        answer = self._request("/v1/memories", {"content": content, "namespace": NAMESPACE}, due)
        if answer is not None:
            self.saved[answer["id"]] = content

    def _search(self, due: float) -> None:
        self._request("/v1/search", {"query": "written during a deploy", "limit": 5}, due)

    def _request(self, path: str, body: dict[str, object], due: float) -> dict[str, str] | None:
        try:
            answer = self.client.post(path, json=body)
        except httpx.HTTPError as error:
            self.failures.append(f"{path}: {type(error).__name__}: {error}")
            return None
        # from when it was due, so that a stall counts for each that had to wait
        seconds = time.monotonic() - due
        self.answered.append((time.time() - seconds, seconds, path))
        if answer.status_code >= 400:
            self.failures.append(f"{path}: {answer.status_code} {answer.text[:200]}")
            return None
        found: dict[str, str] = answer.json()
        return found

    def wait_for(self, count: int) -> None:
        """So many answers more."""
        goal = len(self.answered) + count
        wait_until(f"{count} answers", lambda: len(self.answered) >= goal or self.failures, 60)

    @property
    def summary(self) -> str:
        middle = statistics.median(seconds for _, seconds, _ in self.answered)
        at, seconds, what = max(self.answered, key=lambda each: each[1])
        return (
            f"{len(self.answered)} requests, {len(self.failures)} failed, half of them within {middle:.2f} s, "
            f"the longest took {seconds:.2f} s: {what} at {time.strftime('%H:%M:%S', time.gmtime(at))}"
        )

    def longest(self, since: float = 0.0) -> float:
        """Seconds, of what was under way at this time or began later."""
        return max((took for at, took, _ in self.answered if at + took >= since), default=0.0)

    def assert_served(self, *, longest_s: float = MAX_STALL_S + SLACK_S) -> None:
        assert self.answered
        assert self.failures == [], self.summary
        assert self.longest() < longest_s, self.summary

    def lost(self, client: httpx.Client) -> list[str]:
        """Ids that were answered and are not there, or are not what was sent."""
        found: dict[str, str] = {}
        query: dict[str, str | int] = {"namespace": NAMESPACE, "limit": 50}
        while True:
            page = client.get("/v1/memories", params=query).raise_for_status().json()
            found |= {memory["id"]: memory["content"] for memory in page["memories"]}
            if not page["next_cursor"]:
                return [i for i, content in self.saved.items() if found.get(i) != content]
            query["cursor"] = page["next_cursor"]
