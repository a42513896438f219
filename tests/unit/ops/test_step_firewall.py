"""The firewall against recorded facts; that the rules hold is seen from outside a real machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ops.steps import firewall
from tests.unit.ops.steptest import Answers, recorded, run_step

Program = Callable[[str, str], Path]
NAME = "Load the firewall"
DONE: Answers = {**recorded("debian13-bare"), **recorded("debian13-done")}
UNDO = "sh /var/lib/warmstart/undo/firewall.sh"


def test_nothing_to_do() -> None:
    assert run_step(firewall.apply, recorded("debian13-done")).operations == {}


def test_a_bare_machine_gets_its_rules_and_keeps_them_only_when_proved() -> None:
    ran = run_step(firewall.apply, recorded("debian13-bare"))
    assert " nftables" in ran.operations["Install nftables"][1]
    commands = ran.operations[NAME]
    order = [
        next(index for index, command in enumerate(commands) if part in command)
        for part in (
            "systemctl restart warmstart-undo-firewall.timer", "nft --check -f", "call _prove",
            "mv /etc/warmstart/firewall.nft.new /etc/warmstart/firewall.nft",
            "systemctl enable --quiet warmstart-firewall.service", "/var/lib/warmstart/firewall.proved",
            "systemctl stop warmstart-undo-firewall.timer; rm",
        )
    ]  # fmt: skip
    assert order == sorted(order)
    assert order[-1] == len(commands) - 1


def test_a_login_that_fails_leaves_nothing_that_a_boot_would_load(program: Program) -> None:
    program("ssh", "exit 255")
    answers: Answers = {f"{UNDO}; echo": {"success": False}, **recorded("debian13-bare")}
    ran = run_step(firewall.apply, answers, execute=True)
    assert not ran.succeeded
    assert ran.sent[-1].startswith(f"{UNDO}; echo")
    assert not any(
        "firewall.nft.new" in command or "enable --quiet warmstart-firewall" in command for command in ran.sent
    )


def test_only_what_was_asked_for_is_open() -> None:
    rules = firewall.rules([22, 2222], [80, 443])
    assert "elements = { 80, 443 }" in rules
    assert "elements = { 22, 2222 }" in rules
    assert "policy drop" in rules
    assert "ct status dnat ct original proto-dst @web accept" in rules
    # others' rules stay
    assert "flush ruleset" not in rules


def test_ssh_where_it_is_in_use() -> None:
    ran = run_step(firewall.apply, {"$SSH_CONNECTION": "22\n2200", **recorded("debian13-bare")})
    assert any("elements = { 22, 2200 }" in command for command in ran.commands)


def test_ports_of_the_proxy_that_are_not_the_usual() -> None:
    ran = run_step(firewall.apply, recorded("debian13-bare"), http_port=8080, https_port=8443)
    assert any("elements = { 8080, 8443 }" in command for command in ran.commands)


def test_no_port_of_ssh_no_firewall() -> None:
    ran = run_step(firewall.apply, {"$SSH_CONNECTION": "", **recorded("debian13-bare")})
    assert "which port" in ran.refused[0]


@pytest.mark.parametrize(
    "answers",
    [
        {"list table inet warmstart": "0" * 64},  # a rule was taken out by hand
        {"is-active --quiet warmstart-firewall.service": "no"},
        {"cat /etc/warmstart/firewall.nft": "table inet warmstart {}"},
        {"cat /etc/systemd/system/nftables.service.d": "[Service]"},
        {"is-enabled --quiet warmstart-undo-firewall.timer": "yes"},  # a deploy died before its proof
    ],
)
def test_what_is_not_as_it_was_proved_is_done_again(answers: Answers) -> None:
    assert list(run_step(firewall.apply, {**answers, **DONE}).operations) == [NAME]
