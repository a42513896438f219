"""Which memory replaces which: kept in the row's `metadata`, first of all and under a key of its own.

`superseded_by`, on the replaced row, is what counts. `supersedes`, on the new
one, says what its deletion gives back and its restoration takes again. A row
that is superseded has no vector and an empty `search_text`, so no arm and no
rung can find it, at no cost to any search.

Links never form a ring: one is only ever laid between two rows that nothing
replaces, which makes the second one the new end of a chain.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from warmstart.memory import LINKS_KEY

_START: Final = f'{{"{LINKS_KEY}":{{'


class Links(NamedTuple):
    superseded_by: str | None = None
    supersedes: str | None = None


NONE: Final = Links()
#: How the metadata of a row with links begins; nothing that a user gives can.
LINKED: Final = _START


#: And of a row that another replaces.
HIDDEN: Final = f'{_START}"superseded_by":"'


def replaced_by(memory_id: str) -> str:
    """How the metadata of a row begins that `memory_id` replaces."""
    return f'{HIDDEN}{memory_id}"'


def join(metadata: dict[str, Any], links: Links = NONE) -> str:
    """The column's text."""
    kept = {name: memory_id for name, memory_id in links._asdict().items() if memory_id is not None}
    return json.dumps(({LINKS_KEY: kept} if kept else {}) | metadata, ensure_ascii=False, separators=(",", ":"))


def split(text: str) -> tuple[dict[str, Any], Links]:
    metadata: dict[str, Any] = json.loads(text)
    if not text.startswith(_START):
        return metadata, NONE
    return metadata, Links(**metadata.pop(LINKS_KEY))


def links_of(text: str) -> Links:
    return split(text)[1] if text.startswith(_START) else NONE


def relink(text: str, **changed: str | None) -> str:
    """`text` with other links."""
    metadata, links = split(text)
    return join(metadata, links._replace(**changed))
