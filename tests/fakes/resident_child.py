"""A second process on a store, which does what it is told and says when it was answered.

    python resident_child.py <directory>

A line of stdin is `[verb, argument, …]`, a line of stdout the answer, both as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from fakes.store import Store, etag, open_store, row
from warmstart.store import resident
from warmstart.store.resident import Residents


async def do(store: Store, residents: Residents, verb: str, arguments: list[Any]) -> Any:
    tenant = store.tenant()
    match verb:
        case "save":
            [inserted] = await store.writer.insert([row(arguments[0], vector=arguments[1])])
            return inserted.id
        case "edit":
            return (await tenant.edit(arguments[0], {"source": arguments[1]}, None, etag))["source"]
        case "delete":
            return (await tenant.delete(arguments[0], None, etag))["id"]
        case "restore":
            return (await tenant.restore(arguments[0]))["id"]
        case "destroy":
            return await tenant.delete_for_good(arguments[0], None, etag)
        case "rename":
            return await tenant.rename_namespace(*arguments)
        case "optimize":
            return await store.maintenance(retention_s=1).optimize()
        case "held":
            snapshot = await residents.get("alice")
            assert snapshot is not None
            return {r["id"]: r["source"] for r in snapshot.get(arguments).values()}
    raise ValueError(verb)


async def main(directory: Path) -> None:
    loop = asyncio.get_running_loop()
    resident.LOAD_WAIT_S = 30.0  # type: ignore[misc]  # a busy machine is no reason to go to the table
    async with open_store(directory) as store:
        residents = Residents(store.table, 64 << 20)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            verb, *arguments = json.loads(line)
            print(json.dumps(await do(store, residents, verb, arguments)), flush=True)
        await residents.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
