"""Every fault of the matrix, done to real containers, and undone."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import build
from stack import Stack, command, wait_until

from containers.matrix import Row

IMPOSTOR: Final = Path(__file__).with_name("impostor.py")
PORTS: Final = {"redis": "6379", "redis-rest": "8079", "postgres": "5432"}
NETWORKS: Final = {"worker": ("backend", "edge")}
#: Where the keeper has each volume.
VOLUMES: Final = {"disk": "/data", "postgres": "/postgres"}
FILLER: Final = "filler"


def container(stack: Stack, service: str) -> str:
    return f"{stack.project}-{service}-1"


def execute(stack: Stack, service: str, *words: str, **options: Any) -> str:
    """Without Compose, which takes its time."""
    return command("docker", "exec", "--interactive", container(stack, service), *words, **options)


def pid(stack: Stack, service: str) -> int:
    """Of its first process; 0 while it does not run."""
    return int(command("docker", "inspect", "-f", "{{.State.Pid}}", container(stack, service)))


def kill(stack: Stack, service: str) -> bool:
    """Its first process; what `docker kill` ends would not be started again. Whether there was one."""
    running = pid(stack, service)
    if not running:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(running, signal.SIGKILL)
    return True


def cut(stack: Stack, service: str) -> None:
    for network in NETWORKS.get(service, ("backend",)):
        command("docker", "network", "disconnect", f"{stack.project}_{network}", container(stack, service))


def reconnect(stack: Stack, service: str, *, named: bool = True) -> None:
    for network in NETWORKS.get(service, ("backend",)):
        alias = ["--alias", service] if named else []
        command(
            "docker", "network", "connect", *alias, f"{stack.project}_{network}", container(stack, service)
        )  # fmt: skip


def fill(stack: Stack, path: str) -> None:
    """To the last byte; what is freed meanwhile too."""
    script = f"while dd if=/dev/zero bs=4k of={path}/{FILLER} oflag=append conv=notrunc 2>/dev/null; do :; done"
    execute(stack, "keeper", "sh", "-c", script)


def free(stack: Stack, path: str) -> None:
    execute(stack, "keeper", "rm", "-f", f"{path}/{FILLER}")


@contextlib.contextmanager
def filled(stack: Stack, path: str) -> Iterator[None]:
    """Full, and kept so: a compaction that gives up frees what it had begun."""
    fill(stack, path)
    over = threading.Event()

    def keep_full() -> None:
        while not over.wait(0.5):
            fill(stack, path)

    keeper = threading.Thread(target=keep_full)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        keeper.join()
        free(stack, path)


@contextlib.contextmanager
def impostor(stack: Stack, service: str, fault: str) -> Iterator[None]:
    """Another container answers to the service's name."""
    name = f"{stack.project}-impostor"
    cut(stack, service)
    try:
        command(
            "docker", "run", "--detach", "--rm", "--name", name, "--network", f"{stack.project}_backend",
            "--network-alias", service, "--entrypoint", "python3", build.tag("app"),
            "-c", IMPOSTOR.read_text(), fault, PORTS[service], container(stack, service),
        )  # fmt: skip
        wait_until("the impostor listens", lambda: "ready" in command("docker", "logs", name), every_s=0.1)
        if fault == "slow":
            # only now: at its old address, old connections to it would live on
            reconnect(stack, service, named=False)
        yield
    finally:
        command("docker", "rm", "--force", name)
        if fault == "slow":
            cut(stack, service)
        reconnect(stack, service)


@contextlib.contextmanager
def inflicted(stack: Stack, row: Row) -> Iterator[Callable[[], None]]:
    """The row's fault until the end; what it yields is called before each operation."""
    service, fault = row.dependency, row.fault
    name = container(stack, service)
    with contextlib.ExitStack() as undo:
        again: Callable[[], None] = lambda: None  # noqa: E731
        match fault:
            case "stopped":
                command("docker", "stop", name)
                undo.callback(command, "docker", "start", name)
            case "paused":
                command("docker", "pause", name)
                undo.callback(command, "docker", "unpause", name)
            case "killed":
                again = lambda: void(kill(stack, service))  # noqa: E731
            case "cut":
                cut(stack, service)
                undo.callback(reconnect, stack, service)
            case "disk-full":
                undo.enter_context(filled(stack, VOLUMES[service]))
            case _ if service == "embeddings":
                stack.set_fault(fault)
                undo.callback(stack.clear_fault)
            case _:
                undo.enter_context(impostor(stack, service, fault))
        yield again


def void(_: object) -> None:
    """For a call whose answer nobody needs."""
