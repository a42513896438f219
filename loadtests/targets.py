"""Where the load goes: a server started here, the stack in containers, or any URL with keys of the operator's."""

from __future__ import annotations

import ipaddress
import json
import os
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx

from loadtests import seeding
from loadtests.data import Item
from loadtests.sampler import Source
from loadtests.scenario import ScenarioError

PROVISION: Final = Path(__file__).with_name("provision.py")
START_S: Final = 60.0
STOP_S: Final = 20.0
CLIENT_TIMEOUT_S: Final = 60.0
#: A minute, of the key that is stormed; so low that it is met within seconds.
STORM_LIMIT: Final = 60
#: What no setting of the person who runs this may reach.
KEPT_VARIABLES: Final = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "VIRTUAL_ENV",
    "SSL_CERT_FILE",
)

Seed = Callable[[Iterator[Item]], int]


@dataclass
class Target:
    url: str
    #: One a tenant, without a limit; the first tenant is the largest.
    keys: list[str] = field(repr=False)
    #: Rows created of so many items; they have their vectors when it returns.
    seed: Seed
    #: By process, where its metrics are.
    sources: Mapping[str, Source] = field(default_factory=dict)
    limited_key: str = field(default="", repr=False)
    #: PEM.
    authority: str = ""
    #: It ends with the run, all data with it.
    throwaway: bool = True
    #: The machinery of tests/containers, for faults.
    stack: Any = None
    releases: Any = None

    @contextmanager
    def clients(self) -> Iterator[list[httpx.Client]]:
        """One a tenant."""
        verify = ssl.create_default_context(cadata=self.authority) if self.authority else ssl.create_default_context()
        with ExitStack() as opened:
            yield [
                opened.enter_context(
                    httpx.Client(
                        base_url=self.url, headers={"Authorization": f"Bearer {key}"}, verify=verify,
                        timeout=CLIENT_TIMEOUT_S, trust_env=not is_loopback(self.url),
                    )
                )
                for key in self.keys
            ]  # fmt: skip


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def provision(command: Sequence[str], names: Sequence[str], environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [*command, PROVISION.read_text()], input=json.dumps({"names": names}), capture_output=True, text=True,
        timeout=START_S, env=environ,
    )  # fmt: skip
    if done.returncode:
        raise seeding.SeedingFailed(f"tenants could not be made:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def tenant_names(prefix: str, count: int) -> list[str]:
    return [f"{prefix}-tenant-{number}" for number in range(count)]


@contextmanager
def given(url: str, keys: list[str], confirmed_host: str, tell: seeding.Progress) -> Iterator[Target]:
    """Somebody's server. Any host but this machine's own must be named twice."""
    host = urlsplit(url).hostname or ""
    if not host:
        raise ScenarioError(f"URL {url!r} must be like https://memory.example.org")
    if not keys:
        raise ScenarioError(
            "KEY is missing: make a tenant and a key for it (`warmstart tenants create loadtest`, "
            "`warmstart keys create loadtest --tenant loadtest --unlimited`)"
        )
    if not is_loopback(url) and confirmed_host != host:
        raise ScenarioError(
            f"{host} is not this machine: its users would feel the load. If that is meant, name it again: "
            f"--confirm-host {host} (make loadtest … CONFIRM_HOST={host})"
        )
    target = Target(url.rstrip("/"), keys, lambda items: 0, throwaway=False)
    with target.clients() as clients:
        for client in clients:
            _refuse_limited(client)
        target.seed = lambda items: seeding.through_api(items, clients, tell)
        if is_loopback(url):
            target.sources = {"server": lambda: f"{target.url}/metrics"}
        yield target


def _refuse_limited(client: httpx.Client) -> None:
    """The headers of two answers tell whether a key is counted."""
    left = []
    for _ in range(2):
        answer = client.get("/v1/memories/counts")
        if answer.status_code != 200:
            raise ScenarioError(f"a key does not work at {client.base_url}: {answer.status_code} {answer.text[:200]}")
        left.append(answer.headers.get("ratelimit-remaining"))
    if left[0] != answer.headers.get("ratelimit-limit") or left[0] != left[1]:
        raise ScenarioError(
            "a key has a rate limit, and the run would measure that: make one with "
            "`warmstart keys create loadtest --tenant loadtest --unlimited`"
        )


@contextmanager
def local(tenants: int, prefix: str) -> Iterator[Target]:
    """`warmstart serve` on a home of its own, worker, Postgres and model included, as a developer has it."""
    with tempfile.TemporaryDirectory(prefix="warmstart-load-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # Postgres runs as another user where this is root's
        home = folder / "home"
        environ = {
            **{k: v for k, v in os.environ.items() if k in KEPT_VARIABLES},
            # this tree's service, wherever the installed one is linked to
            "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "app"),
            "WARMSTART_HOME": str(home),
            "WARMSTART_ALLOW_ROOT": "True",
            "RATE_LIMIT_PER_MINUTE": str(STORM_LIMIT),
            "LOG_LEVEL": "warning",
        }
        log = folder / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "warmstart.cli", "serve", "--port", "0"],
                env=environ,
                stdout=output,
                stderr=output,
            )
        try:
            url = _wait_for_server(server, home / "server.json", log)
            python = [sys.executable, "-c"]
            made = provision(python, tenant_names(prefix, tenants), environ)
            ids = [tenant["id"] for tenant in made["tenants"]]
            yield Target(
                url, [tenant["key"] for tenant in made["tenants"]],
                lambda items: seeding.into_store(items, ids, python, environ),
                {"server": lambda: f"{url}/metrics"}, made["limited_key"],
            )  # fmt: skip
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait_for_server(server: subprocess.Popen[bytes], info: Path, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while not info.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise seeding.SeedingFailed(f"the server did not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.1)
    return str(json.loads(info.read_text())["url"])
