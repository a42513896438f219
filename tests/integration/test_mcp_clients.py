"""MCP clients nobody here wrote, unchanged, over both transports and both protocol generations."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clients.node import INSTALL_ENV, INSTALL_TIMEOUT_S, NODE, npm_ci
from warmstart.home import Home

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "clients" / "mcp"
CACHE = ROOT / ".cache"
START_S = 120.0
STOP_S = 30.0
TOOLS = [
    "memory_save", "memory_search", "memory_recall", "memory_get",
    "memory_update", "memory_delete", "memory_list_namespaces", "memory_health",
]  # fmt: skip


def environment(home: Path) -> dict[str, str]:
    """What a client sees: its own home, a Node of our own, nothing that phones home."""
    return {
        "PATH": f"{NODE.parent}:{os.environ['PATH']}",
        "HOME": str(home),
        "NO_COLOR": "1",
        "FORCE_COLOR": "0",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


async def run(*command: str | Path, home: Path, ok: bool = True) -> str:
    """Standard output of a client; `ok` says how it must end."""
    process = await asyncio.create_subprocess_exec(
        *map(str, command), cwd=home, env=environment(home), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode == 0) is ok, (
        f"{command[0]} ended with {process.returncode}\n{out.decode()}\n{err.decode()}"
    )
    return out.decode()


@pytest.fixture(scope="session")
def node_clients() -> Path:
    """A folder with the locked clients in node_modules and our scripts beside it."""
    return npm_ci(SOURCE)


@pytest.fixture(scope="session")
def fastmcp_python() -> Path:
    """A Python with fastmcp in an environment of its own, made once for each state of its requirements."""
    requirements = SOURCE / "requirements.txt"
    venv = CACHE / f"fastmcp-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]}"
    python, whole = venv / "bin" / "python", venv / ".whole"
    if not whole.exists():
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements]
        for command in ([sys.executable, "-m", "venv", "--clear", venv], pip):
            done = subprocess.run(command, env=INSTALL_ENV, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        whole.touch()
    return python


def command_on(home: Home, *words: str) -> list[str]:
    """A command of ours with its settings, since hosts hand on next to nothing of their own environment."""
    settings = {"WARMSTART_HOME": home.path, "WARMSTART_ALLOW_ROOT": "True", "RATE_LIMIT_PER_MINUTE": 10_000}
    return [
        "env",
        *(f"{name}={value}" for name, value in settings.items()),
        sys.executable,
        "-m",
        "warmstart.cli",
        *words,
    ]


def until(done: Callable[[], Any], timeout_s: float) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := done()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@contextmanager
def temporary_home() -> Iterator[Home]:
    """A home that nothing runs on; the server that was started on it ends with it."""
    with tempfile.TemporaryDirectory(prefix="wst-") as folder:
        home = Home(Path(folder) / "home")
        try:
            yield home
        finally:
            if holder := home.holder():
                os.kill(holder.pid, signal.SIGTERM)
            assert until(lambda: home.holder() is None, STOP_S)


@pytest.fixture(scope="module")
def served_home() -> Iterator[Home]:
    with temporary_home() as home:
        words = command_on(home, "serve", "--port", "0")
        server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert until(home.server, START_S)
            yield home
        finally:
            server.terminate()
            server.wait(STOP_S)


@pytest.fixture(scope="module")
def mcp_endpoint(served_home: Home) -> tuple[str, str]:
    """URL and key of the server over streamable HTTP."""
    server = served_home.server()
    assert server is not None
    return f"{server.url}/mcp", server.api_key


@pytest.fixture(scope="module")
def stdio_command(served_home: Home) -> list[str]:
    """The command of a server over stdio; it attaches to the running one."""
    return command_on(served_home, "mcp")


@pytest.fixture(params=["http", "stdio"])
def target(request: pytest.FixtureRequest) -> list[str]:
    """A transport and how to reach it, as our client scripts take it."""
    if request.param == "http":
        return ["http", *request.getfixturevalue("mcp_endpoint")]
    return ["stdio", *request.getfixturevalue("stdio_command")]


def check_story(seen: dict[str, Any]) -> None:
    """What each script did: saved, found, read, missed, erred, and asked for context."""
    assert seen["tools"] == TOOLS
    assert seen["id"] in seen["hits"]
    assert "remembers quokkas" in seen["content"]
    assert seen["missing"]["isError"] is True
    assert json.loads(seen["missing"]["text"])["status"] == 404
    assert "unknown field 'limt'" in seen["fault"]["message"]
    assert seen["content"] in seen["prompt"]


@pytest.mark.parametrize("package", ["sdk", "client"])
async def test_typescript_sdk(package: str, target: list[str], node_clients: Path, tmp_path: Path) -> None:
    out = await run("node", node_clients / "sdk.mjs", package, *target, home=tmp_path)
    seen = json.loads(out)
    check_story(seen)
    assert seen["fault"]["code"] == -32602
    assert seen["server"]["name"] == "warmstart"


async def test_a_client_over_stdio_where_no_server_runs(node_clients: Path, tmp_path: Path) -> None:
    with temporary_home() as home:
        check_story(
            json.loads(
                await run("node", node_clients / "sdk.mjs", "client", "stdio", *command_on(home, "mcp"), home=tmp_path)
            )
        )
        assert home.server() is not None


async def test_fastmcp(target: list[str], fastmcp_python: Path, tmp_path: Path) -> None:
    check_story(json.loads(await run(fastmcp_python, SOURCE / "fastmcp_client.py", *target, home=tmp_path)))


def inspector(clients: Path, target: list[str], era: str) -> list[str | Path]:
    kind, *rest = target
    command: list[str | Path] = ["node", clients / "node_modules" / ".bin" / "inspector", "--cli"]
    if kind == "http":
        url, key = rest
        where = ["--server-url", url, "--transport", "http", "--header", f"Authorization: Bearer {key}"]
        return [*command, *where, "--protocol-era", era]
    return [*command, "--protocol-era", era, *rest]


@pytest.mark.parametrize("era", ["legacy", "modern"])
async def test_inspector(era: str, target: list[str], node_clients: Path, tmp_path: Path) -> None:
    command = inspector(node_clients, target, era)
    content = f"content=Wombats of {era} {target[0]}"
    listing, saving = await asyncio.gather(
        run(*command, "--method", "tools/list", "--strict", home=tmp_path),
        run(*command, "--method", "tools/call", "--tool-name", "memory_save", "--tool-arg", content, home=tmp_path),
    )
    assert [tool["name"] for tool in json.loads(listing)["tools"]] == TOOLS
    saved = json.loads(saving)
    assert saved["structuredContent"]["id"].startswith("mem_")
    assert ("io.modelcontextprotocol/serverInfo" in saved.get("_meta", {})) is (era == "modern")


async def test_conformance(mcp_endpoint: tuple[str, str], node_clients: Path, tmp_path: Path) -> None:
    """The whole suite, all but the scenarios that the baseline names with a reason."""
    proxy = await asyncio.create_subprocess_exec(
        NODE, node_clients / "proxy.mjs", *mcp_endpoint, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert proxy.stdout is not None
    url = (await proxy.stdout.readline()).decode().strip()
    suite = node_clients / "node_modules" / ".bin" / "conformance"
    baseline = ["--expected-failures", SOURCE / "conformance-baseline.yml"]
    try:
        out = await run("node", suite, "server", "--url", url, "--suite", "all", *baseline, home=tmp_path)
    finally:
        proxy.terminate()
        await proxy.wait()
    for scenario in ("server-initialize", "ping", "tools-list", "prompts-list"):
        assert f"✓ {scenario}: 1 passed, 0 failed" in out
    assert "✓ dns-rebinding-protection: 2 passed, 0 failed" in out


async def test_claude_mcp_list(
    mcp_endpoint: tuple[str, str], stdio_command: list[str], node_clients: Path, tmp_path: Path
) -> None:
    url, key = mcp_endpoint
    claude = node_clients / "node_modules" / ".bin" / "claude"
    header = ["--header", f"Authorization: Bearer {key}"]
    await run(claude, "mcp", "add", "--transport", "http", "remote", url, *header, home=tmp_path)
    await run(claude, "mcp", "add", "local", "--", *stdio_command, home=tmp_path)

    listed = await run(claude, "mcp", "list", home=tmp_path)
    lines = [line for line in listed.splitlines() if line.startswith(("remote:", "local:"))]
    assert len(lines) == 2
    assert all(line.endswith("Connected") for line in lines), listed
