"""What prompts have been given: not twice in a conversation, and never saved back as a new memory.

Kept in the cache for a day, under hashes, so it can be lost: then a memory may be given again,
and one that is saved back word for word is only caught where its content is there already.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Final

from warmstart.context import HEADER
from warmstart.errors import CacheUnavailable
from warmstart.memory import Hit, fold
from warmstart.upstash import Cache

TTL_S: Final = 24 * 3600
_WORDS = re.compile(r"\w+")
_ENTRY = re.compile(r"^### ", re.MULTILINE)


class Given:
    """Of one tenant."""

    def __init__(self, cache: Cache, user_id: str) -> None:
        self._cache = cache
        self._user_id = user_id

    async def to(self, conversation_id: str | None) -> set[str]:
        """The ids that this conversation has had already."""
        if conversation_id is None:
            return set()
        return {one for one in await self._list("SMEMBERS", self._key("c", conversation_id)) if one is not None}

    async def remember(self, conversation_id: str | None, hits: Sequence[Hit]) -> None:
        texts = {text: hit.id for hit in hits for text in _forms(hit)}
        commands: list[tuple[str | int, ...]] = [
            ("SET", self._key("g", text), memory_id, "EX", TTL_S) for text, memory_id in texts.items() if text
        ]
        if conversation_id is not None:
            key = self._key("c", conversation_id)
            commands += [("SADD", key, *(hit.id for hit in hits)), ("EXPIRE", key, TTL_S)]
        try:
            await self._cache.pipeline(*commands)
        except CacheUnavailable:
            return

    async def recognise(self, contents: Sequence[str]) -> list[str | None]:
        """For each content that is a block, or a memory as a block had it: the id of (the first of) what was given."""
        asked = [[self._key("g", words) for part in _parts(content) if (words := _flat(part))] for content in contents]
        keys = list(dict.fromkeys(key for parts in asked for key in parts))
        known = dict(zip(keys, await self._list("MGET", *keys) if keys else [], strict=False))
        return [known[parts[0]] if parts and all(known.get(part) for part in parts) else None for parts in asked]

    async def _list(self, *command: str) -> list[str | None]:
        """The command's result; what an endpoint says that is no list of strings is as good as nothing."""
        try:
            [found] = await self._cache.pipeline(command)
        except CacheUnavailable:
            return []
        return [one if isinstance(one, str) else None for one in found] if isinstance(found, list) else []

    def _key(self, kind: str, text: str) -> str:
        owned = self._user_id.encode() + b"\0" + text.encode()
        return f"ws:{kind}:{hashlib.sha256(owned).hexdigest()}"


def is_block(text: str) -> bool:
    """Whether `text` is a context block, whole or from its beginning."""
    return text.lstrip().startswith(HEADER.strip())


def _parts(content: str) -> list[str]:
    """The memories of a block; another text is one part."""
    if not is_block(content):
        return [content]
    body = content.lstrip().removeprefix(HEADER.strip())
    return [part for part in _ENTRY.split(body) if part.strip()]


def _forms(hit: Hit) -> list[str]:
    """What may come back of a memory: with its title and facts, and without."""
    facts = " ".join(hit.facts)
    forms = (hit.content, f"{hit.content} {facts}", f"{hit.title} {hit.content}", f"{hit.title} {hit.content} {facts}")
    return list(dict.fromkeys(_flat(form) for form in forms))


def _flat(text: str) -> str:
    """The words alone: marks of headings, bullets and escapes come and go."""
    return " ".join(_WORDS.findall(fold(text).lower()))
