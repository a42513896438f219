"""Machines to deploy to, reached from outside alone: over SSH, and by the ports of their services."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import socket
import subprocess
import tarfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from containers import build
from containers.stack import free_port, wait_until
from vm import image

#: Ports that a machine offers on this host's 127.0.0.1, each on another one.
PUBLISHED: Final = (22, 80, 443)
#: What systemd, and docker in the machine, need; not `--privileged`, since the host itself may lack a capability.
CAPABILITIES: Final = (
    "SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE", "DAC_READ_SEARCH", "SYS_NICE", "IPC_LOCK", "LINUX_IMMUTABLE",
    "AUDIT_CONTROL", "SYSLOG",
)  # fmt: skip
MEMORY: Final = "6g"
COMMAND_TIMEOUT_S: Final = 60.0
BOOT_TIMEOUT_S: Final = 90.0
STOP_TIMEOUT_S: Final = 60
REMOVE_TIMEOUT_S: Final = 300.0
#: A port that answers at all does so in less.
ANSWER_TIMEOUT_S: Final = 3.0
#: Label of a machine: the process that uses it.
OWNER: Final = "org.warmstart.owner"


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        return self.out + self.err


def execute(
    words: Sequence[str | Path], *, timeout_s: float, stdin: bytes = b"", cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Result:  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(words, input=stdin, capture_output=True, timeout=timeout_s, cwd=cwd, env=env)
    out, err = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    return Result(done.returncode, out, err, time.monotonic() - began)


class Machine(ABC):
    """A server that was just handed out. What is done to it stays until `remove`, also over a stop and a start."""

    #: How many times longer than the container's everything may take.
    patience: ClassVar[float] = 1.0

    def __init__(self, name: str) -> None:
        self.name = f"{image.PREFIX}-{name}-{os.getpid()}"
        #: Of this host, for each of PUBLISHED.
        self.ports: dict[int, int] = {port: free_port() for port in PUBLISHED}
        self.folder = image.CACHE / "machines" / self.name
        self.known_hosts = self.folder / "known_hosts"

    # -- its life

    @abstractmethod
    def start(self) -> None:
        """Switches it on, a new one or one that was stopped, and waits until it is up."""

    @abstractmethod
    def stop(self) -> None:
        """Shuts it down in order."""

    @abstractmethod
    def cut_power(self) -> None:
        """Stops it as it is, with all that runs on it."""

    @abstractmethod
    def remove(self) -> None:
        """It, and all it has stored."""

    @abstractmethod
    def outside(self, port: int) -> tuple[str, int]:
        """Where any of its ports is reached from here, with nothing between but its own firewall."""

    def wait(self, ready: Callable[[], object] = lambda: True, timeout_s: float = BOOT_TIMEOUT_S) -> None:
        """Until it answers over SSH, `ready` holds, and it is through with its start."""
        wait_until(f"{self.name} answers", lambda: self._answers_ssh() and ready(), timeout_s * self.patience)
        self.ssh("systemctl is-system-running --wait", check=False, timeout_s=timeout_s * self.patience)

    def _answers_ssh(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.ssh("true", check=False, timeout_s=10).code == 0
        return False

    def reboot(self) -> float:
        """By its own init; seconds until it is up again."""
        began, before = time.monotonic(), self.boot
        # the connection may be gone before the answer is here
        self.ssh("systemctl reboot", check=False)
        self.wait(lambda: self.boot != before)
        return time.monotonic() - began

    @property
    def boot(self) -> str:
        """Another one after each start. The kernel's own boot id isn't: a container has the host's kernel."""
        return self.ssh("systemctl show --property=UserspaceTimestampMonotonic --value").out.strip()

    # -- the way in

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.ports[443]}"

    def ssh_options(self, operator: str = image.OPERATORS[0], *, port_option: str = "-p") -> list[str]:
        """With nothing of the person who runs the tests: no settings, agent or known hosts."""
        options = {
            "BatchMode": "yes", "IdentitiesOnly": "yes", "IdentityAgent": "none", "StrictHostKeyChecking": "accept-new",
            "UserKnownHostsFile": str(self.known_hosts), "ConnectTimeout": str(round(5 * self.patience)),
            "LogLevel": "ERROR",
        }  # fmt: skip
        words = ["-F", "/dev/null", "-i", str(image.key(operator)), port_option, str(self.ports[22])]
        return [*words, *(word for option, value in options.items() for word in ("-o", f"{option}={value}"))]

    def ssh(
        self, command: str, *, user: str = "root", operator: str = image.OPERATORS[0], stdin: bytes = b"",
        check: bool = True, timeout_s: float = COMMAND_TIMEOUT_S,
    ) -> Result:  # fmt: skip
        """`command` is for the machine's shell. Raises AssertionError where it fails, with what it said."""
        words = ["ssh", *self.ssh_options(operator), f"{user}@127.0.0.1", "--", command]
        done = execute(words, stdin=stdin, timeout_s=timeout_s * self.patience)
        assert done.code == 0 or not check, (
            f"{self.name}: `{command[:200]}` ended with {done.code}\n{done.text[-4000:]}"
        )
        return done

    def copy(self, local: Path, remote: str, *, timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """A file or folder of this host to the machine, as root."""
        words = ["scp", "-q", "-r", *self.ssh_options(port_option="-P"), str(local), f"root@127.0.0.1:{remote}"]
        done = execute(words, timeout_s=timeout_s * self.patience)
        assert done.code == 0, f"{self.name}: {local} can't be copied to {remote}\n{done.text[-2000:]}"

    def answers(self, port: int) -> bool:
        """Whether a program that listens on that port says anything to somebody outside. A connection says nothing: one
        to an emulated machine stands before the machine was asked."""
        try:
            with socket.create_connection(self.outside(port), ANSWER_TIMEOUT_S * self.patience) as connection:
                # SSH speaks first, HTTP answers, and a server of TLS complains
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                return bool(connection.recv(1))
        except OSError:
            return False

    def last_words(self) -> str:
        """What may explain a failure."""
        command = "journalctl --boot --no-pager --priority warning --lines 40; docker ps --all 2>&1"
        try:
            return self.ssh(command, check=False).text
        except (AssertionError, subprocess.SubprocessError) as error:
            return f"it says nothing: {error}"


#: A new machine of that name, on until the block ends.
RunMachine = Callable[[str], AbstractContextManager[Machine]]


class Container(Machine):
    """A container with systemd as its first process. It has the host's kernel, and no AppArmor."""

    def start(self) -> None:
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            self._create()
        docker("start", self.name)
        self.wait()

    def _create(self) -> None:
        options = [word for name in CAPABILITIES for word in ("--cap-add", name)]
        for profile in ("seccomp", "apparmor", "systempaths"):
            options += ["--security-opt", f"{profile}=unconfined"]
        for folder in ("/run", "/run/lock", "/tmp"):
            options += ["--tmpfs", folder]
        for port, here in self.ports.items():
            options += ["--publish", f"127.0.0.1:{here}:{port}"]
        docker(
            "create", "--name", self.name, "--hostname", "warmstart-vm", "--label", f"{OWNER}={os.getpid()}", *options,
            # a reboot ends the first process; SIGRTMIN+3 asks systemd for a shutdown
            "--restart", "unless-stopped", "--stop-signal", "SIGRTMIN+3", "--stop-timeout", str(STOP_TIMEOUT_S),
            # docker in docker can't have its layers on a layer
            "--cgroupns", "private", "--memory", MEMORY, "--volume", "/var/lib/docker", image.IMAGE,
        )  # fmt: skip
        docker("cp", "-", f"{self.name}:/", stdin=_authorized_keys())

    def stop(self) -> None:
        docker("stop", self.name, timeout_s=STOP_TIMEOUT_S + 30)

    def cut_power(self) -> None:
        docker("kill", self.name)

    def remove(self) -> None:
        # its own containers and images go with it
        docker("rm", "--force", "--volumes", self.name, timeout_s=REMOVE_TIMEOUT_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def outside(self, port: int) -> tuple[str, int]:
        return docker("inspect", "--format", "{{.NetworkSettings.IPAddress}}", self.name).strip(), port


def docker(*words: str, stdin: bytes = b"", timeout_s: float = COMMAND_TIMEOUT_S) -> str:
    done = execute(["docker", *words], stdin=stdin, timeout_s=timeout_s)
    assert done.code == 0, f"docker {' '.join(words)[:200]} ended with {done.code}\n{done.text[-2000:]}"
    return done.out


def _authorized_keys() -> bytes:
    """A tar of what a provider puts on a new machine."""
    keys = image.authorized_keys().encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for home, owner in image.HOMES.items():
            folder, file = tarfile.TarInfo(f"{home}/.ssh"), tarfile.TarInfo(f"{home}/.ssh/authorized_keys")
            folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o700, owner, owner
            file.size, file.mode, file.uid, file.gid = len(keys), 0o600, owner, owner
            tar.addfile(folder)
            tar.addfile(file, io.BytesIO(keys))
    return buffer.getvalue()


def sweep() -> None:
    """Removes machines whose tests were killed."""
    listed = docker("ps", "--all", "--filter", f"label={OWNER}", "--format", f'{{{{.Names}}}} {{{{.Label "{OWNER}"}}}}')
    for line in listed.splitlines():
        name, owner = line.split()
        if not Path("/proc", owner).exists():
            docker("rm", "--force", "--volumes", name)
            shutil.rmtree(image.CACHE / "machines" / name, ignore_errors=True)


def prepare() -> None:
    """What a container machine is made of. Raises build.BuildError where that can't be had."""
    build.ensure_engine()
    image.build_machine()
    sweep()
