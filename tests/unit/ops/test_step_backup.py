"""The step of backups: what it asks the program on the VM for, and the units."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ops.steps import backup
from tests.unit.ops.steptest import Answers, run_step

PENDING = f"{backup.PROGRAM} backup --pending"
CONFIGURE = f"{backup.PROGRAM} backup --configure"
FOLDER = "/etc/systemd/system"
UNITS = {f"{FOLDER}/warmstart-{name}.{kind}" for name in ("backup", "drill") for kind in ("service", "timer")}
FOLDER_IS = f"user=root group=root mode=drwxr-xr-x atime=1 mtime=1 ctime=1 size=4096 '{FOLDER}'"
OFFSITE = {"offsite": "s3:https://s3.example.com/b"}
HIDDEN = "s3cr3t-of-the-operator"


def bare(pending: Any = "make RESTIC_PASSWORD", **configured: Any) -> Answers:
    """A machine without units, whose program says this."""
    return {
        "dpkg -l": [f"ii  {name}  1.0  amd64  x" for name in backup.PACKAGES], PENDING: pending,
        CONFIGURE: configured.get("configured", json.dumps({"made": "f00d"})),
        re.compile(rf"\A! \(test -e {FOLDER} \|\|"): FOLDER_IS,
        re.compile(rf"\A! \(test -e {FOLDER}/warmstart-"): "",
        re.compile(r"\A(if \[ -n \"\$TMPDIR\"|! \(test -e /tmp)"): "", re.compile("systemctl"): "",
    }  # fmt: skip


def test_a_bare_machine_gets_settings_and_timers() -> None:
    ran = run_step(backup.apply, bare(), backup={"at": "22:05"})
    assert "Backups: make RESTIC_PASSWORD" in ran.operations
    assert ran.files.keys() == UNITS
    assert "OnCalendar=*-*-* 22:05:00" in ran.files[f"{FOLDER}/warmstart-backup.timer"]
    # past midnight
    assert "OnCalendar=Sun *-*-* 01:05:00" in ran.files[f"{FOLDER}/warmstart-drill.timer"]
    for name in ("backup", "drill"):
        assert f"ExecStart={backup.PROGRAM} {name}\n" in ran.files[f"{FOLDER}/warmstart-{name}.service"]
        timer = ran.files[f"{FOLDER}/warmstart-{name}.timer"]
        assert "Persistent=true" in timer
        assert "RandomizedDelaySec=" in timer
        assert any("enable" in command and f"warmstart-{name}.timer" in command for command in ran.commands)
    assert any("on the VM alone" in note for note in ran.notes)


def test_a_password_that_was_made_is_shown_once() -> None:
    ran = run_step(backup.apply, bare(), dry=False, execute=True, backup=OFFSITE)
    assert ran.succeeded
    assert [note for note in ran.notes if "f00d" in note]
    again = run_step(backup.apply, bare(configured=json.dumps({"made": ""})), dry=False, execute=True, backup=OFFSITE)
    assert again.notes == []


def test_what_the_program_refuses_fails_the_step() -> None:
    refused = {"success": False, "stderr": "Refused: RESTIC_PASSWORD of the inventory is not the one on the machine"}
    ran = run_step(backup.apply, bare(configured=refused), dry=False, execute=True)
    assert not ran.succeeded


def test_what_is_there_already_is_left_alone() -> None:
    ran = run_step(backup.apply, bare(pending=""), backup=OFFSITE)
    assert not [name for name in ran.operations if name.startswith("Backups")]
    assert not any(CONFIGURE in command for command in [*ran.sent, *ran.commands])


def test_a_plan_of_a_bare_machine_says_that_backups_will_be_set_up() -> None:
    ran = run_step(backup.apply, bare(pending={"success": False, "stderr": "not found"}))
    assert "Backups: set up" in ran.operations


def test_secrets_of_the_operator_go_by_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(f"-----BEGIN\n{HIDDEN}\n-----END\n")
    monkeypatch.setenv("S3_SECRET", HIDDEN)
    given = {"AWS_SECRET_ACCESS_KEY": "env:S3_SECRET", "OFFSITE_SSH_KEY": f"file:{tmp_path}/key"}
    said: list[str] = []
    remote = backup.remote

    def listening(command: str, *, stdin: str = "", **options: Any) -> Any:
        said.append(stdin)
        return remote(command, stdin=stdin, **options)

    monkeypatch.setattr(backup, "remote", listening)
    ran = run_step(backup.apply, bare(), secrets=given, backup={**OFFSITE, "keep_daily": 3})
    assert HIDDEN not in "\n".join([*ran.sent, *ran.commands, *ran.operations])
    assert json.loads(said[0]) == {
        "RESTIC_REPOSITORY": "/var/backups/warmstart", "OFFSITE_REPOSITORY": OFFSITE["offsite"], "KEEP_DAILY": "3",
        "KEEP_WEEKLY": "4", "KEEP_MONTHLY": "6", "AWS_SECRET_ACCESS_KEY": HIDDEN,
        "OFFSITE_SSH_KEY": f"-----BEGIN\n{HIDDEN}\n-----END",
    }  # fmt: skip
