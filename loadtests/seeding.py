"""The data set into the target: straight into a store of our own, through the API elsewhere."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Final

import httpx

from loadtests.data import TOPICS, Generator, Item, topic_text

PROGRAM: Final = Path(__file__).with_name("store_seed.py")
BATCH: Final = 100
#: Batches under way at once.
WRITERS: Final = 4
#: Two cores embed some ten memories a second; where none was in this time, none will be.
STALL_S: Final = 180.0
POLL_S: Final = 1.0
STORE_TIMEOUT_S: Final = 900.0

Progress = Callable[[str], None]


class SeedingFailed(Exception):
    """The target did not take the data set, and what it said."""


def into_store(
    items: Iterator[Item], user_ids: Sequence[str], command: Sequence[str], environ: Mapping[str, str] | None = None
) -> int:
    """Rows inserted, by `store_seed.py` as run by `command` where the store is."""
    first = {"topics": [topic_text(i) for i in range(len(TOPICS))], "seed": 1}
    lines = [json.dumps(first)]
    lines += [json.dumps({"user_id": user_ids[i.tenant], "topic": i.topic, "memory": i.memory}) for i in items]
    done = subprocess.run(
        [*command, PROGRAM.read_text()],
        input="\n".join(lines) + "\n", capture_output=True, text=True, timeout=STORE_TIMEOUT_S, env=environ,
    )  # fmt: skip
    if done.returncode:
        raise SeedingFailed(f"the store could not be seeded:\n{done.stderr[-3000:]}")
    return int(done.stdout.split()[-1])


def through_api(items: Iterator[Item], clients: Sequence[httpx.Client], tell: Progress) -> int:
    """Rows created, in batches; returns when all of them have their vectors. `clients`: one a tenant."""
    by_tenant: dict[int, list[dict[str, object]]] = {}
    batches = []
    for item in items:
        pending = by_tenant.setdefault(item.tenant, [])
        pending.append(item.memory)
        if len(pending) == BATCH:
            batches.append((item.tenant, by_tenant.pop(item.tenant)))
    batches += list(by_tenant.items())

    def send(batch: tuple[int, list[dict[str, object]]]) -> int:
        tenant, memories = batch
        answer = clients[tenant].post("/v1/memories/batch", json={"memories": memories})
        if answer.status_code != 200:
            raise SeedingFailed(f"a batch was answered {answer.status_code}: {answer.text[:300]}")
        return int(answer.json()["created"])

    with ThreadPoolExecutor(WRITERS) as pool:
        created = sum(pool.map(send, batches))
    wait_for_queue(clients, tell)
    return created


def wait_for_queue(clients: Sequence[httpx.Client], tell: Progress) -> None:
    """Until nothing waits for its vector; raises SeedingFailed where it stands still."""
    for client in clients:
        before, moved = -1, time.monotonic()
        while queued := client.get("/v1/health").raise_for_status().json()["queued"]:
            if queued != before:
                tell(f"{queued} memories wait for their vectors")
                before, moved = queued, time.monotonic()
            if time.monotonic() - moved > STALL_S:
                raise SeedingFailed(f"{queued} memories wait for their vectors, and none got one in {STALL_S:.0f} s")
            time.sleep(POLL_S)


def data_set(seed: int, prefix: str, tenants: int, count: int) -> Iterator[Item]:
    return islice(Generator(seed, prefix, tenants).items(count), count)
