"""What can be said of a roll-out without an engine: paths, command lines, what differs, the lock."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ops.vm.changes import Wanted, before_the_api, left_over, newest, stale_files
from ops.vm.rollout import other
from ops.vm.stack import Container, Refused, Release, Stack, VmError

ROOT = Path(__file__).resolve().parents[3]
SAID = {
    "Id": "c1", "Name": "/warmstart-api-b-1", "Image": "sha256:i", "RestartCount": 2,
    "State": {
        "Status": "running", "ExitCode": 0, "StartedAt": "2026-01-01T00:00:00.5Z", "Health": {"Status": "healthy"},
    },
    "Config": {
        "Healthcheck": {"Test": ["CMD", "warmstart", "healthcheck"]},
        "Labels": {
            "com.docker.compose.service": "api-b", "com.docker.compose.config-hash": "h",
            "com.docker.compose.project.config_files":
                "/opt/warmstart/releases/r1/compose/compose.yml,/opt/warmstart/releases/r1/compose.images.yml",
        },
    },
    "NetworkSettings": {"Networks": {"warmstart_backend": {"IPAddress": "172.18.0.2"}}},
}  # fmt: skip


def container(**changes: Any) -> Container:
    values = {**Container.of(SAID, "warmstart").__dict__, **changes}
    return Container(**values)


@pytest.fixture
def stack(tmp_path: Path) -> Stack:
    return Stack(tmp_path, "scratch")


def lay(stack: Stack, name: str, files: dict[str, str] | None = None) -> Release:
    folder = stack.opt / "releases" / name
    (folder / "compose").mkdir(parents=True)
    (folder / "compose/compose.yml").write_text("services: {}\n")
    for path, text in (files or {}).items():
        (folder / "compose" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "compose" / path).write_text(text)
    (folder / "manifest.json").write_text(json.dumps({"images": {"api": {"name": "a:1", "id": "sha256:1"}}}))
    return stack.release(name)


def test_a_container_is_read_from_what_docker_says() -> None:
    found = Container.of(SAID, "warmstart")
    assert (found.service, found.release, found.health, found.restarts) == ("api-b", "r1", "healthy", 2)
    assert found.addresses == {"backend": "172.18.0.2"}
    assert found.probe == ("warmstart", "healthcheck")
    shell = {**SAID, "Config": {"Healthcheck": {"Test": ["CMD-SHELL", "redis-cli ping"]}, "Labels": None}}
    assert Container.of(shell, "warmstart").probe == ("sh", "-c", "redis-cli ping")
    assert Container.of(shell, "warmstart").release == ""


def test_no_secret_is_on_the_command_line_of_compose(stack: Stack) -> None:
    release = lay(stack, "r1")
    words = stack.compose(release, "up", "--detach", "api")
    assert words[:2] == ["docker", "compose"]
    assert words[-3:] == ["up", "--detach", "api"]
    assert words[words.index("--project-name") + 1] == "scratch"
    assert words[words.index("--project-directory") + 1] == str(stack.root / "opt/warmstart/config")
    files = [words[i + 1] for i, word in enumerate(words) if word in ("--env-file", "--file")]
    assert files == [
        f"{stack.root}/etc/warmstart/settings.env", f"{stack.root}/etc/warmstart/secrets.env",
        f"{release.folder}/compose/compose.yml", f"{release.folder}/compose.images.yml",
    ]  # fmt: skip


def test_a_command_that_fails_says_what_and_its_last_words(stack: Stack) -> None:
    with pytest.raises(VmError, match=r"(?s)`sh -c .*` ended with 3:\nbad luck"):
        stack.run(["sh", "-c", "echo bad luck >&2; exit 3"])
    with pytest.raises(VmError, match="took over 0 s"):
        stack.run(["sleep", "5"], timeout_s=0.1)
    with pytest.raises(Refused, match="no-such-program is not installed"):
        stack.run(["no-such-program"])
    assert stack.run(["cat"], stdin="by standard input") == "by standard input"


def test_what_a_shell_has_set_does_not_reach_compose(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPOSE_PROFILES", "all")
    monkeypatch.setenv("DOMAIN", "elsewhere")
    assert not {"COMPOSE_PROFILES", "DOMAIN"} & {line.split("=")[0] for line in stack.run(["env"]).splitlines()}


def test_releases_and_links(stack: Stack) -> None:
    first, second = lay(stack, "r1"), lay(stack, "r2")
    assert (stack.current(), stack.previous()) == (None, None)
    stack.link("current", first)
    stack.link("previous", first)
    stack.link("current", second)
    assert (stack.current(), stack.previous()) == (second, first)
    assert first.images["api"].id == "sha256:1"
    for name in ("r3", "", "../r1"):
        with pytest.raises(Refused, match="there are: r1, r2"):
            stack.release(name)


def test_the_flag_says_who_serves(stack: Stack) -> None:
    assert stack.serving() == "api"
    stack.traffic_flag.parent.mkdir(parents=True)
    stack.traffic_flag.touch()
    assert stack.serving() == "api-b"
    assert [other(slot) for slot in ("api", "api-b")] == ["api-b", "api"]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({}, ""),
        ({"image_id": "sha256:other"}, "another image"),
        ({"config_hash": "other"}, "other settings"),
        ({"state": "exited", "exit_code": 137}, "exited, exit code 137"),
        ({"state": "restarting", "exit_code": 1}, "restarting, exit code 1"),
        ({"release": "r0"}, ""),
    ],
)
def test_a_container_is_replaced_for_its_image_settings_or_state(changes: dict[str, Any], difference: str) -> None:
    assert Wanted("h", "sha256:i").difference(container(**changes)) == difference
    assert Wanted("h", "sha256:i").difference(None) == "missing"


def test_of_two_containers_the_running_one_counts_then_the_later() -> None:
    running, later = container(id="old"), container(id="new", state="created", started_at="2027")
    assert newest([running, later])["api-b"].id == "old"
    assert newest([container(id="older", state="exited", started_at="2025"), later])["api-b"].id == "new"


def test_caddy_comes_last_and_the_app_later() -> None:
    services = dict.fromkeys(("caddy", "api", "api-b", "postgres", "redis-rest", "worker", "redis"), Wanted("", ""))
    assert before_the_api(services) == ["postgres", "redis", "caddy"]


def test_what_is_left_over_is_the_other_slot_and_what_no_release_has() -> None:
    services = dict.fromkeys(("api", "api-b", "caddy"), Wanted("", ""))
    found = dict.fromkeys(("api", "api-b", "caddy", "prometheus"), container())
    assert left_over(services, found, "api") == ["api-b", "prometheus"]
    assert left_over(services, found, "api-b") == ["api", "prometheus"]


def test_files_are_written_where_they_differ_and_the_flag_stays(stack: Stack) -> None:
    release = lay(stack, "r1", {"caddy/Caddyfile": "new", "prometheus/rules/a.yml": "same", "init_env.py": ""})
    for path, text in {
        "caddy/Caddyfile": "old", "caddy/traffic/b": "", "prometheus/rules/a.yml": "same", "prometheus/gone.yml": "",
    }.items():  # fmt: skip
        (stack.config / path).parent.mkdir(parents=True, exist_ok=True)
        (stack.config / path).write_text(text)
    assert stale_files(stack, release) == {Path("caddy/Caddyfile"): b"new", Path("prometheus/gone.yml"): None}


def test_one_command_at_a_time_and_the_second_is_told_of_the_first(stack: Stack) -> None:
    told = pytest.raises(Refused, match=r"for over 0 s: a backup, process \d+, for 0 s")
    with stack.lock("a backup"), told, stack.lock("a roll-out", timeout_s=0.0):
        pass
    with stack.lock("a roll-out", timeout_s=0.0):
        pass


def test_the_lock_outlives_its_holder_while_a_command_of_his_runs(stack: Stack) -> None:
    holder = (
        f"import os; from pathlib import Path; from ops.vm.stack import Stack\n"
        f"stack = Stack(Path({str(stack.root)!r}))\n"
        "with stack.lock('killed'): stack.run(['sh', '-c', 'kill -9 $PPID; sleep 0.6'])\n"
    )
    killed = subprocess.run([sys.executable, "-c", holder], cwd=ROOT, timeout=20)
    assert killed.returncode == -9
    with pytest.raises(Refused, match="killed"), stack.lock("next", timeout_s=0.0):
        pass
    with stack.lock("next", timeout_s=5.0):
        pass


def test_the_program_runs_by_its_folder_and_says_what_it_refuses(tmp_path: Path) -> None:
    link = tmp_path / "current-tool"
    link.symlink_to(ROOT / "ops/vm")
    done = subprocess.run(
        [sys.executable, "-S", str(link), "rollout", "r9"], env={"WARMSTART_VM_ROOT": str(tmp_path)},
        capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Refused: there is no release 'r9' on this machine; there are: none\n"
