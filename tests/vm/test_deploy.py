"""One machine from bare to a version that fails: what an operator does, and what clients see of it.

The tests of this module go on where the one before ended.
"""

from __future__ import annotations

import json
import os
import re
import signal
import ssl
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
import testinfra
from testinfra.host import Host

from containers import build
from containers.stack import wait_until
from ops.runner import STEPS
from vm import deploys
from vm.load import MAX_STALL_S, SLACK_S, Load
from vm.machine import Machine, Result

KEY = re.compile(r"ws_sk_[A-Za-z0-9_-]{43}")
CLIENT_TIMEOUT_S = 30.0
#: What containers may keep of their output: `docker inspect` has to say so of each.
LOG_LIMITS = {"max-size": "10m", "max-file": "3"}


@dataclass(frozen=True)
class Deployed:
    """A machine with the memory on it, and how it came there."""

    machine: Machine
    tree: deploys.Tree
    inventory: Path
    result: Result

    @property
    def key(self) -> str:
        found = KEY.search(self.result.out)
        assert found, self.result.text[-3000:]
        return found[0]

    def ops(self, *words: str, **options: object) -> Result:
        return deploys.run_ops(self.tree, self.inventory, *words, **options)  # type: ignore[arg-type]

    def authority(self) -> ssl.SSLContext:
        """For a client that trusts what the operator was told to trust, and nothing else."""
        found = self.machine.ssh("docker exec warmstart-caddy-1 cat /tmp/data/caddy/pki/authorities/local/root.crt")
        return ssl.create_default_context(cadata=found.out)

    def client(self, key: str = "") -> httpx.Client:
        headers = {"Authorization": f"Bearer {key or self.key}"}
        return httpx.Client(
            base_url=self.machine.url, verify=self.authority(), headers=headers, timeout=CLIENT_TIMEOUT_S
        )

    def containers(self) -> dict[str, tuple[str, str]]:
        """Name → id and time of its start."""
        listed = self.machine.ssh(
            "docker ps -q --no-trunc | xargs docker inspect --format '{{.Name}} {{.Id}} {{.State.StartedAt}}'"
        ).out
        return {name: (one, at) for name, one, at in (line.split() for line in listed.splitlines())}


@pytest.fixture(scope="module")
def deployed(
    images: None, machine: Machine, clone: Callable[[], deploys.Tree], make_inventory: deploys.MakeInventory
) -> Deployed:
    tree, inventory = clone(), make_inventory(machine)
    result = deploys.run_ops(tree, inventory, "deploy")
    print(result.text)
    assert result.code == 0, result.text[-6000:]
    return Deployed(machine, tree, inventory, result)


def derived(name: str, *lines: str) -> str:
    """An image of the app with something changed, and its tag."""
    tag = f"warmstart-vm/app:{name}"
    text = "\n".join([f"FROM {build.tag('app')}", "USER 0:0", *lines, "USER 10001:10001", ""])
    subprocess.run(["docker", "build", "--quiet", "--tag", tag, "-"], input=text, text=True, check=True, timeout=120)
    return tag


def serving_badly(name: str, shell: str) -> str:
    """An image whose api first does this; its other commands work, migrations among them."""
    program = "/opt/warmstart/bin/warmstart"
    script = f'#!/bin/sh\\nif [ "$1" = serve ]; then {shell}; fi\\nexec {program}.real "$@"\\n'
    return derived(name, f"RUN mv {program} {program}.real && printf '{script}' > {program} && chmod 755 {program}")


@pytest.mark.emulated
def test_a_bare_machine_becomes_a_memory(deployed: Deployed) -> None:
    with deployed.client() as client:
        ready = client.get("/readyz")
        assert ready.status_code == 200
        assert not ready.json()["degraded"]
        saved = client.post("/v1/memories", json={"content": "The deploy gate waits for /readyz."})
        assert saved.status_code == 201
        found = client.post("/v1/search", json={"query": "what does the gate wait for"}).json()
    assert found["mode"] == "hybrid"
    assert saved.json()["id"] in [hit["id"] for hit in found["hits"]]


@pytest.mark.emulated
def test_the_summary_has_what_the_operator_needs_next(deployed: Deployed) -> None:
    out = deployed.result.out
    assert "https://127.0.0.1" in out
    assert "claude mcp add --transport http warmstart https://127.0.0.1/mcp" in out
    assert len(set(KEY.findall(out))) == 1
    assert re.search(r"^\d+ changed:$", out, re.MULTILINE)
    assert re.search(r"preflight \d+\.\d, lock \d+\.\d", out)


@pytest.mark.emulated
def test_again_changes_nothing_and_says_so(deployed: Deployed) -> None:
    before = deployed.containers()
    again = deployed.ops("deploy", "--json")
    print(again.text)
    assert again.code == 0, again.text[-4000:]
    assert "Nothing had to be changed." in again.out
    assert json.loads(again.out.splitlines()[-1])["changes"] == []
    assert deployed.containers() == before
    assert not KEY.search(again.text)
    assert again.seconds < 60 * deployed.machine.patience


def test_a_plan_of_it_has_nothing_to_do(deployed: Deployed) -> None:
    planned = deployed.ops("plan")
    assert planned.code == 0, planned.text[-4000:]
    assert "Nothing would be changed." in planned.out


def test_what_an_operator_looks_at(deployed: Deployed) -> None:
    status = deployed.ops("status", "--json")
    assert status.code == 0, status.text
    assert json.loads(status.out.splitlines()[-1])["release"]["id"]
    assert "api" in deployed.ops("status").out
    assert '"event"' in deployed.ops("logs", "api", "--lines", "20").out
    assert "first" in deployed.ops("keys").out
    assert deployed.ops("exec", "--", "echo", "two  words").out == "two  words\n"
    assert deployed.ops("exec", "--", "false").code == 1


def test_a_version_that_ends_at_its_start_is_undone_while_the_old_one_serves(
    deployed: Deployed, make_inventory: deploys.MakeInventory
) -> None:
    broken = serving_badly("crashes", "echo no such part >&2; exit 3")
    other = replace(deployed, inventory=with_app(deployed, make_inventory, broken))
    assert_undone(deployed, other, "no such part")


def with_app(deployed: Deployed, make_inventory: deploys.MakeInventory, tag: str) -> Path:
    return make_inventory(deployed.machine, image_overrides={**deploys.IMAGES, "app": tag})


def assert_undone(deployed: Deployed, other: Deployed, reason: str) -> None:
    """`other`'s deploy fails with `reason`, and what served before serves all the while and after."""
    before = deployed.containers()
    with deployed.client() as client, Load(client) as load:
        load.wait_for(10)
        failed = other.ops("deploy")
        print(failed.text)
    assert failed.code == 1, failed.text[-6000:]
    assert reason in failed.text
    assert "undone" in failed.text
    print(load.summary)
    # images are built and carried meanwhile, on the same two cores
    load.assert_served(longest_s=CLIENT_TIMEOUT_S)
    after = deployed.containers()
    api = [name for name in before if "-api-" in name]
    assert [after.get(name) for name in api] == [before[name] for name in api]
    assert sorted(after) == sorted(before)
    assert deployed.ops("deploy").code == 0


# -- what takes longer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shell", "reason"),
    [
        ("never-ready", "exec sleep 3600", "is not ready after"),
        # without its embedder it starts, answers, and finds by words alone
        ("fails-smoke", "export OPENAI_BASE_URL=http://127.0.0.1:9/v1", "expected"),
    ],
)
def test_a_version_that_does_not_pass_is_undone(
    deployed: Deployed, make_inventory: deploys.MakeInventory, name: str, shell: str, reason: str
) -> None:
    other = replace(deployed, inventory=with_app(deployed, make_inventory, serving_badly(name, shell)))
    assert_undone(deployed, other, reason)


@pytest.mark.slow
def test_a_new_version_with_a_migration_fails_no_request(
    deployed: Deployed, make_inventory: deploys.MakeInventory, tmp_path: Path
) -> None:
    site = "/opt/warmstart/lib/python3*/site-packages/warmstart/store/sql"
    sql = "ALTER TABLE tenants ADD COLUMN note text;"
    newer = derived("newer", f"RUN printf -- '-- compatible: yes\\n{sql}\\n' > $(echo {site})/9001_note.sql")
    other = replace(deployed, inventory=with_app(deployed, make_inventory, newer))
    log = tmp_path / "upgrade.log"
    with deployed.client() as client, Load(client, clients=4) as load:
        load.wait_for(40)
        upgrade = deploys.start_ops(other.tree, other.inventory, "deploy", log=log)
        assert wait_for_line(upgrade, log, "database:"), log.read_text()
        began = time.time()
        code = upgrade.wait(300)
        load.wait_for(40)
    print(log.read_text())
    assert code == 0
    # what comes before, packing and carrying the image, is done here by the same two cores
    print(f"{load.summary}; {load.longest(since=began):.2f} s since the roll-out began")
    assert load.failures == []
    assert load.longest(since=began) < MAX_STALL_S + SLACK_S
    with deployed.client() as client:
        assert load.lost(client) == []
    # and back: the release before still runs on the newer database
    back = deployed.ops("rollback")
    print(back.text)
    assert back.code == 0, back.text[-4000:]
    with deployed.client() as client:
        assert client.get("/readyz").status_code == 200
    assert deployed.ops("deploy").code == 0


@pytest.mark.slow
def test_a_second_operator_needs_no_secrets_and_two_at_once_are_one(
    deployed: Deployed, clone: Callable[[], deploys.Tree], make_inventory: deploys.MakeInventory, tmp_path: Path
) -> None:
    second = replace(
        deployed, tree=clone(), inventory=make_inventory(deployed.machine, operator="second", ssh_user="deploy")
    )
    before = deployed.containers()
    again = second.ops("deploy")
    assert again.code == 0, again.text[-4000:]
    assert deployed.containers() == before
    log = tmp_path / "first.log"
    first = deploys.start_ops(deployed.tree, deployed.inventory, "deploy", log=log)
    build_up = wait_for_line(first, log, "base:")
    assert build_up
    refused = second.ops("deploy")
    assert refused.code == 2, refused.text
    assert "another deploy holds this machine" in refused.text
    assert first.wait(120) == 0, log.read_text()


def wait_for_line(process: subprocess.Popen[bytes], log: Path, beginning: str) -> bool:
    """Whether the program came to this step, before it ended."""

    def found() -> bool:
        return any(line.startswith(beginning) for line in log.read_text().splitlines())

    wait_until(beginning, lambda: found() or process.poll() is not None, 300, 0.02)
    return found()


@pytest.mark.slow
def test_secrets_are_changed_while_it_serves(deployed: Deployed) -> None:
    before = deployed.machine.ssh("cat /etc/warmstart/secrets.env").out
    with deployed.client() as client, Load(client) as load:
        load.wait_for(10)
        rotated = deployed.ops("rotate-secrets")
        print(rotated.text)
        load.wait_for(10)
    assert rotated.code == 0, rotated.text[-4000:]
    print(load.summary)
    load.assert_served(longest_s=CLIENT_TIMEOUT_S)
    after = deployed.machine.ssh("cat /etc/warmstart/secrets.env").out
    pairs = zip(before.splitlines(), after.splitlines(), strict=True)
    assert [old for old, new in pairs if old == new and "=" in old] == []
    assert deployed.ops("deploy").code == 0


@pytest.mark.slow
@pytest.mark.emulated
def test_after_a_reboot_all_is_back(deployed: Deployed) -> None:
    deployed.machine.reboot()

    def ready() -> bool:
        with deployed.client() as client:
            return not client.get("/readyz").json()["degraded"]

    wait_until("ready after a reboot", ready, 120 * deployed.machine.patience, 1)
    again = deployed.ops("deploy", "--json")
    assert again.code == 0, again.text[-4000:]
    assert json.loads(again.out.splitlines()[-1])["changes"] == []


@pytest.mark.slow
def test_a_lost_memory_comes_back_from_its_backup(deployed: Deployed) -> None:
    with deployed.client() as client:
        for number in range(20):
            client.post("/v1/memories", json={"content": f"Backed up note {number} of the deploy test."})
        before = client.get("/v1/memories/counts").json()
        rows = listed(client)
    taken = deployed.ops("backup")
    print(taken.text)
    assert taken.code == 0, taken.text[-4000:]
    drilled = deployed.ops("drill")
    print(drilled.text)
    assert drilled.code == 0, drilled.text[-4000:]
    deployed.machine.ssh(
        "warmstart-vm compose --profile b stop && rm -rf /var/lib/docker/volumes/warmstart_data/_data/*"
    )
    restored = deployed.ops("restore", "--replace", "127.0.0.1")
    print(restored.text)
    assert restored.code == 0, restored.text[-4000:]
    with deployed.client() as client:
        assert client.get("/v1/memories/counts").json() == before
        assert listed(client) == rows
    assert deployed.ops("deploy").code == 0


def listed(client: httpx.Client) -> list[tuple[str, str]]:
    found, cursor = [], None
    while True:
        page = client.get("/v1/memories", params={"limit": 50, **({"cursor": cursor} if cursor else {})}).json()
        found += [(row["id"], row["content"]) for row in page["memories"]]
        cursor = page.get("next_cursor")
        if not cursor:
            return sorted(found)


@pytest.mark.emulated
def test_only_three_ports_answer_from_outside(deployed: Deployed) -> None:
    machine = deployed.machine
    assert machine.answers(22)
    assert machine.answers(443)
    # a port that Docker publishes goes past what most firewalls look at
    machine.ssh(
        f"docker run -d --name stray -p 8081:8079 --entrypoint python3 {image_of_api(machine)} -m http.server 8079"
    )
    try:
        machine.ssh(
            "for i in $(seq 50); do curl -s -o /dev/null http://127.0.0.1:8081 && exit 0; sleep 0.2; done; exit 1"
        )
        assert not machine.answers(8081)
    finally:
        machine.ssh("docker rm --force --volumes stray")


def image_of_api(machine: Machine) -> str:
    return machine.ssh("docker ps --filter label=com.docker.compose.service=worker --format '{{.Image}}'").out.strip()


@pytest.fixture(scope="module")
def inside(deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Host:
    """The machine as it says it is, by the same way in."""
    config = tmp_path_factory.mktemp("ssh") / "config"
    words = deployed.machine.ssh_options()
    key, options = words[words.index("-i") + 1], [word for word in words if "=" in word]
    config.write_text("\n".join(["Host *", f"IdentityFile {key}", *(o.replace("=", " ", 1) for o in options)]) + "\n")
    return testinfra.get_host(f"ssh://root@127.0.0.1:{deployed.machine.ports[22]}", ssh_config=str(config))


@pytest.mark.emulated
def test_nobody_logs_in_by_password(inside: Host) -> None:
    said = inside.check_output("sshd -T").splitlines()
    for line in ("passwordauthentication no", "permitrootlogin without-password", "kbdinteractiveauthentication no"):
        assert line in said


@pytest.mark.parametrize(
    "unit", ["docker.service", "warmstart-firewall.service", "warmstart-backup.timer", "warmstart-drill.timer"]
)
@pytest.mark.emulated
def test_what_has_to_be_there_after_a_boot_is_enabled_and_runs(unit: str, inside: Host) -> None:
    assert inside.service(unit).is_enabled
    assert inside.service(unit).is_running


@pytest.mark.parametrize("name", ["settings.env", "secrets.env", "backup.env", "canary.key"])
@pytest.mark.emulated
def test_secrets_are_roots_alone(name: str, inside: Host) -> None:
    file = inside.file(f"/etc/warmstart/{name}")
    assert (file.user, file.mode) == ("root", 0o600)
    assert inside.file("/etc/warmstart").mode == 0o700


@pytest.mark.emulated
def test_the_firewall_lets_in_what_it_says(inside: Host) -> None:
    rules = inside.check_output("nft list table inet warmstart")
    assert "policy drop" in rules
    listening = {line.split()[3].rpartition(":")[2] for line in inside.check_output("ss -Hltn").splitlines()}
    assert {"22", "80", "443"} <= listening


def test_secrets_are_in_no_log_plan_image_or_process_list(deployed: Deployed) -> None:
    machine = deployed.machine
    found = machine.ssh("cat /etc/warmstart/secrets.env /etc/warmstart/backup.env /etc/warmstart/canary.key").out
    values = {value.strip("\"'") for value in re.findall(r"^\w+=(.{12,})$", found, re.MULTILINE)}
    # a DSN holds the password, which is among them by itself
    secrets = [value for value in values if "/" not in value]
    assert len(secrets) >= 5
    planned = deployed.ops("plan").text
    seen = {
        "plan": planned,
        "deploy": deployed.result.text,
        "process list": machine.ssh("ps -eww -o args").out,
        "journal": machine.ssh("journalctl --no-pager -q").out,
        "logs": machine.ssh("docker ps -q | xargs -n1 docker logs 2>&1").out,
        "images": machine.ssh(
            "docker image ls -q | xargs docker image inspect; docker image ls -q | xargs -n1 docker history --no-trunc"
        ).out,
        "files": machine.ssh(
            "cat /opt/warmstart/releases/*/manifest.json /opt/warmstart/releases/*/*.yml /var/lib/warmstart/*.json*"
        ).out,
    }
    leaks = [(where, value[:4]) for where, text in seen.items() for value in secrets if value in text]
    # the repository's password is told once, by the first deploy, for the operator to keep
    password = re.search(r"^RESTIC_PASSWORD=(.+)$", found, re.MULTILINE)
    assert password
    assert leaks == [("deploy", password[1].strip("\"'")[:4])]


def test_each_containers_log_is_bounded(deployed: Deployed) -> None:
    listed = deployed.machine.ssh(
        "docker ps -q | xargs docker inspect --format '{{.Name}} {{json .HostConfig.LogConfig}} {{.HostConfig.Memory}}'"
    ).out.splitlines()
    assert len(listed) >= 7
    for line in listed:
        name, config, memory = line.split(" ")
        assert json.loads(config) == {"Type": "json-file", "Config": LOG_LIMITS}, name
        assert int(memory) > 0, name


@pytest.mark.slow
def test_a_deploy_killed_at_each_step_is_run_again_and_converges(
    images: None, fresh_machine: Callable[[str], Machine], clone: Callable[[], deploys.Tree],
    make_inventory: deploys.MakeInventory, tmp_path: Path,
) -> None:  # fmt: skip
    machine = fresh_machine("killed")
    tree, inventory = clone(), make_inventory(machine)
    planned = deploys.run_ops(tree, inventory, "plan")
    assert planned.code == 0, planned.text[-4000:]
    assert "would: Install Docker" in planned.out
    assert machine.ssh("command -v docker", check=False).code == 1, "a plan changes nothing"
    for step in STEPS[1:]:
        log = tmp_path / f"{step}.log"
        process = deploys.start_ops(tree, inventory, "deploy", log=log)
        came = wait_for_line(process, log, f"{step}:")
        assert came, f"it ended before {step}\n{log.read_text()[-4000:]}"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    last = deploys.run_ops(tree, inventory, "deploy")
    assert last.code == 0, last.text[-6000:]
    assert len(set(KEY.findall(last.out))) == 1 or machine.ssh("warmstart-vm first-key --check").out.count("true")
    again = deploys.run_ops(tree, inventory, "deploy", "--json")
    assert json.loads(again.out.splitlines()[-1])["changes"] == []


@pytest.mark.slow
def test_destroy_asks_for_the_name_and_leaves_nothing(deployed: Deployed) -> None:
    assert deployed.ops("destroy").code == 2
    assert deployed.ops("destroy", "--confirm", "another").code == 2
    assert deployed.containers()
    gone = deployed.ops("destroy", "--confirm", "127.0.0.1")
    assert gone.code == 0, gone.text[-4000:]
    left = deployed.machine.ssh(
        "docker ps -aq; docker volume ls -q; ls -d /opt/warmstart /etc/warmstart /var/lib/warmstart 2>/dev/null || true"
    ).out
    assert left.strip() == ""
