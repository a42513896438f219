"""The program of the VM on a stack of its own: releases, and how one follows the other."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import build
import init_env
from stack import COMPOSE, ROOT, SERVICES, Stack, clean_environment, command

PROJECT: Final = "warmstart-roll"
#: Of one command; a roll-out takes some twenty seconds on a quiet machine.
RUN_TIMEOUT_S: Final = 300
#: The program as it is, but for the patience of its gate.
PROGRAM: Final = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}]
from ops.vm import gate
from ops.vm.__main__ import main
gate.GATE_TIMEOUT_S = float(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""


@dataclass
class Vm:
    """A root folder laid out as a deploy does it."""

    root: Path
    stack: Stack

    def lay_release(self, name: str, app: str, *, caddyfile: Callable[[str], str] = str) -> None:
        folder = self.root / "opt/warmstart/releases" / name
        (folder / "compose/caddy").mkdir(parents=True)
        shutil.copy(COMPOSE / "compose.yml", folder / "compose")
        text = (COMPOSE / "caddy/Caddyfile").read_text()
        (folder / "compose/caddy/Caddyfile").write_text(caddyfile(text))
        images = {name: app if name in APP else f"{PROJECT}/{name}" for name in (*SERVICES, "api-b")}
        lines = ["services:"]
        for service, image in images.items():
            lines += [f"  {service}:", f"    image: {image}", "    pull_policy: never", "    build: !reset null"]
        (folder / "compose.images.yml").write_text("\n".join(lines) + "\n")
        manifest = {"release": name, "images": {s: {"name": i, "id": image_id(i)} for s, i in images.items()}}
        (folder / "manifest.json").write_text(json.dumps(manifest))

    def start(self, *words: str, gate_s: int = 60) -> subprocess.Popen[str]:
        env = {"WARMSTART_VM_ROOT": str(self.root), "WARMSTART_VM_PROJECT": PROJECT}
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(gate_s), *words], env={**clean_environment(), **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def run(self, *words: str, code: int = 0, gate_s: int = 60) -> str:
        with self.start(*words, gate_s=gate_s) as program:
            try:
                said, _ = program.communicate(timeout=RUN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                program.kill()
                raise
        print(f"$ {' '.join(words)}\n{said}")
        assert program.returncode == code, said
        return said

    def deploy(self, release: str, code: int = 0) -> str:
        return self.run("services", release) + self.run("migrate", release) + self.run("rollout", release, code=code)

    def pending(self, release: str) -> dict[str, Any]:
        return json.loads(self.run("pending", release, "--json"))  # type: ignore[no-any-return]

    def linked(self, name: str) -> str:
        return os.readlink(self.root / "opt/warmstart" / name).removeprefix("releases/")

    def containers(self) -> dict[str, tuple[str, str, str]]:
        """By service: id, start, image."""
        ids = command("docker", "ps", "-aq", "--filter", f"label=com.docker.compose.project={PROJECT}").split()
        found = json.loads(command("docker", "inspect", *ids))
        assert len({c["Config"]["Labels"]["com.docker.compose.service"] for c in found}) == len(found)
        return {
            c["Config"]["Labels"]["com.docker.compose.service"]: (c["Id"], c["State"]["StartedAt"], c["Image"])
            for c in found
        }

    @property
    def flag(self) -> Path:
        return self.root / "opt/warmstart/config/caddy/traffic/b"

    @property
    def serving(self) -> str:
        return "api-b" if self.flag.exists() else "api"


APP: Final = ("api", "api-b", "worker", "redis-rest")


def image_id(name: str) -> str:
    return command("docker", "image", "inspect", "--format", "{{.Id}}", name).strip()


def derive(name: str, line: str) -> str:
    tag = f"{PROJECT}/app:{name}"
    text = f"FROM {build.tag('app')}\n{line}\n"
    command("docker", "buildx", "build", "--quiet", "--load", "--tag", tag, "-", stdin=text)
    return tag


@contextmanager
def released(stack: Stack, root: Path, lines_of: Mapping[str, str]) -> Iterator[Vm]:
    """A release of each image that has one line more than the app's; the one called `first` serves."""
    root.chmod(0o755)  # caddy's rules are for a user of a container
    etc = root / "etc/warmstart"
    etc.mkdir(parents=True)
    secret = re.compile(rf"^({'|'.join((*init_env.SECRETS, 'DATABASE_URL'))})=")
    lines = [line for line in stack.env_file.read_text().splitlines() if re.match("[A-Z]", line)]
    for name, kept in (("settings", False), ("secrets", True)):
        (etc / f"{name}.env").write_text("".join(f"{line}\n" for line in lines if bool(secret.match(line)) is kept))
    made = Vm(root, stack)
    names = {name: derive(name, line) for name, line in lines_of.items()}
    # names of their own, as those of releases: the tests' names move on with the next build
    others = [name for name in SERVICES if name not in APP]
    for name in others:
        command("docker", "tag", build.tag({"embeddings": "tei"}.get(name, name)), f"{PROJECT}/{name}")
    down = ("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "10")
    stack.compose(*down)  # of a run that was killed
    try:
        for name, image in names.items():
            made.lay_release(name, image)
        made.deploy("first")
        stack.fetch_authority()
        yield made
    finally:
        stack.compose(*down)
        command("docker", "image", "rm", "--force", *names.values(), *(f"{PROJECT}/{name}" for name in others))
