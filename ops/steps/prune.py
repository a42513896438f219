"""Old releases, their images and build caches, within bounds; never those of the release before."""

from __future__ import annotations

from typing import Final

from pyinfra.api.host import Host
from pyinfra.api.state import State
from pyinfra.operations import python

from ops import program
from ops.facts import remote
from ops.runner import Deploy

TIMEOUT_S: Final = 600


def apply(deploy: Deploy) -> None:
    found = remote(f"{program.VM_PROGRAM} prune --pending")
    if found.ok and (what := found.out.strip().splitlines()):
        python.call(name=f"Remove what is old: {', '.join(what)}", function=_prune, deploy=deploy)


def _prune(state: State, host: Host, deploy: Deploy) -> bool:
    return program.run(state, host, deploy, program.VM_PROGRAM, "prune", timeout_s=TIMEOUT_S)
