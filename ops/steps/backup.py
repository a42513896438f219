"""Backups: a snapshot each night, a drill each week, and the repository they go to."""

from __future__ import annotations

import json
from typing import Any, Final

from pyinfra.api.exceptions import PyinfraError
from pyinfra.operations import python, systemd

from ops import packages
from ops.facts import remote
from ops.files import written
from ops.inventory import given_secrets
from ops.runner import Deploy
from ops.vm.stack import last_json

PROGRAM: Final = "/usr/local/bin/warmstart-vm"
#: openssh-client: for an sftp place
PACKAGES: Final = ("restic", "openssh-client")
SECRETS: Final = ("RESTIC_PASSWORD", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "OFFSITE_SSH_KEY")
#: When the night's backup is over, also one of many hours of upload most often.
DRILL_AFTER_H: Final = 3

#: A day is the alert's patience: what takes longer than this is ended, and has failed.
SERVICE: Final = """\
[Unit]
Description=Warmstart: {what}
After=docker.service network-online.target
Wants=network-online.target

[Service]
Type=oneshot
ExecStart={program} {command}
TimeoutStartSec=14h
"""
TIMER: Final = """\
[Unit]
Description=Warmstart: {what}

[Timer]
OnCalendar={calendar}
# not with all other machines that back up to the same place
RandomizedDelaySec=15m
# one that was missed, the machine being off, is made up for
Persistent=true

[Install]
WantedBy=timers.target
"""


def apply(deploy: Deploy) -> None:
    packages.installed(name="Install restic", packages=PACKAGES)
    _configure(deploy)
    hour, _, minute = deploy.target.backup.at.partition(":")
    _timer("backup", "a backup each night", f"*-*-* {hour}:{minute}:00")
    _timer("drill", "a drill each week", f"Sun *-*-* {(int(hour) + DRILL_AFTER_H) % 24:02}:{minute}:00")
    if not deploy.target.backup.offsite:
        deploy.notes.append(
            "Backups are on the VM alone, and lost with it: `backup` in the inventory takes an offsite repository."
        )


def wanted(deploy: Deploy) -> dict[str, str]:
    backup = deploy.target.backup
    given = given_secrets(deploy.target)
    return {
        "RESTIC_REPOSITORY": backup.repository, "OFFSITE_REPOSITORY": backup.offsite,
        "KEEP_DAILY": str(backup.keep_daily), "KEEP_WEEKLY": str(backup.keep_weekly),
        "KEEP_MONTHLY": str(backup.keep_monthly), **{name: given[name] for name in SECRETS if name in given},
    }  # fmt: skip


def _configure(deploy: Deploy) -> None:
    # by standard input, for there are secrets in it
    settings = json.dumps(wanted(deploy))
    pending = remote(f"{PROGRAM} backup --pending", stdin=settings)
    # where it can't be asked, such as in a plan of a bare machine, the operation tells why
    lines = pending.out.splitlines() if pending.ok else ["set up"]
    if lines:
        python.call(name="Backups: " + ", ".join(lines), function=_put, deploy=deploy, settings=settings)


def _put(deploy: Deploy, settings: str) -> None:
    """When its turn comes: the password that was made is read from its answer, and shown to nobody but the operator."""
    done = remote(f"{PROGRAM} backup --configure", stdin=settings)
    if not done.ok:
        raise PyinfraError(done.last_error)
    answer: dict[str, Any] = last_json(done.out)
    if answer["made"]:
        deploy.notes.append(
            f"Password of the backups, shown this once: {answer['made']}\n"
            "Keep it away from the VM: without it, no backup can be read when the VM is lost."
        )


def _timer(name: str, what: str, calendar: str) -> None:
    service = SERVICE.format(what=what, program=PROGRAM, command=name)
    # a timer that runs goes on by its old hour until it is started anew
    anew = [f"systemctl try-restart warmstart-{name}.timer"]
    units = {"service": (service, []), "timer": (TIMER.format(what=what, calendar=calendar), anew)}
    for kind, (text, then) in units.items():
        written(
            name=f"The unit warmstart-{name}.{kind}", path=f"/etc/systemd/system/warmstart-{name}.{kind}", text=text,
            then=["systemctl daemon-reload", *then],
        )  # fmt: skip
    systemd.service(
        name=f"The timer warmstart-{name} runs", service=f"warmstart-{name}.timer", running=True, enabled=True
    )
