"""The cache's client: Upstash REST, or an in-process stand-in.

Everything in the cache can be lost at any time, so `CacheUnavailable` is the
only error either of them raises, and a dead endpoint soon costs nothing.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import httpx

from warmstart.circuit import Circuit
from warmstart.config import Settings
from warmstart.errors import CacheUnavailable
from warmstart.local_cache import Command, LocalCache

#: Failures in a row that open the circuit, and how long it then stays open.
FAILURES_TO_OPEN: Final = 3
OPEN_S: Final = 5.0
#: 100 vectors of the widest kind the settings allow (8,192 floats), base64 twice over, are 5.8 MB.
MAX_RESPONSE_BYTES: Final = 8 * 2**20
MAX_CONNECTIONS: Final = 64
KEEPALIVE_S: Final = 30.0


class Cache(Protocol):
    """Commands in, their results out, in Redis' own types (None, int, str, list)."""

    @property
    def healthy(self) -> bool:
        """Whether the last call was answered."""

    @property
    def reason(self) -> str:
        """Why it was not; empty while healthy."""

    @property
    def since(self) -> datetime | None:
        """When it stopped being healthy."""

    async def pipeline(self, *commands: Command) -> list[Any]:
        """Run the commands in order; all results, or CacheUnavailable."""

    async def close(self) -> None: ...


def open_cache(settings: Settings) -> Cache:
    if not settings.upstash_redis_rest_url:
        return LocalCache()
    return UpstashCache(
        settings.upstash_redis_rest_url,
        settings.upstash_redis_rest_token.get_secret_value(),
        settings.cache_budget_ms / 1_000,
    )


class UpstashCache:
    """One POST to `<url>/pipeline` a call, all of it within `budget_s`.

    Some endpoints of this protocol send every string in base64 unasked. Since a
    cached value may itself be base64, that is learned from the answer to a PING
    that goes with the first call, and again after each failure.
    """

    def __init__(self, url: str, token: str, budget_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._url = url.rstrip("/") + "/pipeline"
        self._budget_s = budget_s
        self._circuit = Circuit("cache", clock, failures_to_open=FAILURES_TO_OPEN, pauses_s=(OPEN_S, OPEN_S))
        #: Why the last call was not answered, and when that began.
        self._trouble: tuple[str, datetime] | None = None
        self._base64: bool | None = None
        self._client = httpx.AsyncClient(
            headers={
                "Authorization": f"Bearer {token}",
                "Content-Type": "application/json",
                # compressed answers would get around the limit on their size
                "Accept-Encoding": "identity",
            },
            timeout=None,  # noqa: S113 - `pipeline` has one for the whole of a call
            limits=httpx.Limits(
                max_connections=MAX_CONNECTIONS,
                max_keepalive_connections=MAX_CONNECTIONS,
                keepalive_expiry=KEEPALIVE_S,
            ),
        )

    @property
    def healthy(self) -> bool:
        return self._trouble is None

    @property
    def reason(self) -> str:
        return self._trouble[0] if self._trouble else ""

    @property
    def since(self) -> datetime | None:
        return self._trouble[1] if self._trouble else None

    async def pipeline(self, *commands: Command) -> list[Any]:
        if not commands:
            return []
        admission = self._circuit.admit()
        if admission is None:
            raise CacheUnavailable(f"not asked, since the last calls failed: {self.reason}")
        try:
            async with asyncio.timeout(self._budget_s):
                results = await self._ask(commands)
        except Exception as error:  # whatever an endpoint can do to us, callers meet one error
            self._base64 = None
            reason = _reason(error, self._budget_s)
            self._trouble = (reason, self.since or datetime.now(UTC))
            self._circuit.failed(admission, reason)
            raise CacheUnavailable(reason) from error
        except BaseException:
            self._circuit.released(admission)
            raise
        self._trouble = None
        self._circuit.succeeded()
        return results

    async def close(self) -> None:
        await self._client.aclose()

    async def _ask(self, commands: Sequence[Command]) -> list[Any]:
        if self._base64 is not None:
            return [_decoded(result, self._base64) for result in await self._post(commands)]
        pong, *results = await self._post([("PING",), *commands])
        if pong not in ("PONG", _PONG_BASE64):
            raise CacheUnavailable("the endpoint does not answer PING with PONG")
        self._base64 = pong == _PONG_BASE64
        return [_decoded(result, self._base64) for result in results]

    async def _post(self, commands: Sequence[Command]) -> list[Any]:
        async with self._client.stream("POST", self._url, content=json.dumps(commands)) as response:
            if response.status_code != 200:
                raise CacheUnavailable(f"the endpoint answered HTTP {response.status_code}")
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > MAX_RESPONSE_BYTES:
                    raise CacheUnavailable(f"the answer is over {MAX_RESPONSE_BYTES} bytes")
        return _results(body, len(commands))


_PONG_BASE64: Final = base64.b64encode(b"PONG").decode()


def _reason(error: Exception, budget_s: float) -> str:
    if isinstance(error, CacheUnavailable):
        return str(error)
    if isinstance(error, TimeoutError | httpx.TimeoutException):
        return f"no answer within {budget_s * 1_000:.0f} ms"
    if isinstance(error, httpx.ConnectError):
        return "no connection to the endpoint"
    return f"no usable answer ({type(error).__name__})"


def _results(body: bytearray, count: int) -> list[Any]:
    try:
        answers = json.loads(body)
    except (ValueError, RecursionError):
        raise CacheUnavailable("the answer is not JSON") from None
    if not isinstance(answers, list) or len(answers) != count:
        raise CacheUnavailable(f"the answer is not a list of {count} results")
    for answer in answers:
        if not isinstance(answer, dict) or ("result" in answer) == ("error" in answer):
            raise CacheUnavailable("the answer has an entry that is neither a result nor an error")
        if "error" in answer:
            raise CacheUnavailable(f"a command failed: {str(answer['error'])[:200]}")
    return [answer["result"] for answer in answers]


def _decoded(value: Any, is_base64: bool) -> Any:
    if not is_base64:
        return value
    if isinstance(value, list):
        return [_decoded(part, True) for part in value]
    # Upstash leaves a plain OK as it is, others encode that too
    if isinstance(value, str) and value != "OK":
        return base64.b64decode(value, validate=True).decode()
    return value
