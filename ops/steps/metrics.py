"""The machine's figures once a minute, and who is told when something breaks."""

from __future__ import annotations

import json
from typing import Final

from pyinfra.operations import server, systemd

from ops.facts import remote
from ops.files import written
from ops.program import VM_PROGRAM
from ops.runner import Deploy

UNIT: Final = "warmstart-metrics"
#: Its image is there already; this is for containers to become healthy.
ALERTS_TIMEOUT_S: Final = 240

SERVICE: Final = f"""\
[Unit]
Description=Figures of this machine, for Prometheus

[Service]
Type=oneshot
ExecStart={VM_PROGRAM} metrics
TimeoutStartSec=50
Nice=10
# what is wrong is said; that it ran, once a minute, is not
SyslogLevel=notice
LogLevelMax=notice
"""
TIMER: Final = """\
[Unit]
Description=Figures of this machine, for Prometheus

[Timer]
OnBootSec=15s
OnUnitActiveSec=60s
AccuracySec=5s

[Install]
WantedBy=timers.target
"""


def apply(deploy: Deploy) -> None:
    _timer()
    _alerts(deploy)


def _timer() -> None:
    for kind, text in (("service", SERVICE), ("timer", TIMER)):
        written(
            name=f"The timer of the machine's figures ({kind})", path=f"/etc/systemd/system/{UNIT}.{kind}", text=text,
            then=["systemctl daemon-reload"],
        )  # fmt: skip
    systemd.service(name="The timer of the machine's figures runs", service=f"{UNIT}.timer", running=True, enabled=True)


def _alerts(deploy: Deploy) -> None:
    alerts = deploy.target.alerts
    wanted = json.dumps(alerts.model_dump())
    pending = remote(f"{VM_PROGRAM} alerts --pending", stdin=wanted)
    if pending.ok:
        lines = pending.out.splitlines()
    elif alerts.wanted:  # a bare machine in a plan; where it is another fault, the operation says it
        lines = ["nobody watches yet"]
    else:
        lines = []
    if lines:
        # by standard input, since the address of a webhook often is a secret
        server.shell(
            name="Alerts: " + "; ".join(lines), commands=[f"{VM_PROGRAM} alerts"],
            _stdin=wanted, _timeout=ALERTS_TIMEOUT_S,
        )  # fmt: skip
    if not alerts.wanted:
        deploy.notes.append("Nobody is told when something breaks: the inventory has no `alerts`.")
