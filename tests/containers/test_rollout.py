"""Roll-outs by the program of the VM, on a stack of its own under load: what works, what breaks, what is killed."""

from __future__ import annotations

import json
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import httpx
import pytest
from stack import COMPOSE, SERVICES, Stack, command, wait_until

from containers.releases import APP, PROJECT, RUN_TIMEOUT_S, Vm, image_id, released

pytestmark = pytest.mark.slow

CLIENTS: Final = 4
#: Of each client, a search and a save in turn; sent when their time has come, whatever became of those before.
REQUESTS_PER_S: Final = 2.0
LONGEST_STALL_S: Final = 2.0
#: The gate's patience here, with a release that never becomes ready.
GATE_S: Final = 5
BROKEN: Final = {
    "crash": 'ENTRYPOINT ["sh", "-c", "echo it was born to die; exit 3"]',
    "worker": 'ENTRYPOINT ["sh", "-c", "test $0 = worker && exit 3; exec warmstart $0 $@"]',
    "mute": 'ENTRYPOINT ["sh", "-c", "trap exit TERM; echo it keeps silent; sleep 600 & wait"]',
}


@pytest.fixture(scope="module")
def vm(make_stack: Callable[..., Stack], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vm]:
    stack = make_stack(PROJECT, "172.30.87", RATE_LIMIT_PER_MINUTE="6000")
    labels = {name: f"LABEL release={name}" for name in ("first", "second")}
    root = tmp_path_factory.mktemp("vm")
    for folder in root.parents[:2]:
        folder.chmod(0o755)
    with released(stack, root, labels | BROKEN) as made:
        yield made


@pytest.fixture(scope="module")
def key(vm: Vm) -> str:
    vm.stack.execute("api", "warmstart", "tenants", "create", "default")
    return vm.stack.create_key()


# -- the load


@dataclass
class Load:
    client: httpx.Client
    sent: int = 0
    saved: dict[str, str] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def request(self, number: int, due: float) -> None:
        text = f"{number} of {uuid.uuid4().hex}"
        try:
            if number % 2:
                answer = self.client.post("/v1/search", json={"query": text})
            else:
                answer = self.client.post("/v1/memories", json={"content": text, "namespace": "load"})
            if answer.status_code not in (200, 201):
                self.failed.append(f"{answer.status_code} {answer.text[:200]}")
            elif not number % 2:
                self.saved[text] = answer.json()["id"]
        except httpx.HTTPError as error:
            self.failed.append(repr(error))
        self.seconds.append(time.monotonic() - due)

    def run(self, over: threading.Event) -> None:
        with ThreadPoolExecutor(32) as pool:
            due = time.monotonic()
            while not over.wait(max(0.0, due - time.monotonic())):
                pool.submit(self.request, self.sent, due)
                self.sent += 1
                due += 1 / REQUESTS_PER_S


@contextmanager
def load(vm: Vm, key: str, what: str) -> Iterator[list[float]]:
    """Clients that ask all the while; at the end none of their requests has failed, and each save is there.

    The list is then that of all their seconds, sorted.
    """
    seconds: list[float] = []
    over = threading.Event()
    loads = [Load(vm.stack.client(key)) for _ in range(CLIENTS)]
    threads = [threading.Thread(target=one.run, args=(over,)) for one in loads]
    for thread in threads:
        thread.start()
    try:
        yield seconds
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for one in loads:
            one.client.close()
    seconds += sorted(s for one in loads for s in one.seconds)
    print(f"{what}: {len(seconds)} requests, median {seconds[len(seconds) // 2]:.3f} s, longest {seconds[-1]:.2f} s")
    assert [one.failed for one in loads] == [[]] * CLIENTS
    with vm.stack.client(key) as client:
        for text, memory_id in [pair for one in loads for pair in one.saved.items()]:
            assert client.get(f"/v1/memories/{memory_id}").json()["content"] == text


# -- tests, in this order: each goes on where the one before it ended


def test_the_first_release_serves(vm: Vm, key: str) -> None:
    assert sorted(vm.containers()) == sorted(SERVICES)
    assert vm.linked("current") == "first"
    with vm.stack.client(key) as client:
        assert client.get("/readyz").json() == {"status": "ok", "degraded": {}}


def test_the_same_again_touches_no_container(vm: Vm) -> None:
    before = vm.containers()
    assert vm.pending("first") == {
        "release": "first", "services": {}, "files": [], "app": {}, "migrations": "none", "rolled_out": True,
    }  # fmt: skip
    said = vm.deploy("first")
    assert "nothing to do" in said
    assert vm.containers() == before


@pytest.mark.parametrize("mend", [("services", "first"), ("restart", "redis")])
def test_a_container_that_lost_its_networks_is_made_anew(mend: tuple[str, ...], vm: Vm, key: str) -> None:
    """It runs and finds itself healthy; Compose sees no difference, and a start alone leaves it where it is."""
    before = vm.containers()
    found = before["redis"][0]
    for network in json.loads(command("docker", "inspect", found))[0]["NetworkSettings"]["Networks"]:
        command("docker", "network", "disconnect", network, found)
    assert vm.pending("first")["services"] == {"redis": "on no network"}
    vm.run(*mend)
    after = vm.containers()
    assert {name for name in after if after[name] != before[name]} == {"redis"}
    assert vm.pending("first")["services"] == {}
    with vm.stack.client(key) as client:
        wait_until("redis answers", lambda: client.get("/readyz").json() == {"status": "ok", "degraded": {}}, 30)


def test_another_release_goes_out_without_a_failed_request(vm: Vm, key: str) -> None:
    before = vm.containers()
    assert set(vm.pending("second")["app"]) == {"api", "redis-rest", "worker"}
    with load(vm, key, "roll-out") as seconds:
        vm.deploy("second")
    assert seconds[-1] < LONGEST_STALL_S
    after = vm.containers()
    assert (vm.linked("current"), vm.linked("previous"), vm.serving) == ("second", "first", "api-b")
    assert after.keys() == before.keys() - {"api"} | {"api-b"}
    new = image_id(f"{PROJECT}/app:second")
    assert {name for name in after if after[name][2] == new} == {"api-b", "redis-rest", "worker"}
    assert {n: c for n, c in after.items() if n not in APP} == {n: c for n, c in before.items() if n not in APP}


@pytest.mark.parametrize(("name", "reason"), [("crash", "does not stay up"), ("mute", "is not ready after")])
def test_a_release_that_does_not_become_ready_is_undone(name: str, reason: str, vm: Vm, key: str) -> None:
    before = vm.containers()
    with load(vm, key, name):
        said = vm.run("rollout", name, code=1, gate_s=GATE_S)
    assert reason in said
    assert "undone: second serves" in said
    assert {"crash": "it was born to die", "mute": "it keeps silent"}[name] in said
    assert vm.containers() == before
    assert vm.linked("current") == "second"


def test_rules_that_caddy_refuses_are_taken_back(vm: Vm, key: str) -> None:
    vm.lay_release("rules", f"{PROJECT}/app:second", caddyfile=lambda text: text + "\nno such word {\n")
    before, rules = vm.containers(), (COMPOSE / "caddy/Caddyfile").read_text()
    with load(vm, key, "broken rules"):
        said = vm.run("services", "rules", code=1)
    assert "undone: second serves" in said
    assert (vm.flag.parents[1] / "Caddyfile").read_text() == rules
    assert vm.containers() == before


def test_a_worker_that_dies_takes_the_traffic_back_too(vm: Vm, key: str) -> None:
    """By then all requests went to the new api."""
    before = vm.containers()
    with load(vm, key, "worker"):
        said = vm.run("rollout", "worker", code=1, gate_s=60)
    for words in ("traffic: to api", "worker does not stay up", "undo: traffic: to api-b", "undone: second serves"):
        assert words in said
    after = vm.containers()
    assert {name: image for name, (_, _, image) in after.items()} == {name: i for name, (_, _, i) in before.items()}
    assert after["api-b"] == before["api-b"]


def test_a_lost_connection_is_no_reason_to_stop_and_a_signal_is(vm: Vm, key: str) -> None:
    before = vm.containers()
    with vm.start("rollout", "first") as program:
        wait_until("the new api is there", lambda: "api" in vm.containers(), every_s=0.1)
        program.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        program.send_signal(signal.SIGTERM)
        said, _ = program.communicate(timeout=RUN_TIMEOUT_S)
    assert program.returncode == 1
    assert "Failed: stopped by SIGTERM" in said
    assert "undone: second serves" in said
    assert vm.containers() == before


def kill_at(vm: Vm, release: str, line: str, after_s: float) -> None:
    """kill -9, so long after it has said `line`, or started."""
    with vm.start("rollout", release) as program:
        assert program.stdout is not None
        said = ""
        while line not in said:
            said = program.stdout.readline()
            assert said, f"it ended before {line!r}"
            print(said, end="")
        time.sleep(after_s)
        program.kill()


def test_a_way_back_that_is_killed_again_and_again_is_carried_on_by_a_rollback(vm: Vm, key: str) -> None:
    with load(vm, key, "killed"):
        for line, after_s in (
            ("", 1.0),  # the new api starts
            ("new api", 0.5),  # its smoke test
            ("traffic", 1.0),  # the worker changes over
            ("redis-rest and worker", 0.5),  # the public smoke test
        ):
            kill_at(vm, "first", line, after_s)
        assert vm.linked("current") == "second"
        said = vm.run("rollback")
    assert "database check by first: passed" in said
    assert (vm.linked("current"), vm.linked("previous"), vm.serving) == ("first", "second", "api")
    assert sorted(vm.containers()) == sorted(SERVICES)
    assert vm.pending("first")["app"] == {}


def test_a_flag_that_is_wrong_is_put_right_by_what_runs(vm: Vm, key: str) -> None:
    before = vm.containers()
    vm.flag.touch()
    assert "traffic: to api" in vm.run("rollout", "first")
    assert vm.containers() == before
    assert vm.serving == "api"


def test_what_is_not_there_is_refused(vm: Vm) -> None:
    before = vm.containers()
    assert "there is no release 'third'" in vm.run("rollout", "third", code=2)
    assert vm.containers() == before
