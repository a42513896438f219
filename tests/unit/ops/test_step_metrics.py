"""The step that has the machine watched: a timer for all, and alerts for whom the inventory names."""

from __future__ import annotations

import hashlib
import re

import pytest

from ops.steps import metrics
from tests.unit.ops.steptest import Answers, run_step

WEBHOOK = "https://hooks.example.com/T0/s3cret"
ALERTS = {"webhook": WEBHOOK}
PENDING = "warmstart-vm alerts --pending"
FOLDER = "/etc/systemd/system"
#: Whether the folder and the units are there, and whether the timer runs.
FOLDER_STAT = re.compile(r"\A! \(test -e /etc/systemd/system \|\|")
UNIT_STAT = re.compile(r"\A! \(test -e /etc/systemd/system/warmstart-metrics\.")
TEMP = re.compile(r"\A(if \[ -n \"\$TMPDIR\"|! \(test -e /tmp)")
TIMER_FACTS = re.compile("systemctl")
FOLDER_IS = f"user=root group=root mode=drwxr-xr-x atime=1 mtime=1 ctime=1 size=4096 '{FOLDER}'"


def bare(pending: object = "prometheus: does not run") -> Answers:
    return {PENDING: pending, FOLDER_STAT: FOLDER_IS, UNIT_STAT: "", TEMP: "", TIMER_FACTS: ""}  # type: ignore[dict-item]


def test_a_bare_machine_gets_a_timer_and_the_watchers() -> None:
    ran = run_step(metrics.apply, bare(), alerts=ALERTS)
    assert ran.files.keys() == {f"{FOLDER}/warmstart-metrics.service", f"{FOLDER}/warmstart-metrics.timer"}
    assert "systemctl daemon-reload" in ran.commands
    assert any("enable" in command and "warmstart-metrics.timer" in command for command in ran.commands)
    assert "/usr/local/bin/warmstart-vm alerts" in "\n".join(ran.commands)
    assert "Alerts: prometheus: does not run" in ran.operations
    assert ran.notes == []


def test_where_the_webhook_is_shows_in_no_command() -> None:
    ran = run_step(metrics.apply, bare(), alerts=ALERTS)
    assert WEBHOOK not in "\n".join([*ran.sent, *ran.commands, *ran.operations])


def test_without_anybody_to_tell_it_says_so_and_watches_nothing() -> None:
    ran = run_step(metrics.apply, bare(pending=""))
    assert [name for name in ran.operations if name.startswith("Alerts")] == []
    assert any("Nobody is told" in note for note in ran.notes)


def test_who_is_not_wanted_any_more_goes() -> None:
    ran = run_step(metrics.apply, bare(pending="prometheus: is not wanted any more"))
    assert "Alerts: prometheus: is not wanted any more" in ran.operations


@pytest.mark.parametrize("alerts", [{}, ALERTS])
def test_a_plan_of_a_machine_without_the_program(alerts: dict[str, str]) -> None:
    answer = {"success": False, "stderr": "sh: 1: warmstart-vm: not found"}
    ran = run_step(metrics.apply, bare(pending=answer), alerts=alerts)
    assert ("Alerts: nobody watches yet" in ran.operations) is bool(alerts)


def test_the_second_time_nothing_changes() -> None:
    there: Answers = {PENDING: "", FOLDER_STAT: FOLDER_IS}
    for kind, text in (("service", metrics.SERVICE), ("timer", metrics.TIMER)):
        path = f"{FOLDER}/warmstart-metrics.{kind}"
        is_ = f"user=root group=root mode=-rw-r--r-- atime=1 mtime=1 ctime=1 size={len(text)} '{path}'"
        there[re.compile(rf"\A! \(test -e {re.escape(path)} ")] = is_
        for method in ("md5", "sha1", "sha256"):
            digest = hashlib.new(method, text.encode(), usedforsecurity=False).hexdigest()
            there[f"{method}sum {path}"] = f"{digest}  {path}"
    unit = "Id=warmstart-metrics.timer"
    there["--property SubState"] = [unit, "SubState=waiting"]
    there["--property UnitFileState"] = [unit, "UnitFileState=enabled"]
    ran = run_step(metrics.apply, there, alerts=ALERTS)
    assert ran.operations == {}
