"""The release in the place of the one that serves, without a failed request; undone where it does not pass."""

from __future__ import annotations

from pyinfra.operations import python

from ops.rolling import call, pending
from ops.runner import Deploy


def apply(deploy: Deploy) -> None:
    found = pending(deploy)
    if found is not None and found["rolled_out"] and not found["app"]:
        return
    what = ", ".join(f"{name} ({why})" for name, why in found["app"].items()) if found else ""
    name = f"Roll out {deploy.release.id}" + (f": {what}" if what else "")
    python.call(name=name, function=call, deploy=deploy, command="rollout")
