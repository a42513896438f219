"""Where a page ends: what a client hands back to get the next one."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from typing import Any

from warmstart.errors import Invalid
from warmstart.store.reads import Order
from warmstart.store.schema import Row, at_us


def decode_version(cursor: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", cursor, re.ASCII):
        raise Invalid("cursor: not one of ours; leave it out to start from the newest", field="cursor")
    return int(cursor)


def encode(row: Row, query: str, order: Order) -> str:
    at = int(row["created_at"].timestamp() * 1_000_000)
    key = [row["importance"], at, row["id"]] if order == "importance" else [at, row["id"]]
    return base64.urlsafe_b64encode(json.dumps([_digest(query), *key]).encode()).decode().rstrip("=")


def decode(cursor: str, query: str, order: Order) -> tuple[Any, ...]:
    """The keyset of the last row of the page before; a cursor only continues its own query."""
    try:
        digest, *key = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        *importance, at, last_id = key
        if len(importance) != (order == "importance") or not isinstance(last_id, str):
            raise ValueError(cursor)
        keyset = (*(float(i) for i in importance), at_us(int(at)), last_id)
    except (ValueError, TypeError, OverflowError, binascii.Error):
        raise Invalid("cursor: not one of ours; leave it out to start from the first page", field="cursor") from None
    if digest != _digest(query):
        raise Invalid("cursor: belongs to a query with other filters; repeat that query", field="cursor")
    return keyset


def _digest(query: str) -> str:
    return hashlib.sha256(query.encode()).hexdigest()[:12]
