"""What LanceDB imports for others is not loaded, and LanceDB works without it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, json, sys
import warmstart.store.table
import lancedb
from pydantic import BaseModel

async def main():
    connection = await lancedb.connect_async(sys.argv[1])
    table = await connection.create_table("t", data=[{"id": 1}])
    return await table.count_rows()

rows = asyncio.run(main())
unused = [m for name, m in sys.modules.items() if name.startswith("lance_namespace_urllib3_client")]
models = [v for m in unused for v in vars(m).values() if isinstance(v, type) and issubclass(v, BaseModel)]
print(json.dumps([rows, len(unused) > 0, len(models)]))
"""


def test_lancedb_works_without_its_client_of_remote_catalogs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "db")], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(done.stdout) == [1, True, 0]
