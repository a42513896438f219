"""What the HTTP surface needs of the running service; the real one is `warmstart.runtime`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from warmstart.config import Settings
from warmstart.memory import MemoryAPI
from warmstart.metrics import Metrics

if TYPE_CHECKING:
    from warmstart.keys import Identity
    from warmstart.ratelimit import Allowance


class Keys(Protocol):
    async def identify(self, api_key: str) -> Identity: ...


class Limiter(Protocol):
    async def hit(self, bucket: str, key: str, limit: int, window_s: int = 60) -> Allowance: ...
    async def peek(self, bucket: str, key: str, limit: int, window_s: int = 60) -> Allowance: ...


class Runtime(Protocol):
    @property
    def settings(self) -> Settings: ...
    @property
    def keys(self) -> Keys: ...
    @property
    def limiter(self) -> Limiter: ...
    @property
    def metrics(self) -> Metrics: ...
    def service(self, user_id: str) -> MemoryAPI: ...
    async def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether memories can be served, and what is degraded, in words fit for the public."""
        ...


OpenRuntime = Callable[[], AbstractAsyncContextManager[Runtime]]
