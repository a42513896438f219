"""The in-process stand-in for Redis, with the few commands this service sends, and bounds of its own."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from warmstart.errors import CacheUnavailable

Argument = str | int | float
Command = tuple[Argument, ...]

#: The stand-in's bounds: entries, and the characters they hold together.
MAX_ENTRIES: Final = 20_000
MAX_CHARS: Final = 64 * 2**20
#: What an entry or a set's member counts beside its own characters.
ENTRY_OVERHEAD: Final = 100
#: Redis counts in 64 bits, and refuses what would overflow.
MAX_EXPIRY_MS: Final = 2**62


@dataclass(slots=True)
class _Entry:
    value: str | dict[str, None]  # a set is a dict without values: it keeps its order
    expires_at: float | None = None

    def size(self) -> int:
        if isinstance(self.value, str):
            return len(self.value)
        return sum(len(member) + ENTRY_OVERHEAD for member in self.value)


_INTEGER = re.compile(r"-?[1-9][0-9]{0,18}|0")


class LocalCache:
    """The commands this service uses, as Redis does them, in this process; the least used goes first.

    A call runs without interruption: no two of one event loop interleave.
    """

    healthy: Final = True
    reason: Final = ""
    since: Final = None

    def __init__(self, max_entries: int = MAX_ENTRIES, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_entries = max_entries
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._chars = 0

    def __len__(self) -> int:
        return len(self._entries)

    async def pipeline(self, *commands: Command) -> list[Any]:
        results: list[Any] = []
        failed: CacheUnavailable | None = None
        for command in commands:
            try:
                results.append(self.execute(*command))
            except CacheUnavailable as error:
                failed = failed or error
        if failed:
            raise failed
        return results

    async def close(self) -> None:
        self._entries.clear()
        self._chars = 0

    def execute(self, name: Argument, *arguments: Argument) -> Any:
        """One command; CacheUnavailable with Redis' own text where Redis would refuse it."""
        known = _COMMANDS.get(str(name).upper())
        if known is None:
            raise CacheUnavailable(f"ERR unknown command '{name}'")
        run, least, most = known
        if not least <= len(arguments) <= (most or len(arguments)):
            raise CacheUnavailable(f"ERR wrong number of arguments for '{str(name).lower()}' command")
        return run(self, *map(str, arguments))

    # -- entries

    def _find(self, key: str) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_at is not None and entry.expires_at <= self._clock():
            self._drop(key)
            return None
        self._entries.move_to_end(key)
        return entry

    def _string(self, key: str) -> str | None:
        entry = self._find(key)
        if entry is None:
            return None
        if not isinstance(entry.value, str):
            raise CacheUnavailable("WRONGTYPE Operation against a key holding the wrong kind of value")
        return entry.value

    def _store(self, key: str, entry: _Entry) -> None:
        self._drop(key)
        self._entries[key] = entry
        self._chars += entry.size() + len(key) + ENTRY_OVERHEAD
        while len(self._entries) > self._max_entries or self._chars > MAX_CHARS:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: str) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self._chars -= entry.size() + len(key) + ENTRY_OVERHEAD
        return True

    # -- commands

    def _ping(self) -> str:
        return "PONG"

    def _get(self, key: str) -> str | None:
        return self._string(key)

    def _mget(self, *keys: str) -> list[str | None]:
        found = [self._find(key) for key in keys]
        return [entry.value if entry and isinstance(entry.value, str) else None for entry in found]

    def _set(self, key: str, value: str, *options: str) -> str | None:
        expires_at, only_new = None, False
        rest = iter(options)
        for option in rest:
            if option.upper() == "NX":
                only_new = True
            elif option.upper() in ("EX", "PX") and expires_at is None:
                milliseconds = _integer(next(rest, "")) * (1_000 if option.upper() == "EX" else 1)
                if not 0 < milliseconds < MAX_EXPIRY_MS:
                    raise CacheUnavailable("ERR invalid expire time in 'set' command")
                expires_at = self._clock() + milliseconds / 1_000
            else:
                raise CacheUnavailable("ERR syntax error")
        if only_new and self._find(key):
            return None
        self._store(key, _Entry(value, expires_at))
        return "OK"

    def _del(self, *keys: str) -> int:
        return sum(self._find(key) is not None and self._drop(key) for key in keys)

    def _exists(self, *keys: str) -> int:
        return sum(self._find(key) is not None for key in keys)

    def _incr(self, key: str) -> int:
        return self._incrby(key, "1")

    def _incrby(self, key: str, amount: str) -> int:
        step = _integer(amount)
        value = self._string(key)
        total = _integer("0" if value is None else value) + step
        if not -(2**63) <= total < 2**63:
            raise CacheUnavailable("ERR increment or decrement would overflow")
        entry = self._find(key)
        self._store(key, _Entry(str(total), entry.expires_at if entry else None))
        return total

    def _expire(self, key: str, seconds: str) -> int:
        return self._expire_in(key, _integer(seconds))

    def _pexpire(self, key: str, milliseconds: str) -> int:
        return self._expire_in(key, _integer(milliseconds) / 1_000)

    def _expire_in(self, key: str, seconds: float) -> int:
        entry = self._find(key)
        if entry is None:
            return 0
        if seconds <= 0:
            self._drop(key)
        else:
            entry.expires_at = self._clock() + seconds
        return 1

    def _ttl(self, key: str) -> int:
        left = self._pttl(key)
        return left if left < 0 else (left + 500) // 1_000

    def _pttl(self, key: str) -> int:
        entry = self._find(key)
        if entry is None:
            return -2
        return -1 if entry.expires_at is None else round((entry.expires_at - self._clock()) * 1_000)

    def _sadd(self, key: str, *members: str) -> int:
        had = self._members(key)
        entry = self._find(key)
        now = {**had, **dict.fromkeys(members)}
        self._store(key, _Entry(now, entry.expires_at if entry else None))
        return len(now) - len(had)

    def _smembers(self, key: str) -> list[str]:
        return list(self._members(key))

    def _members(self, key: str) -> dict[str, None]:
        entry = self._find(key)
        if entry is None:
            return {}
        if isinstance(entry.value, str):
            raise CacheUnavailable("WRONGTYPE Operation against a key holding the wrong kind of value")
        return entry.value


def _integer(text: str) -> int:
    if not _INTEGER.fullmatch(text) or not -(2**63) <= int(text) < 2**63:
        raise CacheUnavailable("ERR value is not an integer or out of range")
    return int(text)


#: Name, method, least and most arguments (0: any number).
_COMMANDS: Final[dict[str, tuple[Callable[..., Any], int, int]]] = {
    "PING": (LocalCache._ping, 0, 0),
    "GET": (LocalCache._get, 1, 1),
    "SET": (LocalCache._set, 2, 0),
    "MGET": (LocalCache._mget, 1, 0),
    "DEL": (LocalCache._del, 1, 0),
    "EXISTS": (LocalCache._exists, 1, 0),
    "INCR": (LocalCache._incr, 1, 1),
    "INCRBY": (LocalCache._incrby, 2, 2),
    "EXPIRE": (LocalCache._expire, 2, 2),
    "PEXPIRE": (LocalCache._pexpire, 2, 2),
    "TTL": (LocalCache._ttl, 1, 1),
    "PTTL": (LocalCache._pttl, 1, 1),
    "SADD": (LocalCache._sadd, 2, 0),
    "SMEMBERS": (LocalCache._smembers, 1, 1),
}
