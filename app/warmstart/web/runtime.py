"""What the HTTP surface needs of the running service; the real one is `warmstart.runtime`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from warmstart.config import Settings
from warmstart.memory import ListRequest, MemoryAPI, Mode
from warmstart.metrics import Metrics

if TYPE_CHECKING:
    from warmstart.account import Account
    from warmstart.activity import Activity
    from warmstart.keys import Identity
    from warmstart.ratelimit import Allowance


class Keys(Protocol):
    async def identify(self, api_key: str) -> Identity: ...
    async def identify_hash(self, key_hash: str) -> Identity: ...


class Limiter(Protocol):
    async def hit(self, bucket: str, key: str, limit: int, window_s: int = 60) -> Allowance: ...
    async def peek(self, bucket: str, key: str, limit: int, window_s: int = 60) -> Allowance: ...


class Service(MemoryAPI, Protocol):
    """What a person can do beyond a program: the dashboard's own."""

    async def count(self, request: ListRequest) -> int: ...
    async def delete_many(self, ids: Sequence[str]) -> int: ...
    async def empty_trash(self, until: datetime) -> int: ...


class Runtime(Protocol):
    @property
    def settings(self) -> Settings: ...
    @property
    def keys(self) -> Keys: ...
    @property
    def limiter(self) -> Limiter: ...
    @property
    def metrics(self) -> Metrics: ...
    def service(self, user_id: str) -> Service: ...
    def account(self, user_id: str) -> Account: ...
    @property
    def activity(self) -> Activity: ...
    def rung(self) -> tuple[list[str], Mode]:
        """What is degraded now, and the rung a search would be answered from."""
        ...

    async def ready(self) -> tuple[bool, dict[str, Any]]:
        """Whether memories can be served, and what is degraded, in words fit for the public."""
        ...


OpenRuntime = Callable[[], AbstractAsyncContextManager[Runtime]]
