"""Who watches the stack: Prometheus' own reading of the rules, and an alert on its way from a fault to a receiver."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import httpx
import pytest
from rights import assert_limits_and_rights
from stack import COMPOSE, FILES, ROOT, Stack, command, wait_until, write_env

from conftest import show
from ops.images import ImageRef
from ops.release import overlay
from ops.vm import alerts
from ops.vm.metrics import collect, render, write
from ops.vm.stack import Stack as Machine

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow

PROMETHEUS = COMPOSE / "prometheus"
#: Each rule, firing and silent.
CASES = Path(__file__).with_name("alert_cases.yml")
PROJECT = "warmstart-mon"
#: Service → image of the tests.
IMAGES = {"prometheus": "prometheus", "alertmanager": "alertmanager", "host-metrics": "app"}
WATCHERS = ("alertmanager", "host-metrics", "prometheus")
TOKEN = "token-of-the-webhook"
MEMORY_MB = {"alertmanager": 64, "host-metrics": 48, "prometheus": 192}

RECEIVER = """
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        print(self.headers.get("Authorization"), body, flush=True)
        self.send_response(204)
        self.end_headers()

http.server.HTTPServer(("", 8000), Handler).serve_forever()
"""


# -- what the programs say of their files


@pytest.fixture(scope="module")
def watchers(images: None) -> None:
    build.build_watchers()


def promtool(*words: str) -> str:
    mounts = ["--volume", f"{PROMETHEUS}:/etc/prometheus:ro", "--volume", f"{CASES}:/cases.yml:ro"]
    return command(
        "docker", "run", "--rm", "--name", f"{PROJECT}-promtool", "--network", "none", *mounts,
        "--entrypoint", "promtool", build.tag("prometheus"), *words,
    )  # fmt: skip


def test_prometheus_takes_its_files_without_a_complaint(watchers: None) -> None:
    said = promtool("check", "config", "--lint=all", "--lint-fatal", "/etc/prometheus/prometheus.yml")
    assert said.count("SUCCESS") == 4, said


def test_each_alert_fires_when_it_should_and_only_then(watchers: None) -> None:
    assert "SUCCESS" in promtool("test", "rules", "/cases.yml")


ALERTS = [
    {"webhook": "https://hooks.example.com/T0/secret"},
    {"mail_to": "ops@example.com", "mail_from": "vm@example.com", "smtp": "mail.example.com:587", "smtp_user": "vm"},
]


@pytest.mark.parametrize("wanted", [*ALERTS, ALERTS[0] | ALERTS[1]], ids=["webhook", "mail", "both"])
def test_alertmanager_takes_what_is_written_for_it(wanted: dict[str, str], watchers: None, tmp_path: Path) -> None:
    secrets = {"ALERT_WEBHOOK_TOKEN": TOKEN, "ALERT_SMTP_PASSWORD": "of-the-mail-server"}
    for name, text in alerts.files_for(wanted, secrets).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o644)
    tmp_path.chmod(0o755)
    said = command(
        "docker", "run", "--rm", "--name", f"{PROJECT}-amtool", "--network", "none",
        "--volume", f"{tmp_path}:/etc/alertmanager:ro", "--entrypoint", "amtool", build.tag("alertmanager"),
        "check-config", "/etc/alertmanager/alertmanager.yml",
    )  # fmt: skip
    assert "SUCCESS" in said
    assert "1 receivers" in said


# -- the containers


def impatient(folder: Path) -> Path:
    """The same rules, which neither look back long nor wait."""
    rules = folder / "rules"
    shutil.copytree(PROMETHEUS, rules)
    file = rules / "alerts.yml"
    text = re.sub(r"for: \w+", "for: 0s", file.read_text())
    file.write_text(text.replace("[5m]", "[8s]"))
    config = rules / "prometheus.yml"
    config.write_text(re.sub(r"(scrape|evaluation)_(interval|timeout): \w+", r"\1_\2: 1s", config.read_text()))
    for path in (rules, *rules.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return rules


def write_files(folder: Path) -> None:
    """As `warmstart-vm alerts` and `warmstart-vm metrics` do it, with less patience."""
    machine = Machine(folder, PROJECT)
    files = alerts.files_for({"webhook": "http://receiver:8000/alerts"}, {"ALERT_WEBHOOK_TOKEN": TOKEN})
    files["alertmanager.yml"] = files["alertmanager.yml"].replace('"15s"', '"1s"')
    alerts._lay(machine, files)
    write(machine.state / "metrics" / "host.txt", render(collect(machine)))


@pytest.fixture(scope="module")
def watched(make_stack, watchers: None) -> Iterator[Stack]:  # type: ignore[no-untyped-def]
    made: Stack = make_stack(PROJECT, "172.30.93", RATE_LIMIT_PER_MINUTE="6000", COMPOSE_PROFILES="postgres,monitoring")
    folder = made.env_file.parent
    receiver = folder / "receiver.py"
    receiver.write_text(RECEIVER)
    receiver.chmod(0o644)
    with made.env_file.open("a") as env:
        env.write(f"MONITORING_DIR={folder}/etc/warmstart/alertmanager\n")
        env.write(f"HOST_METRICS_DIR={folder}/var/lib/warmstart/metrics\n")
        env.write(f"RULES_DIR={impatient(folder)}\nRECEIVER={receiver}\n")
    made.files = (*FILES, COMPOSE / "compose.monitoring.yml", HERE / "monitoring.yml")
    write_files(folder)
    made.compose("down", "--volumes", "--remove-orphans")
    try:
        made.compose("up", "--detach", "--wait", "--wait-timeout", "150", "--no-build", "--pull", "never")
        write_files(folder)
        made.fetch_authority()
        yield made
    except BaseException:
        show(made)
        raise
    finally:
        made.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")


def ask(watched: Stack, query: str) -> list[dict[str, Any]]:
    """Prometheus' answer to `query`."""
    url = f"http://{watched.address('prometheus')}:9090/api/v1/query"
    answer = httpx.get(url, params={"query": query}, trust_env=False).raise_for_status().json()
    return list(answer["data"]["result"])


def received(watched: Stack) -> list[dict[str, Any]]:
    """The alerts that came, each with its state."""
    lines = [line for line in watched.logs("receiver").splitlines() if line.startswith("Bearer ")]
    assert all(line.startswith(f"Bearer {TOKEN} ") for line in lines)
    return [alert for line in lines for alert in json.loads(line.split(" ", 2)[2])["alerts"]]


def test_a_fault_is_told_and_so_is_its_end(watched: Stack) -> None:
    key = watched.create_key()
    with watched.client(key) as client:

        def search() -> str:
            found = client.post("/v1/search", json={"query": f"who is told, {time.time()}"}).raise_for_status().json()
            return str(found["mode"])

        def told(status: str) -> list[dict[str, Any]]:
            search()
            return [
                a for a in received(watched) if a["labels"]["alertname"] == "SearchDegraded" and a["status"] == status
            ]

        wait_until("search is whole", lambda: search() == "hybrid")
        assert not told("firing")
        command("docker", "stop", "--time", "2", watched.inspect("embeddings")["Id"])
        alert = wait_until("the receiver is told", lambda: told("firing"), 45)[0]
        command("docker", "start", watched.inspect("embeddings")["Id"])
    assert alert["labels"] == {"alertname": "SearchDegraded", "reason": "embedding", "severity": "warning"}
    assert "embedding" in alert["annotations"]["summary"]
    assert (ROOT / alert["annotations"]["runbook"]).is_file()


def test_all_that_is_there_is_asked(watched: Stack) -> None:
    def jobs() -> set[str]:
        return {found["metric"]["job"] for found in ask(watched, "up == 1")}

    wait_until("all targets answer", lambda: jobs() == {"api", "host", "worker"})
    down = {found["metric"]["instance"] for found in ask(watched, "up == 0")}
    assert down == {"api-b:8484"}, "the slot that is not in use"


def test_the_machines_figures_arrive(watched: Stack) -> None:
    write_files(watched.env_file.parent)

    def services() -> set[str]:
        return {found["metric"]["service"] for found in ask(watched, "warmstart_container_memory_bytes > 0")}

    # the embedding server may still be on its way back
    expected = {"api", "worker", "redis", "redis-rest", "postgres", "caddy", *WATCHERS}
    wait_until("the containers' memory is known", lambda: expected <= services())
    assert ask(watched, "warmstart_host_disk_free_bytes > 0")


@pytest.mark.parametrize("service", WATCHERS)
def test_watchers_may_do_as_little_as_others(service: str, watched: Stack) -> None:
    found = assert_limits_and_rights(
        watched, service, memory_mb=MEMORY_MB[service],
        networks={"backend", "edge"} if service == "alertmanager" else {"backend"},
        volumes={"prometheus", "alertmanager"},
    )  # fmt: skip
    assert not found["HostConfig"]["CapAdd"]
    assert not found["HostConfig"]["PortBindings"]
    assert all(not mount["RW"] for mount in found["Mounts"] if mount["Type"] == "bind")


def test_watchers_leave_room_under_their_limits(watched: Stack) -> None:
    stats = command("docker", "stats", "--no-stream", "--format", "{{.Name}} {{.MemPerc}}")
    used = dict(line.rsplit(" ", 1) for line in stats.splitlines() if line.startswith(f"{PROJECT}-"))
    for service in WATCHERS:
        assert float(used[f"{PROJECT}-{service}-1"].rstrip("%")) < 70, used


def test_no_watcher_shows_the_secret(watched: Stack) -> None:
    said = command("docker", "inspect", *(watched.inspect(service)["Id"] for service in WATCHERS))
    assert TOKEN not in said
    assert TOKEN not in watched.logs("alertmanager")
    files = watched.env_file.parent / "etc/warmstart/alertmanager"
    for path in (files, *files.iterdir()):
        assert path.stat().st_mode & 0o007 == 0, path


# -- as a deploy has it done


@pytest.fixture
def vm(watchers: None, tmp_path: Path) -> Iterator[Machine]:
    """The folders of a machine on which a release was rolled out; of its containers, none runs."""
    project = f"{PROJECT}-vm"
    made = Machine(tmp_path, project)
    release = made.opt / "releases" / "r1"
    shutil.copytree(COMPOSE, release / "compose")
    shutil.copytree(PROMETHEUS, made.config / "prometheus")
    (made.config / "prometheus").chmod(0o755)
    services = {name: ImageRef(build.tag(image), "") for name, image in IMAGES.items()}
    (release / "compose.images.yml").write_text(overlay(services))
    manifest = {"images": {name: {"name": ref.name} for name, ref in services.items()}}
    (release / "manifest.json").write_text(json.dumps(manifest))
    made.link("current", made.release("r1"))
    for folder in (made.etc, made.state, made.run_dir):
        folder.mkdir(parents=True)
    write_env(made.etc, {"ADDRESS": "127.0.0.1", "EDGE_PREFIX": "172.30.94"}).rename(made.etc / "settings.env")
    with (made.etc / "settings.env").open("a") as env:
        env.write(f"MONITORING_DIR={made.etc}/alertmanager\nHOST_METRICS_DIR={made.state}/metrics\n")
    (made.etc / "secrets.env").write_text(f"ALERT_WEBHOOK_TOKEN={TOKEN}\n")
    yield made
    made.run(alerts._compose(made, made.release("r1"), "down", "--volumes", "--timeout", "5"))


def test_who_is_to_be_told_is_set_up_and_changed_and_taken_down(vm: Machine) -> None:
    wanted = {"webhook": "https://hooks.example.com/T0/secret"}

    def running() -> dict[str, tuple[str, str]]:
        return {c.service: (c.id, c.started_at) for c in vm.containers() if c.running}

    assert alerts.pending(vm, {}) == []
    assert "prometheus: does not run" in alerts.pending(vm, wanted)
    assert alerts.apply(vm, wanted)
    first = running()
    assert sorted(first) == list(WATCHERS)
    assert alerts.pending(vm, wanted) == []
    assert alerts.apply(vm, wanted) == []
    assert running() == first

    rules = vm.config / "prometheus" / "alerts.yml"
    rules.write_text(rules.read_text() + "\n# changed by a release\n")
    assert alerts.pending(vm, wanted) == ["prometheus: other rules"]
    wanted = {"webhook": "https://hooks.example.com/other"}
    assert alerts.apply(vm, wanted) == ["webhook_url: other content"]
    second = running()
    assert [second[name][0] for name in WATCHERS] == [first[name][0] for name in WATCHERS]
    assert [name for name in WATCHERS if second[name] != first[name]] == ["alertmanager", "prometheus"]
    assert alerts.pending(vm, wanted) == []

    assert alerts.apply(vm, {})
    assert running() == {}
    assert not (vm.etc / "alertmanager").exists()
    assert alerts.pending(vm, {}) == []
