"""Clients nobody here wrote, against the running stack: MCP through caddy, Upstash's own against redis-rest."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from stack import ROOT, Stack
from upstash_redis import Redis

from clients.node import NODE, npm_ci

SOURCE = ROOT / "tests" / "clients"
TOOLS = [
    "memory_save", "memory_search", "memory_recall", "memory_get",
    "memory_update", "memory_delete", "memory_list_namespaces", "memory_health",
]  # fmt: skip


def node(folder: Path, home: Path, *words: str | Path, **env: str) -> str:
    done = subprocess.run(
        [NODE, *words], cwd=folder, capture_output=True, text=True, timeout=90,
        env={"PATH": f"{NODE.parent}:{os.environ['PATH']}", "HOME": str(home), "NO_COLOR": "1", **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def mcp_clients() -> Path:
    return npm_ci(SOURCE / "mcp")


async def test_python_sdk(stack: Stack, key: str) -> None:
    context = ssl.create_default_context(cafile=str(stack.authority))
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        httpx2.AsyncClient(verify=context, headers=headers, timeout=30, trust_env=False) as http,
        Client(streamable_http_client(f"{stack.url}/mcp", http_client=http)) as client,
    ):
        assert [tool.name for tool in (await client.list_tools()).tools] == TOOLS
        saved = await client.call_tool("memory_save", {"content": "Numbats eat termites, says the Python SDK."})
        memory_id = saved.structured_content["id"]
        found = await client.call_tool("memory_search", {"query": "what do numbats eat?"})
        assert found.structured_content["hits"][0]["id"] == memory_id
        assert found.structured_content["mode"] == "hybrid"
        assert found.structured_content["degraded"] == []
        gone = await client.call_tool("memory_delete", {"id": memory_id})
        assert not gone.is_error


@pytest.mark.parametrize("package", ["sdk", "client"])
def test_typescript_sdk(package: str, mcp_clients: Path, stack: Stack, key: str, tmp_path: Path) -> None:
    out = node(
        mcp_clients, tmp_path, "sdk.mjs", package, "http", f"{stack.url}/mcp", key,
        NODE_EXTRA_CA_CERTS=str(stack.authority),
    )  # fmt: skip
    seen: dict[str, Any] = json.loads(out)
    assert seen["tools"] == TOOLS
    assert seen["id"] in seen["hits"]
    assert seen["fault"]["code"] == -32602
    assert json.loads(seen["missing"]["text"])["status"] == 404
    assert seen["content"] in seen["prompt"]


@pytest.mark.parametrize("era", ["legacy", "modern"])
def test_inspector(era: str, mcp_clients: Path, stack: Stack, key: str, tmp_path: Path) -> None:
    out = node(
        mcp_clients, tmp_path, mcp_clients / "node_modules" / ".bin" / "inspector", "--cli",
        "--server-url", f"{stack.url}/mcp", "--transport", "http", "--header", f"Authorization: Bearer {key}",
        "--protocol-era", era, "--method", "tools/list", "--strict",
        NODE_EXTRA_CA_CERTS=str(stack.authority),
    )  # fmt: skip
    assert [tool["name"] for tool in json.loads(out)["tools"]] == TOOLS


# -- Upstash's own, on the backend network as the api is


def rest_url(stack: Stack) -> str:
    return f"http://{stack.address('redis-rest')}:8079"


def test_upstash_for_python(stack: Stack) -> None:
    token = stack.settings["UPSTASH_REDIS_REST_TOKEN"]
    with Redis(url=rest_url(stack), token=token, rest_retries=0, allow_telemetry=False) as redis:
        assert redis.set("stack:a", "grüße", ex=60) is True
        assert redis.get("stack:a") == "grüße"
        assert redis.pipeline().incr("stack:n").incr("stack:n").exec() == [1, 2]
        assert redis.eval("#!lua flags=allow-key-locking\nreturn ARGV[1]", [], ["v"]) == "v"
        assert redis.delete("stack:a", "stack:n") == 2


def test_upstash_for_node(stack: Stack, tmp_path: Path) -> None:
    folder = npm_ci(SOURCE)
    out = node(
        folder, tmp_path, "upstash.mjs",
        UPSTASH_REDIS_REST_URL=rest_url(stack), UPSTASH_REDIS_REST_TOKEN=stack.settings["UPSTASH_REDIS_REST_TOKEN"],
    )  # fmt: skip
    checks = [json.loads(line) for line in out.splitlines()]
    assert len(checks) >= 10
    assert all(check["ok"] for check in checks)
