"""A save, a search, an MCP call and a delete through the public URL, where something was changed."""

from __future__ import annotations

from typing import Final

from ops import program
from ops.runner import Deploy, DeployError

TIMEOUT_S: Final = 300


def apply(deploy: Deploy) -> None:
    # it changes nothing, so it is no operation
    if deploy.dry or not deploy.changes:
        return
    ok, last = program.stream(deploy, program.VM_PROGRAM, "smoke", timeout_s=TIMEOUT_S)
    if not ok:
        raise DeployError("smoke", f"the test through {deploy.target.url}", "\n".join(f"    {line}" for line in last))
