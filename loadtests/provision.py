"""Makes tenants of the run's own, each with a key without a limit, and one key with the ordinary limit.

A program of its own, run where the service's database is. Reads `{"names": [tenant, …]}`, writes `{"tenants": [{"id",
"key"}, …], "limited_key"}`; the limited key is the last tenant's.
"""

from __future__ import annotations

import asyncio
import json
import sys

from warmstart.cli.database import bookkeeping
from warmstart.config import load


async def main() -> None:
    names = json.load(sys.stdin)["names"]
    async with bookkeeping(load(), allow_root=True) as books:
        ids = [await books.create_tenant(name) for name in names]
        keys = [await books.create_key(tenant, "loadtest", unlimited=True) for tenant in ids]
        limited = await books.create_key(ids[-1], "loadtest-limited")
    tenants = [{"id": tenant, "key": key} for tenant, key in zip(ids, keys, strict=True)]
    print(json.dumps({"tenants": tenants, "limited_key": limited}))


asyncio.run(main())
