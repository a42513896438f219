"""What each container may do, read off the engine and off the running processes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import build
import httpx
import pytest
from rights import MB, assert_limits_and_rights
from stack import SERVICES, Stack, command, wait_until

MEMORY_MB = {
    "api": 512, "worker": 576, "redis": 96, "redis-rest": 128, "embeddings": 1024, "postgres": 192, "caddy": 128,
}  # fmt: skip
NETWORKS = {
    "api": {"backend", "edge"}, "worker": {"backend", "edge"}, "caddy": {"edge"},
    "redis": {"backend"}, "redis-rest": {"backend"}, "embeddings": {"backend"}, "postgres": {"backend"},
}  # fmt: skip
LISTEN = "import socket, sys, time; s = socket.create_server((sys.argv[1], 8000)); time.sleep(600)"
PORTS = {"api": 8484, "redis": 6379, "redis-rest": 8079, "embeddings": 8080, "postgres": 5432}


@pytest.mark.parametrize("service", SERVICES)
def test_limits_and_rights(service: str, stack: Stack) -> None:
    found = assert_limits_and_rights(
        stack, service, memory_mb=MEMORY_MB[service], networks=NETWORKS[service],
        volumes={"data", "caddy", "postgres"},
    )  # fmt: skip
    added = [cap.removeprefix("CAP_") for cap in found["HostConfig"]["CapAdd"] or []]
    assert added == (["NET_BIND_SERVICE"] if service == "caddy" else [])


@pytest.mark.parametrize("service", SERVICES)
def test_published_ports(service: str, stack: Stack) -> None:
    bindings = stack.inspect(service)["HostConfig"]["PortBindings"] or {}
    assert sorted(bindings) == (["443/tcp", "80/tcp"] if service == "caddy" else [])


@pytest.mark.parametrize("service", SERVICES)
def test_the_first_process_has_no_capability_and_can_get_none(service: str, stack: Stack) -> None:
    status = dict(line.split(":", 1) for line in stack.execute(service, "cat", "/proc/1/status").splitlines())
    assert int(status["CapEff"], 16) == 0
    assert int(status["CapPrm"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Uid"].split()[0] != "0"


@pytest.mark.parametrize("service", SERVICES)
def test_the_memory_limit_is_the_kernels(service: str, stack: Stack) -> None:
    script = "cat /sys/fs/cgroup/memory.max 2>/dev/null || cat /sys/fs/cgroup/memory/memory.limit_in_bytes"
    assert int(stack.execute(service, "sh", "-c", script)) == MEMORY_MB[service] * MB


@pytest.mark.parametrize("service", SERVICES)
def test_the_root_cannot_be_written(service: str, stack: Stack) -> None:
    for place in ("/usr/bin/x", "/etc/x", "/x"):
        assert "Read-only file system" in stack.execute(service, "sh", "-c", f"echo > {place}", ok=False)


@pytest.mark.parametrize("service", SERVICES)
def test_no_secret_is_in_a_command_line(service: str, stack: Stack) -> None:
    found = stack.inspect(service)
    words = " ".join([found["Path"], *found["Args"], *(found["Config"]["Cmd"] or [])])
    words += command("docker", "top", found["Id"], "-eo", "pid,args")
    for name in ("REDIS_PASSWORD", "UPSTASH_REDIS_REST_TOKEN", "OPENAI_API_KEY", "POSTGRES_PASSWORD"):
        assert stack.settings[name] not in words


def test_each_container_gets_only_the_secrets_it_needs(stack: Stack) -> None:
    needs = {
        "REDIS_PASSWORD": {"redis", "redis-rest"},
        "UPSTASH_REDIS_REST_TOKEN": {"api", "worker", "redis-rest"},
        "OPENAI_API_KEY": {"api", "worker", "embeddings"},
        "POSTGRES_PASSWORD": {"api", "worker", "postgres"},
    }
    for secret, services in needs.items():
        value = stack.settings[secret]
        assert {s for s in SERVICES if value in "\n".join(stack.inspect(s)["Config"]["Env"])} == services


@pytest.mark.parametrize("service", SERVICES)
def test_health_checks(service: str, stack: Stack) -> None:
    found = stack.inspect(service)
    if service == "embeddings":
        assert "Healthcheck" not in found["Config"]
        assert found["State"]["Running"]
    else:
        assert found["State"]["Health"]["Status"] == "healthy"


def test_the_model_cannot_be_written(stack: Stack) -> None:
    [mount] = [m for m in stack.inspect("embeddings")["Mounts"] if m["Destination"] == "/model"]
    assert mount["RW"] is False
    assert "Read-only file system" in stack.execute("embeddings", "sh", "-c", "echo > /model/x", ok=False)


# -- who reaches whom


def answers(host: str) -> bool:
    with socket.create_connection((host, 8000), 1):
        return True


@pytest.fixture(scope="module")
def outside() -> Iterator[tuple[str, int]]:
    """A listener behind this machine, as the internet is: in a network of its own, one hop away."""
    name, here, there = "ws-outside", "203.0.113.1", "203.0.113.2"
    subprocess.run(["ip", "netns", "del", name], capture_output=True)  # of a run that was killed
    commands = [
        f"ip netns add {name}",
        f"ip link add {name} type veth peer name far netns {name}",
        f"ip addr add {here}/30 dev {name}",
        f"ip link set {name} up",
        f"ip -n {name} addr add {there}/30 dev far",
        f"ip -n {name} link set far up",
    ]
    for line in commands:
        command(*line.split())
    listener = subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-c", LISTEN, there],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait_until("it listens", lambda: answers(there))
        yield there, 8000
    finally:
        listener.kill()
        listener.wait()
        command("ip", "netns", "del", name)


def connect(stack: Stack, service: str, host: str, port: int) -> bool:
    words = ["timeout", "2", "bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}"]
    with contextlib.suppress(AssertionError):
        stack.execute(service, *words)
        return True
    return False


@pytest.mark.parametrize("service", SERVICES)
def test_the_way_out(service: str, stack: Stack, outside: tuple[str, int]) -> None:
    assert connect(stack, service, *outside) is ("edge" in NETWORKS[service])


def test_a_backend_container_finds_no_name_outside(stack: Stack) -> None:
    assert "redis" in stack.execute("redis-rest", "getent", "hosts", "redis")
    stack.execute("embeddings", "timeout", "4", "getent", "hosts", "huggingface.co", ok=False)


def test_caddy_reaches_the_api_and_nothing_behind_it(stack: Stack) -> None:
    assert connect(stack, "caddy", "api", 8484)
    for service in ("redis", "redis-rest", "embeddings", "postgres"):
        assert not connect(stack, "caddy", stack.address(service), PORTS[service])


@pytest.mark.parametrize("service", PORTS)
def test_the_backend_is_not_reached_from_another_network(service: str, stack: Stack) -> None:
    target = f"exec 3<>/dev/tcp/{stack.address(service)}/{PORTS[service]}"
    command("docker", "run", "--rm", build.tag("base"), "timeout", "2", "bash", "-c", target, ok=False)


def test_redis_wants_its_password_and_forgets_the_least_used(stack: Stack) -> None:
    assert "NOAUTH" in stack.execute("redis", "env", "-u", "REDISCLI_AUTH", "redis-cli", "ping")
    settings = stack.execute("redis", "redis-cli", "config", "get", "*").splitlines()
    config = dict(zip(settings[::2], settings[1::2], strict=False))
    assert config["maxmemory"] == str(64 * MB)
    assert config["maxmemory-policy"] == "allkeys-lru"
    assert config["save"] == ""
    assert config["appendonly"] == "no"


def test_the_embedding_server_wants_its_key(stack: Stack) -> None:
    url = f"http://{stack.address('embeddings')}:8080"
    with httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/health").status_code == 200
        answer = client.post("/v1/embeddings", json={"input": "x"})
    assert (answer.status_code, answer.content) == (401, b"")
