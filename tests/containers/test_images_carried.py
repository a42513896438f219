"""Images carried over SSH into another engine: only what it lacks, and what arrives is what was here."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import build
import pytest
from stack import command, free_port, wait_until

from ops import carry, images, ssh
from ops.images import Engine, ImageError, Local
from ops.inventory import Target
from ops.steps.images import CONTAINERD, ENGINE

pytestmark = pytest.mark.slow

CAPABILITIES: Final = ("SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE", "DAC_READ_SEARCH", "SYS_NICE")
NAME: Final = "warmstart-img"
CLASSIC: Final = "{}"
CONTAINERD_STORE: Final = '{"features": {"containerd-snapshotter": true}}'


@dataclass
class Remote:
    """A machine with an engine of its own, reached by SSH."""

    target: Target

    def run(self, *words: str) -> str:
        done = subprocess.run(ssh.command(self.target, *words), capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def engine(self) -> Engine:
        lines = self.run("sh", "-c", ENGINE).splitlines()
        return Engine([json.loads(line) for line in lines[2:]], lines[0], CONTAINERD in lines[1])

    def received(self) -> int:
        """Bytes over the line so far."""
        return int(self.run("cat", "/sys/class/net/eth0/statistics/rx_bytes"))


@pytest.fixture(scope="module")
def make_remote(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Remote]]:
    folder = build.IMAGES / "engine"
    build.build_image(build.Image("engine", folder, folder / "Dockerfile", [folder], {}, ["base"]))
    keys = tmp_path_factory.mktemp("ssh")
    command("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / "id"))
    made: list[str] = []

    def make(daemon: str) -> Remote:
        name, port = f"{NAME}-{len(made)}-{time.time_ns()}", free_port()
        made.append(name)
        command(
            "docker", "run", "--detach", "--name", name, *(f"--cap-add={c}" for c in CAPABILITIES),
            *(f"--security-opt={o}=unconfined" for o in ("seccomp", "apparmor", "systempaths")),
            "--cgroupns=private", "--tmpfs=/run", f"--volume={name}:/var/lib/docker", "--memory=2g",
            f"--publish=127.0.0.1:{port}:22", f"--env=DAEMON={daemon}",
            f"--env=AUTHORIZED_KEY={(keys / 'id.pub').read_text().strip()}", build.tag("engine"),
        )  # fmt: skip
        known = keys / f"known-{port}"
        target = Target(
            host="127.0.0.1", ssh_port=port, ssh_key=str(keys / "id"), ssh_known_hosts=str(known), address="127.0.0.1"
        )
        remote = Remote(target)
        wait_until("the engine answers over SSH", lambda: remote.run("docker", "info"), timeout_s=120)
        return remote

    yield make
    for name in made:
        command("docker", "rm", "--force", "--volumes", name)
        command("docker", "volume", "rm", "--force", name)


@pytest.fixture(scope="module")
def classic(make_remote: Callable[[str], Remote]) -> Remote:
    return make_remote(CLASSIC)


@pytest.fixture(scope="module")
def newer() -> Iterator[str]:
    """Redis' image with one small layer on top."""
    name = f"{NAME}/newer:1"
    text = f"FROM {build.tag('redis')}\nUSER 0\nRUN echo 2 > /etc/newer\nUSER 10002\nLABEL newer=1\n"
    command("docker", "build", "--quiet", "--tag", name, "-", stdin=text)
    yield name
    command("docker", "image", "rm", name)


def local(component: str, name: str) -> Local:
    found = images.inspect(name)
    assert found is not None
    return Local(component, name, found)


def carried(remote: Remote, tmp_path: Path, *found: Local, has: set[Any] | None = None) -> tuple[list[str], int]:
    """What was said, and the bytes that it took."""
    said: list[str] = []
    before = remote.received()
    carry.carry(remote.target, found, remote.engine().has() if has is None else has, tmp_path, said.append)
    return said, remote.received() - before


def test_the_image_there_is_the_one_here_and_runs(
    classic: Remote, newer: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    redis = local("redis", build.tag("redis"))
    carried(classic, tmp_path, redis)
    there = classic.engine().find(redis.name)
    assert there is not None
    assert images.fingerprint(there) == redis.fingerprint
    assert there["Id"] == redis.image["Id"], "both engines are classic ones"
    assert "Redis server" in classic.run("docker", "run", "--rm", "--entrypoint=redis-server", redis.name, "--version")

    # the next version: the layers that are there stay here
    update = local("redis", newer)
    _, size = carried(classic, tmp_path, update)
    assert size < 1_000_000 < update.image["Size"]
    there = classic.engine().find(update.name)
    assert there is not None
    assert there["Id"] == update.image["Id"]
    said = classic.run(
        "docker", "run", "--rm", "--entrypoint=sh", update.name, "-c", "cat /etc/newer; redis-server --version"
    )
    assert said.startswith("2\nRedis server")
    # nothing of this machine's names came along
    assert {tag for image in classic.engine().images for tag in image["RepoTags"]} == {redis.name, update.name}


def test_where_layers_were_thought_to_be_there_the_whole_is_sent(classic: Remote, tmp_path: Path) -> None:
    caddy = local("caddy", build.tag("caddy"))
    everything = set(images.chains(images.layers(caddy.image["RootFS"])))
    said, size = carried(classic, tmp_path, caddy, has=everything)
    assert "once more with all layers" in " ".join(said)
    assert size > 10_000_000
    assert (
        classic.run("docker", "run", "--rm", "--entrypoint=caddy", caddy.name, "version").lstrip("v").startswith("2.")
    )


def test_an_engine_with_containerds_store_gets_the_whole(
    make_remote: Callable[[str], Remote], newer: str, tmp_path: Path
) -> None:
    """It would take an archive without the layers for an image, and could not run it."""
    remote = make_remote(CONTAINERD_STORE)
    assert remote.engine().containerd
    redis, update = local("redis", build.tag("redis")), local("redis", newer)
    carried(remote, tmp_path, redis)
    carried(remote, tmp_path, update)
    there = remote.engine().find(update.name)
    assert there is not None
    assert there["Id"] != update.image["Id"], "this store has other ids, so they are no proof"
    assert images.fingerprint(there) == update.fingerprint
    said = remote.run(
        "docker", "run", "--rm", "--entrypoint=sh", update.name, "-c", "cat /etc/newer; redis-server --version"
    )
    assert said.startswith("2\nRedis server")


def test_a_machine_that_is_not_reached_says_so(tmp_path: Path) -> None:
    target = Target(
        host="127.0.0.1", ssh_port=free_port(), ssh_known_hosts=str(tmp_path / "known"), address="127.0.0.1"
    )
    with pytest.raises(ImageError, match="Connection refused"):
        carry.carry(target, [local("redis", build.tag("redis"))], set(), tmp_path, lambda line: None)
