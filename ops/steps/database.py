"""Databases, embeddings and the way in as the release has them, then its migrations."""

from __future__ import annotations

from pyinfra.operations import python

from ops.rolling import call, pending
from ops.runner import Deploy


def apply(deploy: Deploy) -> None:
    found = pending(deploy)
    if found is None:
        python.call(name="Bring up services", function=call, deploy=deploy, command="services")
        python.call(name="Bring the database to the release's schema", function=call, deploy=deploy, command="migrate")
        return
    if what := [*(f"{name} ({why})" for name, why in found["services"].items()), *found["files"]]:
        python.call(name=f"Bring up services: {', '.join(what)}", function=call, deploy=deploy, command="services")
    if found["migrations"] != "none":
        python.call(name="Bring the database to the release's schema", function=call, deploy=deploy, command="migrate")
