"""Removes for good what a run wrote: all memories of the namespaces that begin with its name, and no other."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import httpx

PAGE: Final = 200
WORKERS: Final = 8
#: Of one deletion that was refused for the moment.
TRIES: Final = 5
RETRY: Final = frozenset({429, 502, 503, 504})


class PurgeFailed(Exception):
    """Something of the run is left, and where."""


def counts(client: httpx.Client) -> tuple[int, int]:
    """(active, trashed) memories of the key's tenant."""
    found = client.get("/v1/memories/counts").raise_for_status().json()
    return found["active"], found["trashed"]


def purge(clients: Sequence[httpx.Client], prefix: str) -> int:
    """How many memories were removed. Raises PurgeFailed."""
    if not prefix:
        raise ValueError("a purge without a prefix would take everything")
    with ThreadPoolExecutor(WORKERS) as pool:
        return sum(_purge(client, prefix, pool) for client in clients)


def _purge(client: httpx.Client, prefix: str, pool: ThreadPoolExecutor) -> int:
    removed = 0
    for namespace in _namespaces(client, prefix):
        # all ids first: a page that is read while rows go would skip some
        ids = list(_ids(client, namespace))
        removed += sum(pool.map(lambda i: _delete(client, i), ids))
    if left := _namespaces(client, prefix):
        raise PurgeFailed(f"memories of the run are still there, in {', '.join(left)}")
    return removed


def _namespaces(client: httpx.Client, prefix: str) -> list[str]:
    found = client.get("/v1/namespaces").raise_for_status().json()["namespaces"]
    return [n["name"] for n in found if n["name"].startswith(f"{prefix}-") and n["active"] + n["trashed"]]


def _ids(client: httpx.Client, namespace: str) -> Iterator[str]:
    params: dict[str, Any] = {"namespace": namespace, "include_deleted": "true", "limit": PAGE}
    while True:
        page = client.get("/v1/memories", params=params).raise_for_status().json()
        yield from (memory["id"] for memory in page["memories"])
        if not page["next_cursor"]:
            return
        params["cursor"] = page["next_cursor"]


def _delete(client: httpx.Client, memory_id: str) -> int:
    for attempt in range(TRIES):
        answer = client.delete(f"/v1/memories/{memory_id}", params={"hard": "true"})
        if answer.status_code in (204, 404):
            return int(answer.status_code == 204)
        if answer.status_code not in RETRY:
            break
        time.sleep(min(float(answer.headers.get("retry-after", 1)), 10.0) if attempt < TRIES - 1 else 0)
    raise PurgeFailed(f"{memory_id} could not be removed: {answer.status_code} {answer.text[:200]}")
