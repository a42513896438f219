"""One running stack of containers, and ways to look at it and to do it harm."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

ROOT: Final = Path(__file__).resolve().parents[2]
COMPOSE: Final = ROOT / "compose"
FILES: Final = (COMPOSE / "compose.yml", COMPOSE / "compose.local.yml")
SERVICES: Final = ("api", "caddy", "embeddings", "postgres", "redis", "redis-rest", "worker")
#: Where caddy keeps the certificate of its own authority.
AUTHORITY: Final = "/tmp/data/caddy/pki/authorities/local/root.crt"
STAND_IN_PORT: Final = 9000
TIMEOUT_S: Final = 180
UP: Final = "up --detach --wait --wait-timeout 150 --no-build --pull never"

T = TypeVar("T")


def clean_environment() -> dict[str, str]:
    """Without what a shell here may have set: Compose prefers that over the env file."""
    return {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "DOCKER_HOST")}


def command(*words: str, ok: bool = True, timeout_s: float = TIMEOUT_S, stdin: str | None = None) -> str:
    """Standard output; standard error too where it must fail."""
    done = subprocess.run(
        words, env=clean_environment(), capture_output=True, text=True, timeout=timeout_s, input=stdin
    )
    assert (done.returncode == 0) is ok, (
        f"{words} ended with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
    )
    return done.stdout if ok else done.stdout + done.stderr


def wait_until(what: str, check: Callable[[], T], timeout_s: float = 30.0, every_s: float = 0.25) -> T:
    """The first true answer of `check`; what it raises counts as no."""
    deadline = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            last = check()
        except (AssertionError, OSError, httpx.HTTPError) as error:
            last = error
        else:
            if last:
                return last  # type: ignore[return-value]
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}; last: {last!r}"
        time.sleep(every_s)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def write_env(folder: Path, settings: Mapping[str, str]) -> Path:
    """The example file with secrets, and with `settings` in place of what it has for them."""
    from init_env import fill  # type: ignore[import-not-found]

    text = fill((COMPOSE / ".env.example").read_text())
    for name, value in settings.items():
        text, count = re.subn(rf"^{name}=.*$", lambda _, n=name, v=value: f"{n}={v}", text, flags=re.MULTILINE)
        assert count == 1, f"{name} is not in .env.example"
    path = folder / "stack.env"
    path.write_text(text)
    path.chmod(0o600)
    return path


def model_folder(folder: Path) -> Path:
    """What the stand-in looks for in the folder of the model; its weights are in its image."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "model_type": "bert"}))
    for path in (model, *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return model


def prepared(folder: Path, project: str, edge: str, **settings: str) -> Stack:
    """A stack that is not started yet, with its files in `folder`, on ports of its own; `settings` as in .env."""
    folder.chmod(0o755)
    defaults = {
        "ADDRESS": "127.0.0.1", "BIND_ADDRESS": "127.0.0.1", "EDGE_PREFIX": edge,
        "HTTP_PORT": str(free_port()), "HTTPS_PORT": str(free_port()), "MODEL_DIR": str(model_folder(folder)),
    }  # fmt: skip
    return Stack(project, write_env(folder, {**defaults, **settings}))


class Stack:
    def __init__(self, project: str, env_file: Path) -> None:
        self.project = project
        self.files: Sequence[Path] = FILES
        self.env_file = env_file
        self.settings = dict(
            line.split("=", 1) for line in env_file.read_text().splitlines() if re.match(r"[A-Z_]+=", line)
        )
        self.host = f"127.0.0.1:{self.settings['HTTPS_PORT']}"
        self.url = f"https://{self.host}"
        self.authority = env_file.parent / "root.crt"

    # -- compose

    @property
    def base_command(self) -> list[str]:
        where = ["--env-file", str(self.env_file), "--project-directory", str(COMPOSE)]
        return ["docker", "compose", "--ansi", "never", *where]

    @property
    def shell_command(self) -> str:
        """For pytest-docker, which adds files and project to it."""
        env = (f"{name}={value}" for name, value in clean_environment().items())
        return shlex.join(["env", "-i", *env, *self.base_command])

    def compose(self, *words: str, **options: Any) -> str:
        files = [word for file in self.files for word in ("-f", str(file))]
        return command(*self.base_command, *files, "-p", self.project, *words, **options)

    def execute(self, service: str, *words: str, **options: Any) -> str:
        return self.compose("exec", "-T", service, *words, **options)

    def inspect(self, service: str) -> dict[str, Any]:
        # by the name that Compose gives it: asking Compose takes half a second
        [found] = json.loads(command("docker", "inspect", f"{self.project}-{service}-1"))
        return found  # type: ignore[no-any-return]

    def image(self, service: str) -> dict[str, Any]:
        [found] = json.loads(command("docker", "image", "inspect", self.inspect(service)["Image"]))
        return found  # type: ignore[no-any-return]

    def address(self, service: str, network: str = "backend") -> str:
        return str(self.inspect(service)["NetworkSettings"]["Networks"][f"{self.project}_{network}"]["IPAddress"])

    def logs(self, service: str) -> str:
        """Of this container, both streams."""
        done = subprocess.run(
            ["docker", "logs", self.inspect(service)["Id"]],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip
        return done.stdout

    # -- the way in

    def fetch_authority(self) -> None:
        certificate = wait_until("caddy has its authority", lambda: self.execute("caddy", "cat", AUTHORITY))
        self.authority.write_text(certificate)

    def create_key(self, name: str = "tests", *options: str) -> str:
        line = self.execute("api", "warmstart", "keys", "create", name, "--json", *options).splitlines()[-1]
        return str(json.loads(line)["key"])

    def client(self, key: str = "", **options: Any) -> httpx.Client:
        import ssl

        headers = {"Authorization": f"Bearer {key}"} if key else {}
        context = ssl.create_default_context(cafile=str(self.authority))
        return httpx.Client(base_url=self.url, headers=headers, verify=context, timeout=30, trust_env=False, **options)

    # -- the embedding server's other port

    @property
    def _stand_in(self) -> str:
        return f"http://{self.address('embeddings')}:{STAND_IN_PORT}"

    def set_fault(self, kind: str, **details: Any) -> None:
        httpx.put(f"{self._stand_in}/fault", json={"kind": kind, **details}, trust_env=False).raise_for_status()

    def clear_fault(self) -> None:
        httpx.delete(f"{self._stand_in}/fault", trust_env=False).raise_for_status()

    def embedding_requests(self) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self._stand_in}/requests", trust_env=False)
        return answer.raise_for_status().json()  # type: ignore[no-any-return]
