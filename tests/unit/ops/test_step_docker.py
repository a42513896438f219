"""Docker against recorded facts."""

from __future__ import annotations

import json

import pytest

from ops.steps import docker
from tests.unit.ops.steptest import Answers, Ran, recorded, run_step

PATH = "/etc/docker/daemon.json"
SETTINGS = "Settings of the Docker daemon"
UBUNTU: Answers = {"-release": ["/etc/os-release", 'NAME="Ubuntu"', 'VERSION_ID="24.04"', "ID=ubuntu", "---"]}
DONE: Answers = {**recorded("debian13-bare"), **recorded("debian13-done")}


def with_file(content: str) -> Ran:
    return run_step(docker.apply, {f"cat {PATH}": content, f"sha1sum {PATH}": f"{'0' * 40}  {PATH}", **DONE})


def test_nothing_to_do() -> None:
    assert run_step(docker.apply, recorded("debian13-done")).operations == {}


def test_debian_13() -> None:
    ran = run_step(docker.apply, recorded("debian13-bare"))
    assert list(ran.operations) == [SETTINGS, "Install Docker", "Run Docker"]
    assert (
        "install -y --no-install-recommends docker.io docker-cli docker-compose docker-buildx apparmor ||"
        in (ran.operations["Install Docker"][1])
    )
    assert "systemctl enable docker.service" in ran.operations["Run Docker"]


def test_ubuntu_24_04() -> None:
    ran = run_step(docker.apply, {**UBUNTU, **recorded("debian13-bare")})
    assert (
        "install -y --no-install-recommends docker.io docker-compose-v2 docker-buildx apparmor ||"
        in (ran.operations["Install Docker"][1])
    )


def test_logs_are_bounded_and_containers_outlive_the_daemon() -> None:
    settings = json.loads(run_step(docker.apply, recorded("debian13-bare")).files[PATH])
    assert settings["log-driver"] == "json-file"
    assert settings["log-opts"] == {"max-size": "10m", "max-file": "3"}
    assert settings["live-restore"] is True


def test_what_the_operator_set_stays_and_what_is_replaced_is_told() -> None:
    ran = with_file(
        '{"registry-mirrors": ["https://mirror.example.com"], "live-restore": false, "log-opts": {"tag": "x"}}'
    )
    settings = json.loads(ran.files[PATH])
    assert settings["registry-mirrors"] == ["https://mirror.example.com"]
    assert settings["live-restore"] is True
    assert settings["log-opts"] == {"tag": "x", "max-size": "10m", "max-file": "3"}
    (note,) = ran.notes
    assert '"live-restore": false' in note
    assert "registry-mirrors" not in note


def test_options_of_another_log_driver_go_with_it() -> None:
    ran = with_file('{"log-driver": "syslog", "log-opts": {"syslog-address": "udp://log.example.com"}}')
    assert json.loads(ran.files[PATH])["log-opts"] == {"max-size": "10m", "max-file": "3"}
    assert "syslog" in ran.notes[0]


def test_a_change_is_validated_and_the_daemon_reloaded_before_it_is_restarted() -> None:
    commands = with_file("{}").operations[SETTINGS]
    assert "dockerd --validate" in commands[-2]
    assert commands[-1].index("systemctl reload") < commands[-1].index("systemctl restart")


@pytest.mark.parametrize("content", ["{", "[]", "nothing"])
def test_a_file_that_is_not_json_is_not_overwritten(content: str) -> None:
    ran = with_file(content)
    assert ran.operations == {}
    assert "correct it, or remove it" in ran.refused[0]
