"""SSH against recorded facts; the second connection is made by a program `ssh` of the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ops.steps import ssh
from tests.unit.ops.steptest import Answers, recorded, run_step

Program = Callable[[str, str], Path]
NAME = "Keys only for SSH"
UNDO = "sh /var/lib/warmstart/undo/ssh.sh"
#: Both machines: what was not asked on the one that was done is as on the bare one.
DONE: Answers = {**recorded("debian13-bare"), **recorded("debian13-done")}
FAILS: Answers = {f"{UNDO}; echo": {"success": False, "stderr": "no new connection"}}


def test_nothing_to_do_and_no_login_tried(program: Program) -> None:
    calls = program("ssh", "exit 255")
    assert run_step(ssh.apply, recorded("debian13-done")).operations == {}
    assert calls.read_text() == ""


def test_the_way_back_is_armed_before_anything_is_changed_and_disarmed_after_a_login(program: Program) -> None:
    program("ssh", "exit 0")
    commands = run_step(ssh.apply, recorded("debian13-bare")).operations[NAME]
    order = [
        next(index for index, command in enumerate(commands) if part in command)
        for part in (
            "cp -p /etc/ssh/sshd_config.d/10-warmstart.conf", "put /var/lib/warmstart/undo/ssh.sh",
            "systemctl restart warmstart-undo-ssh.timer", "PasswordAuthentication no", "sshd -t",
            "grep -qix 'PasswordAuthentication no'", "systemctl try-reload-or-restart ssh.service", "call _prove",
        )
    ]  # fmt: skip
    assert order == sorted(order)
    assert "systemctl stop warmstart-undo-ssh.timer" in commands[-1]
    assert order[-1] == len(commands) - 2


def test_every_change_that_fails_is_undone_at_once(program: Program) -> None:
    program("ssh", "exit 0")
    commands = run_step(ssh.apply, recorded("debian13-bare")).operations[NAME]
    armed = next(index for index, command in enumerate(commands) if "enable --quiet warmstart-undo" in command)
    for command in commands[armed + 1 : -2]:
        assert command.endswith(f"|| {{ {UNDO}; exit 1; }}")


def test_the_way_back_restores_reloads_and_goes(program: Program) -> None:
    program("ssh", "exit 0")
    ran = run_step(ssh.apply, recorded("debian13-bare"))
    script = ran.files["/var/lib/warmstart/undo/ssh.sh"]
    assert "else rm -f /etc/ssh/sshd_config.d/10-warmstart.conf" in script
    assert "systemctl try-reload-or-restart ssh.service" in script
    assert "disable --quiet warmstart-undo-ssh.timer" in script
    timer = ran.files["/etc/systemd/system/warmstart-undo-ssh.timer"]
    assert "OnActiveSec=120" in timer
    assert "WantedBy=timers.target" in timer  # a boot in between doesn't lose it


def test_a_login_that_works_keeps_the_change(program: Program) -> None:
    calls = program("ssh", "exit 0")
    ran = run_step(ssh.apply, recorded("debian13-bare"), execute=True, ssh_key="/keys/id", ssh_port=2222)
    assert ran.succeeded
    assert "stop warmstart-undo-ssh.timer" in ran.sent[-1]
    assert not any(command.startswith(f"{UNDO}; echo") for command in ran.sent)
    for words in calls.read_text().splitlines():
        assert "ControlPath=none" in words  # no connection that is open already
        assert "PreferredAuthentications=publickey" in words
        assert "-p 2222" in words
        assert "-i /keys/id" in words


def test_a_login_that_fails_after_the_change_takes_it_back(program: Program, tmp_path: Path) -> None:
    program(
        "ssh",
        f"mkdir {tmp_path}/first && exit 0; echo 'Permission denied (publickey).' >&2; exit 255",
    )
    ran = run_step(ssh.apply, {**FAILS, **recorded("debian13-bare")}, execute=True)
    assert not ran.succeeded
    assert ran.sent[-1].startswith(f"{UNDO}; echo")
    assert "Permission denied (publickey)." in ran.sent[-1]


def test_who_logs_in_without_a_key_is_not_locked_out(program: Program) -> None:
    program("ssh", "echo 'root@203.0.113.10: Permission denied (publickey,password).' >&2; exit 255")
    ran = run_step(ssh.apply, recorded("debian13-bare"))
    assert ran.operations == {}
    (fault,) = ran.refused
    assert "Permission denied (publickey,password)" in fault
    assert "`ssh-copy-id -p 22 root@203.0.113.10`" in fault


def test_drop_ins_that_would_not_count(program: Program) -> None:
    program("ssh", "exit 0")
    ran = run_step(ssh.apply, {"/etc/ssh/sshd_config | head": "Port 22", **recorded("debian13-bare")})
    assert "put that line at its beginning" in ran.refused[0]


def test_who_is_stricter_stays_so(program: Program) -> None:
    program("ssh", "exit 0")
    ran = run_step(ssh.apply, {"sshd -T": "permitrootlogin no", **recorded("debian13-bare")}, ssh_user="ann")
    assert any("PermitRootLogin no" in command for command in ran.commands)
    assert not any("PermitRootLogin prohibit-password" in command for command in ran.commands)


@pytest.mark.parametrize(
    "answers",
    [
        {"is-enabled --quiet warmstart-undo-ssh.timer": "yes"},  # a deploy died before its proof
        {"sshd -T": "passwordauthentication yes"},  # another file came before
        {"cat /etc/ssh/sshd_config.d/10-warmstart.conf": "PasswordAuthentication no"},
    ],
)
def test_what_is_not_as_it_was_proved_is_done_again(program: Program, answers: Answers) -> None:
    program("ssh", "exit 0")
    assert NAME in run_step(ssh.apply, {**answers, **DONE}).operations
