"""What the engine's allocators keep."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["serve", "worker", "migrate"])
def test_arrow_is_not_imported_before_its_allocator_is_chosen(command: str) -> None:
    program = f"""
import sys
import warmstart.cli.{command} as command
assert "pyarrow" not in sys.modules
command.limit_allocators()
import pyarrow
print(pyarrow.default_memory_pool().backend_name)
"""
    environ = {k: v for k, v in os.environ.items() if k != "ARROW_DEFAULT_MEMORY_POOL"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["system"]
