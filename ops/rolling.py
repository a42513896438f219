"""The parts of a roll-out that the VM's program does: what is to be done, and doing it."""

from __future__ import annotations

import shlex
from typing import Any, Final

from pyinfra.api.host import Host
from pyinfra.api.state import State

from ops import program
from ops.facts import remote
from ops.runner import Deploy, Refused
from ops.vm.stack import last_json

#: Longer than all waits on the VM together: what hangs there ends by itself, and is undone.
TIMEOUT_S: Final = 1800


def pending(deploy: Deploy) -> dict[str, Any] | None:
    """What of the release is not so yet; None in a plan whose release is not on the VM. Raises Refused."""
    if not deploy.release.laid_down:
        return None
    command = shlex.join([program.VM_PROGRAM, "pending", deploy.release.id, "--json"])
    found = remote(command)
    if not found.ok:
        raise Refused([found.err.strip() or found.last_error])
    return dict(last_json(found.out))


def call(state: State, host: Host, deploy: Deploy, command: str) -> bool:
    """`services`, `migrate` or `rollout` of the release."""
    return program.run(state, host, deploy, program.VM_PROGRAM, command, deploy.release.id, timeout_s=TIMEOUT_S)
