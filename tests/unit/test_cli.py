from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from warmstart.cli import COMMANDS, announce, main, output
from warmstart.cli.mcp import HomeMemory
from warmstart.cli.serve import LastUse
from warmstart.errors import (
    ConfigError,
    Conflict,
    Invalid,
    NotFound,
    Problem,
    RateLimited,
    ServerUnreachable,
    Unauthorized,
    WarmstartError,
)
from warmstart.home import Home, Target

SERVER_PACKAGES = ("lancedb", "pyarrow", "numpy", "psycopg")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WARMSTART_URL", "WARMSTART_API_KEY", "DATABASE_URL", "PORT", "HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WARMSTART_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path))


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("command", list(COMMANDS))
def test_each_command_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage: " in result.stdout


def test_help_lists_commands_and_exit_codes() -> None:
    result = run("--help")
    for name in COMMANDS:
        assert f"  {name} " in result.stdout
    assert "Exit codes: 0 done" in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("  ")]
    assert not [line for line in lines if line.endswith("...")], "a summary is cut"


def test_client_commands_and_mcp_import_no_server_package() -> None:
    modules = sorted({m.partition(":")[0] for m in COMMANDS.values()} - {"serve", "worker"})
    names = ", ".join([f"warmstart.cli.{module}" for module in modules] + ["warmstart.mcp_server.stdio"])
    probe = f"import sys, {names}; print([m for m in {SERVER_PACKAGES!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["save", ""], "content"),
        (["save", "x" * 8001], "limit 8000, size 8001"),
        (["save", "x", "--importance", "1.1"], "importance"),
        (["save", "x", "--metadata", "{"], "--metadata is no JSON"),
        (["save", "x", "--metadata", "[]"], "must be a JSON object"),
        (["save", "x", "-n", "No Good"], "namespace"),
        (["save", "x", "--occurred-at", "yesterday"], "ISO 8601"),
        (["save", "x", "--type", "poem"], "'poem' is not one of 'fact'"),
        (["search", "x", "--limit", "51"], "limit 50"),
        (["search", "x", "--min-score", "0.04"], "0.03279"),
        (["list", "--limit", "201"], "limit 200"),
        (["context", "x", "--token-budget", "0"], "token-budget"),
        (["namespaces", "rename", "a", "B"], "name"),
        (["delete", "mem_x", "--hard"], "add --yes"),
        (["namespaces", "delete", "a"], "add --yes"),
        (["nonsense"], "No such command"),
        (["serve", "--port", "70000"], "PORT"),
        (["redis-rest"], "UPSTASH_REDIS_REST_TOKEN"),
        (["smoke"], "--url"),
        (["smoke", "--url", "http://127.0.0.1:9"], "WARMSTART_API_KEY"),
        (["smoke", "--url", "http://127.0.0.1:9", "--timeout", "0"], "--timeout"),
        (["store", "inventory", "--against", "/no/such/file"], "--against /no/such/file"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments: list[str], said: str, tmp_path: Path) -> None:
    result = run(*arguments, stdin="")
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "memory.example.org"], "--url memory.example.org must be like https://"),
        (["--url", "https://memory.example.org", "--ca-file", __file__], "must be a PEM file of certificates"),
    ],
)
def test_smoke_refuses_what_leads_nowhere(arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMSTART_API_KEY", "ws_sk_" + "x" * 43)
    result = run("smoke", *arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "xxx" not in result.output


def test_all_config_faults_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMBEDDING_DIM", "x")
    monkeypatch.setenv("EMBEDDING_ENABLED", "yes")
    monkeypatch.setenv("PORT", "-1")
    result = run("serve")
    assert result.exit_code == 2
    assert all(name in result.stderr for name in ("EMBEDDING_DIM", "EMBEDDING_ENABLED: must be True or False", "PORT"))


def test_stdin_is_bounded_and_must_be_text() -> None:
    too_long = run("save", "-", stdin="é" * 50_000)
    assert too_long.exit_code == 2
    assert "content" in too_long.stderr
    binary = run("save", "-", stdin=b"\xff\xfe")
    assert binary.exit_code == 2
    assert "not UTF-8" in binary.stderr


def test_root_is_refused_and_nothing_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.delenv("WARMSTART_ALLOW_ROOT", raising=False)
    for command in (["serve"], ["worker"], ["keys", "list"], ["tenants", "list"], ["database", "check"]):
        result = run(*command)
        assert result.exit_code == 1, result.output
        assert result.stderr.count("\n") == 1
        assert "--allow-root" in result.stderr
    assert not (tmp_path / "home").exists()


def test_a_busy_port_is_one_line_and_nothing_touched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        result = run("serve", "--port", str(port), "--allow-root")
    assert result.exit_code == 1
    assert f"port {port} of 127.0.0.1" in result.stderr
    assert "--port" in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "home").exists()


def test_an_address_of_nobody_is_refused() -> None:
    result = run("serve", "--host", "no.such.host.invalid", "--port", "0", "--allow-root")
    assert result.exit_code == 1
    assert "HOST" in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WarmstartError("x"), 1),
        (ConfigError(["a", "b"]), 2),
        (Invalid("x", field="f", errors=[{"field": "f", "problem": "too long", "limit": 3, "size": 4}]), 2),
        (NotFound("x"), 3),
        (Conflict("x"), 4),
        (ServerUnreachable("x"), 5),
        (RateLimited("x", retry_after=3), 5),
        (Unauthorized("x"), 6),
        (Problem("x"), 1),
    ],
)
def test_each_error_has_its_exit_code_and_problem(
    error: WarmstartError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output.report(error, as_json=True) == code
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["error"]["detail"]
    assert said.err.startswith("Error: ")
    if isinstance(error, Invalid):
        assert said.err == "Error: f: too long (limit 3, size 4)\n"


def test_a_fault_of_ours_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Home) -> None:
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr(Home, "check_version", fail)
    result = run("serve", "--allow-root", "--port", "0")
    assert result.exit_code == 1
    assert "ZeroDivisionError: by zero" in result.stderr
    assert "Traceback" not in result.output


def test_escape_sequences_do_not_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = "a\x1b]0;title\x07b\x9bc\u202ed\te\n"
    assert output.safe(hostile) == hostile  # a pipe gets every byte
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert output.safe(hostile) == "a�]0;title�b�c�d\te\n"


def test_healthcheck_follows_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    status = 200

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/healthz"
            self.send_response(status)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("PORT", str(server.server_port))
        assert run("healthcheck").exit_code == 0
        assert run("healthcheck", f"http://127.0.0.1:{server.server_port}/").exit_code == 0
        status = 503
        refused = run("healthcheck")
        server.shutdown()
    assert refused.exit_code == 1
    assert "503" in refused.stderr
    assert run("healthcheck", f"http://127.0.0.1:{free_port()}").exit_code == 1
    assert run("healthcheck", "ftp://x").exit_code == 1


def test_the_announcement_can_be_copied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = "ws_sk_" + "k" * 43
    announce.ready("http://127.0.0.1:8484", key, Home(tmp_path / ("long" * 40)))
    said = capsys.readouterr().out
    assert f"  {key}\n" in said
    add = f'claude mcp add --transport http warmstart http://127.0.0.1:8484/mcp --header "Authorization: Bearer {key}"'
    assert f"  {add}\n" in said
    assert "\x1b" not in said
    stanzas = [json.loads(block) for block in _objects(said)]
    http, stdio = (stanza["mcpServers"]["warmstart"] for stanza in stanzas)
    assert (http["type"], http["headers"]["Authorization"]) == ("http", f"Bearer {key}")
    assert (stdio["type"], stdio["args"]) == ("stdio", ["mcp"])
    announce.ready("http://127.0.0.1:8484", None, Home(tmp_path))
    again = capsys.readouterr().out
    assert "ws_sk_" not in again
    assert "warmstart keys create" in again


def _objects(text: str) -> list[str]:
    blocks, block = [], ""
    for line in text.splitlines():
        if line == "{" or block:
            block += line
        if line == "}":
            blocks.append(block)
            block = ""
    return blocks


async def test_only_requests_with_a_key_count_as_use() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/v1/health":
            scope["user"] = object()

    use = LastUse(app)
    use._at -= 100
    await use({"type": "http", "path": "/healthz"}, None, None)
    assert use.idle_s >= 100
    await use({"type": "http", "path": "/v1/health"}, None, None)
    assert use.idle_s < 1


async def test_stdio_reports_a_memory_that_cannot_be_found() -> None:
    def find() -> Target:
        raise ConfigError(["nothing here"])

    memory = HomeMemory(find)
    with pytest.raises(ServerUnreachable, match="nothing here"):
        await memory.health()
    with pytest.raises(AttributeError):
        memory.no_such_method  # noqa: B018
    await memory.close()


async def test_stdio_does_not_look_again_for_a_named_server() -> None:
    asked = 0

    def find() -> Target:
        nonlocal asked
        asked += 1
        return Target(f"http://127.0.0.1:{free_port()}", "ws_sk_" + "k" * 43, False)

    memory = HomeMemory(find)
    with pytest.raises(ServerUnreachable):
        await memory.health()
    assert asked == 1
    await memory.close()


def test_main_is_a_click_group() -> None:
    assert isinstance(main, click.Group)
