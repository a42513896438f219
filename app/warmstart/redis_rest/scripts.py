"""Scripts with Upstash's first line, for a Redis that does not know it.

Upstash's own libraries begin their scripts with `#!lua flags=allow-key-locking`,
which open-source Redis refuses. The line is taken off, so Redis knows the script
by another SHA than its clients do. Which belongs to which is kept here and, so
that it outlives this process, in Redis.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from redis.exceptions import ResponseError

from warmstart.redis_rest.link import Command, Reply

PREFIX: Final = b"redis-rest:script:"
KEPT_S: Final = 30 * 86_400
MAX_KNOWN: Final = 1_000

_WITH_TEXT: Final = frozenset({b"EVAL", b"EVAL_RO"})
_WITH_SHA: Final = frozenset({b"EVALSHA", b"EVALSHA_RO"})


class Scripts:
    def __init__(self) -> None:
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        self._learned: dict[bytes, bytes] = {}

    def unknown(self, commands: Sequence[Command]) -> list[bytes]:
        """The keys in Redis that may tell what the SHAs in these commands stand for."""
        shas = dict.fromkeys(sha for command in commands for sha in _shas(command))
        return [PREFIX + sha for sha in shas if sha not in self._known]

    def remember(self, keys: Sequence[bytes], shas: Reply) -> None:
        if isinstance(shas, ResponseError):
            return
        for key, sha in zip(keys, shas, strict=True):
            if sha is not None:
                self._keep(key.removeprefix(PREFIX), sha)

    def adapt(self, command: Command) -> Command:
        """The command as Redis takes it."""
        name = command[0].upper()
        if name in _WITH_TEXT and len(command) > 1:
            return (name, self._plain(command[1]), *command[2:])
        if _is_load(command):
            return (*command[:2], self._plain(command[2]))
        if shas := _shas(command):
            start = 1 if name in _WITH_SHA else 2
            return (*command[:start], *map(self._sha, shas), *command[start + len(shas) :])
        return command

    def learned(self) -> list[Command]:
        """Commands that keep in Redis what `adapt` learned since the last call."""
        learned, self._learned = self._learned, {}
        return [(b"SET", PREFIX + ours, sha, b"EX", b"%d" % KEPT_S) for ours, sha in learned.items()]

    def reply(self, command: Command, reply: Reply) -> Reply:
        """SCRIPT LOAD answers with the SHA of the script as it was sent."""
        return _sha1(command[2]) if isinstance(reply, bytes) and _is_load(command) else reply

    def _plain(self, script: bytes) -> bytes:
        if not script.startswith(b"#!lua"):
            return script
        # the line's end stays, so that errors name the right line
        plain = script[len(script.partition(b"\n")[0]) :]
        ours, sha = _sha1(script), _sha1(plain)
        if self._known.get(ours) != sha:
            self._keep(ours, sha)
            self._learned[ours] = sha
        return plain

    def _sha(self, sha: bytes) -> bytes:
        if sha in self._known:
            self._known.move_to_end(sha)
        return self._known.get(sha, sha)

    def _keep(self, ours: bytes, sha: bytes) -> None:
        self._known[ours] = sha
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)


def _sha1(script: bytes) -> bytes:
    return hashlib.sha1(script, usedforsecurity=False).hexdigest().encode()


def _is_load(command: Command) -> bool:
    return len(command) == 3 and command[0].upper() == b"SCRIPT" and command[1].upper() == b"LOAD"


def _shas(command: Command) -> list[bytes]:
    name = command[0].upper()
    if name in _WITH_SHA:
        return [sha.lower() for sha in command[1:2]]
    if name == b"SCRIPT" and len(command) > 2 and command[1].upper() == b"EXISTS":
        return [sha.lower() for sha in command[2:]]
    return []
