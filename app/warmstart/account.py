"""A tenant's own API keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmstart.store.bookkeeping import ApiKey

if TYPE_CHECKING:
    from warmstart.runtime import Runtime


class Account:
    """Made anew for each request, as `MemoryService` is. Each method raises BookkeepingUnavailable without Postgres."""

    def __init__(self, runtime: Runtime, user_id: str) -> None:
        self._bookkeeping = runtime.bookkeeping
        self._user_id = user_id

    async def keys(self) -> list[ApiKey]:
        """The active ones, oldest first."""
        return [key for key in await self._bookkeeping.list_keys(self._user_id) if key.revoked_at is None]

    async def create_key(self, name: str) -> str:
        """The new key, which is shown this once."""
        return await self._bookkeeping.create_key(self._user_id, name, actor=self._user_id)

    async def revoke_key(self, key_id: str) -> None:
        """Within 10 s no process takes it any more. Raises NotFound for another tenant's key as for none."""
        await self._bookkeeping.revoke_key(key_id, self._user_id, actor=self._user_id)
