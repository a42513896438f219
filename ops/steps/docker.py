"""Docker of the distribution: its log files bounded, its containers surviving a restart of the daemon."""

from __future__ import annotations

import json
from typing import Any, Final

from pyinfra import host
from pyinfra.facts.server import LinuxName
from pyinfra.operations import systemd

from ops import packages
from ops.facts import text
from ops.files import written
from ops.runner import Deploy, Refused

#: apparmor: the kernels have it switched on, and without its tools no container starts.
PACKAGES: Final = {
    "Debian": ("docker.io", "docker-cli", "docker-compose", "docker-buildx", "apparmor"),
    "Ubuntu": ("docker.io", "docker-compose-v2", "docker-buildx", "apparmor"),
}
FILE: Final = "/etc/docker/daemon.json"
SETTINGS: Final[dict[str, Any]] = {
    "log-driver": "json-file",
    "log-opts": {"max-size": "10m", "max-file": "3"},
    "live-restore": True,
    "no-new-privileges": True,
}
#: Before the package is there, there is nothing to be told.
VALIDATE: Final = f"! command -v dockerd >/dev/null || dockerd --validate --config-file {FILE}"
#: The reload brings live-restore into force: containers then outlive the restart, which the log driver needs.
RESTART: Final = (
    "! systemctl is-active --quiet docker.service || "
    "{ systemctl reload docker.service && systemctl restart docker.service; }"
)


def apply(deploy: Deploy) -> None:
    # the daemon's first start finds its settings
    written(name="Settings of the Docker daemon", path=FILE, text=merged(deploy, text(FILE)), then=[VALIDATE, RESTART])
    packages.installed(name="Install Docker", packages=PACKAGES[host.get_fact(LinuxName)])
    systemd.service(name="Run Docker", service="docker.service", running=True, enabled=True)


def merged(deploy: Deploy, present: str | None) -> str:
    """What the operator's file says, with ours put over it."""
    try:
        before = json.loads(present) if present and present.strip() else {}
    except ValueError as error:
        raise Refused([f"{FILE} is not JSON ({error}): correct it, or remove it"]) from None
    if not isinstance(before, dict):
        raise Refused([f"{FILE} is not a JSON object: correct it, or remove it"])
    after = {**before, **SETTINGS}
    if isinstance(before.get("log-opts"), dict):
        # options of another driver would keep the daemon from starting
        same_driver = before.get("log-driver", "json-file") == SETTINGS["log-driver"]
        after["log-opts"] = {**(before["log-opts"] if same_driver else {}), **SETTINGS["log-opts"]}
    if lost := {name: before[name] for name in SETTINGS if name in before and before[name] != after[name]}:
        deploy.notes.append(f"{FILE} had other values, which were replaced: {json.dumps(lost)}")
    return json.dumps(after, indent=2) + "\n"
