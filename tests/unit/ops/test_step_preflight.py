"""Preflight against what a Debian 13 machine answered, with one thing or many wrong."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest

from ops.steps import preflight
from tests.unit.ops.steptest import Ran, exactly, recorded, run_step

HELD_BY_US = "0.0.0.0:80->80/tcp, 0.0.0.0:443->443/tcp|warmstart-caddy-1|warmstart"
HELD_BY_OTHER = "0.0.0.0:443->8000/tcp|shop|"


def preflight_of(
    *changes: tuple[str, str | None],
    domain: str = "",
    skew: float = 0,
    address: str = "203.0.113.10",
    **fields: Any,
) -> Ran:
    """The recorded answers with lines replaced (None: left out) or, for a key that is not there, added."""
    answers: Any = recorded("debian13-bare")[exactly(": preflight")]
    lines = [line for line in answers if line.partition(" ")[0] not in {"clock", *(key for key, _ in changes)}]
    lines += [f"clock {int(time.time() + skew)}", *(f"{key} {value}" for key, value in changes if value is not None)]
    return run_step(preflight.apply, {": preflight": lines}, domain=domain, address="" if domain else address, **fields)


def test_a_debian_13_machine_is_fit() -> None:
    assert preflight_of().refused == []


def test_an_ubuntu_24_04_machine_is_fit() -> None:
    assert preflight_of(("os", "ubuntu 24.04"), ("os_name", "Ubuntu 24.04.3 LTS")).refused == []


def test_the_smallest_machine_is_fit() -> None:
    changes = [("cpus", "2"), ("ram_kb", "4005000"), ("disk", "17300000 /"), ("inodes", "1300000 1250000")]
    assert preflight_of(*changes).refused == []


def test_alerts_want_more_memory_than_4_gb() -> None:
    (fault,) = preflight_of(("ram_kb", "4005000"), alerts={"webhook": "https://hooks.example.com/x"}).refused
    assert "at least 4400 MB" in fault


def test_it_asks_once() -> None:
    assert len(preflight_of().sent) == 1


FLAGS = "fpu sse4_2 avx f16c fma popcnt movbe"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([("os", "debian 12"), ("os_name", "Debian 12")], "Debian 12: take a VM with Debian 13 or Ubuntu 24.04"),
        ([("os", None), ("os_name", None)], "the system is unknown"),
        ([("init", "init")], "not systemd"),
        ([("arch", "aarch64")], "amd64"),
        ([("flags", FLAGS)], "lacks avx2, bmi1, bmi2, abm"),
        ([("cpus", "1")], "at least 2"),
        ([("ram_kb", "2000000")], "1953 MB of RAM"),
        ([("ram_kb", "")], "an unknown amount of RAM"),
        ([("disk", "5000000 /")], "4882 MB free on /:"),
        ([("inodes", "500000 1000")], "1000 inodes"),
        ([("listener", 'LISTEN 0 511 *:80 *:* users:(("nginx",pid=9,fd=6))')], "port 80 is held by nginx"),
        ([("listener", "LISTEN 0 511 [::]:443 [::]:*")], "port 443 is held by a program that could not be named"),
        ([("container", HELD_BY_OTHER)], "port 443 is held by the container shop"),
        ([("firewall", "ufw")], "`ufw disable`"),
        ([("firewall", "firewalld")], "`systemctl disable --now firewalld`"),
        ([("docker_package", "docker-ce")], "docker-ce is installed"),
        ([("snap_docker", "/snap/docker")], "docker (snap) is installed"),
        ([("missing", "apt-get")], "not on this machine: apt-get"),
        ([("dpkg", "The following packages are only half configured")], "dpkg --configure -a"),
        ([("sources", "0")], "no package source"),
        ([("uid", "1000")], "don't run as root"),
    ],
)
def test_one_fault_is_told_with_the_way_out(changes: list[tuple[str, str | None]], says: str) -> None:
    (fault,) = preflight_of(*changes).refused
    assert says in fault


def test_all_faults_are_told_at_once() -> None:
    faults = preflight_of(
        ("os", "fedora 44"), ("ram_kb", "900000"), ("cpus", "1"), ("firewall", "ufw"), skew=-90
    ).refused
    assert len(faults) == 5


@pytest.mark.parametrize(("skew", "says"), [(-45, "behind"), (45, "ahead of")])
def test_a_clock_that_is_off(skew: float, says: str) -> None:
    (fault,) = preflight_of(skew=skew).refused
    assert says in fault


@pytest.mark.parametrize("skew", [-25, 25])
def test_a_clock_that_is_nearly_right(skew: float) -> None:
    assert preflight_of(skew=skew).refused == []


def test_our_own_proxy_may_hold_the_ports_and_our_own_images_the_disk() -> None:
    proxy = 'LISTEN 0 4096 0.0.0.0:443 0.0.0.0:* users:(("docker-proxy",pid=77,fd=4))'
    assert preflight_of(("container", HELD_BY_US), ("listener", proxy), ("disk", "5000000 /")).refused == []


def test_root_that_can_not_be_had() -> None:
    answer = {"success": False, "stderr": "sudo: a password is required"}
    (fault,) = run_step(preflight.apply, {": preflight": answer}, ssh_user="ann").refused
    assert "sudo: a password is required" in fault
    assert "let ann sudo" in fault


class TestDomain:
    def run(self, monkeypatch: pytest.MonkeyPatch, *found: str, own: str = "10.0.0.5") -> Ran:
        names = {"203.0.113.10": ["203.0.113.10"], "memory.example.com": list(found)}

        def getaddrinfo(name: str, *_: object, **__: object) -> list[Any]:
            if not names.get(name):
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in names[name]]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return preflight_of(("addresses", own), domain="memory.example.com")

    def test_leads_to_the_vm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.run(monkeypatch, "203.0.113.10").refused == []

    def test_has_no_address(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (fault,) = self.run(monkeypatch).refused
        assert "add an A record" in fault

    def test_leads_elsewhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (fault,) = self.run(monkeypatch, "203.0.113.10", "203.0.113.99", own="1.1.1.1").refused
        assert "leads to 203.0.113.99" in fault

    def test_has_an_address_that_nothing_answers_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        (fault,) = self.run(monkeypatch, "203.0.113.10", "2606:4700::1", own="10.0.0.5 2606:4700::1").refused
        assert "AAAA record (2606:4700::1)" in fault

    def test_can_not_be_compared_behind_an_address_translation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ran = self.run(monkeypatch, "8.8.8.8")
        assert ran.refused == []
        assert "Make sure that memory.example.com (8.8.8.8) leads to it" in ran.notes[0]
