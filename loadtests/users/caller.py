"""One request: sent, judged, and told to Locust and to the run's own record with both of its latencies."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TextIO

from loadtests.slo import Sample
from loadtests.users.fields import FIELDS

if TYPE_CHECKING:
    # importing it patches the standard library, which is for the load process alone
    from locust.contrib.fasthttp import FastHttpSession

#: A client's patience; the service's own budgets are far below it.
TIMEOUT_S: Final = 30.0
NOTE_CHARS: Final = 160


@dataclass(slots=True)
class Answer:
    """`status` is 0 where nothing came, and `text` then says why."""

    status: int
    text: str
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.text)


@dataclass(frozen=True, slots=True)
class Verdict:
    ok: bool
    status: int
    note: str = ""


def expects(*statuses: int) -> Callable[[Answer], Verdict]:
    """The judge of a request that must be answered with one of these."""

    def judge(answer: Answer) -> Verdict:
        ok = answer.status in statuses
        return Verdict(ok, answer.status, "" if ok else answer.text)

    return judge


_created: Final = expects(200, 201)


def _reason(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


class Record:
    """The run's own file of requests; what Locust itself keeps is counted in buckets."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._rows = csv.writer(file)
        self._rows.writerow(FIELDS)

    def add(self, sample: Sample) -> None:
        self._rows.writerow((
            f"{sample.due_s:.4f}", sample.endpoint, f"{sample.latency_ms:.2f}", f"{sample.service_ms:.2f}",
            sample.status, int(sample.ok), " ".join(sample.note.split())[:NOTE_CHARS],
        ))  # fmt: skip
        self._file.flush()


class Caller:
    """Sends requests and keeps what came of them. Times are of `clock`, in seconds."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, session: FastHttpSession, record: Record, began: float) -> None:
        self._session, self._record, self._began = session, record, began

    def call(
        self,
        endpoint: str,
        path: str,
        body: Any,
        due: float,
        *,
        key: str,
        judge: Callable[[Answer], Verdict] | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """POST `body`, as JSON where it isn't text, or GET without one.

        `due` is the time from which a person or program waited for this. Without a judge the answer must be 200 or 201.
        """
        sent = self.clock()
        given = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            given["Authorization"] = f"Bearer {key}"
        given |= headers or {}
        if body is None:
            request = self._session.get(path, headers=given, name=endpoint, catch_response=True)
        else:
            data = body if isinstance(body, str) else json.dumps(body)
            request = self._session.post(path, data=data, headers=given, name=endpoint, catch_response=True)
        with request as response:
            status = int(response.status_code or 0)
            # whatever charset a header lacks or names: JSON is UTF-8
            text = (response.content or b"").decode(errors="replace") if status else _reason(response.error)
            answer = Answer(status, text, {k.lower(): v for k, v in (response.headers or {}).items()})
            verdict = (judge or _created)(answer)
            done = self.clock()
            # Locust's own statistics get the latency that counts, too
            response.request_meta["response_time"] = (done - due) * 1000
            if verdict.ok:
                response.success()
            else:
                response.failure(f"{verdict.status} {verdict.note[:NOTE_CHARS]}")
        self.note(endpoint, due, sent, done, verdict)
        return answer

    def note(self, endpoint: str, due: float, sent: float, done: float, verdict: Verdict) -> None:
        self._record.add(
            Sample(
                due - self._began, endpoint, (done - due) * 1000, (done - sent) * 1000,
                verdict.status, verdict.ok, verdict.note,
            )
        )  # fmt: skip
