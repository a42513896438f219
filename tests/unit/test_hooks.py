"""The hook as a coding agent runs it: a process, an event on stdin, a server that is well, down, or hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from warmstart import hooks
from warmstart.home import Holder, Home, ServerInfo

KEY = "ws_sk_" + "k" * 43
BLOCK = "## Prior observations from warmstart\n\n### Ünïcode\n\n先に学んだこと\n"
PROMPT = {"hook_event_name": "UserPromptSubmit", "session_id": "s1", "cwd": "/x", "prompt": "what about invoices?"}
#: A busy machine starts interpreters slowly; the limit itself is 0.6 s, and a hook that hangs takes forever.
PATIENCE_S = 20.0
#: The hook in a process of its own, that waits for a slow machine.
PATIENT = "import sys; from warmstart import hooks; hooks.LIMIT_S = 4.5; hooks.main(sys.argv[1:])"


class Server(ThreadingHTTPServer):
    """Answers every request with `block`, and remembers them."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.block, self.status, self.raw = BLOCK, 200, b""
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, dict(self.headers), body))
        retrieval = {"context": self.server.block, "ids": [], "mode": "hybrid", "latency_ms": 1}
        answer = self.server.raw or json.dumps({"event_id": "e", "stored": True, "retrieval": retrieval}).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def environment(url: str, **more: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "HOME") if name in os.environ}
    return kept | {"WARMSTART_URL": url, "WARMSTART_API_KEY": KEY} | more


def run(event: object, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[bytes]:
    given = event if isinstance(event, bytes) else json.dumps(event).encode()
    command = [sys.executable, "-c", PATIENT, *(arguments or ("prompt",))]
    return subprocess.run(command, input=given, env=env, capture_output=True, timeout=PATIENCE_S, check=False)


def now(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


def answer(event: object, name: str = "prompt") -> str:
    return hooks.answer(name, json.dumps(event).encode(), now())


@pytest.fixture
def env(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("WARMSTART_URL", server.url)
    monkeypatch.setenv("WARMSTART_API_KEY", KEY)
    return server


def test_a_prompt_prints_the_block(server: Server) -> None:
    done = run(PROMPT | {"prompt_id": "p7"}, environment(server.url))
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, BLOCK.rstrip("\n"), b"")
    [(path, headers, body)] = server.seen
    assert path == "/v1/events?retrieve=true"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert 1 <= body.pop("budget_ms") <= 4_500
    assert body == {
        "event_id": "prompt:p7",
        "kind": "prompt",
        "body": {"type": "text", "content": "what about invoices?"},
        "conversation_id": "s1",
    }


@pytest.mark.parametrize(
    "event",
    [
        {"hook_event_name": "userPromptSubmit", "cwd": "/x", "prompt": "invoices"},  # Kiro's command line
        {"hook_event_name": "promptSubmit", "session_id": "s", "prompt": "invoices"},
        {"prompt": "invoices"},
    ],
)
def test_the_events_of_hosts(env: Server, event: dict[str, Any]) -> None:
    assert answer(event) == BLOCK.rstrip("\n")
    assert env.seen[0][2]["body"]["content"] == "invoices"
    assert len({answer(event) and env.seen[-1][2]["event_id"] for _ in range(3)}) == 3


def test_cursor_goes_on_and_nothing_is_sent(env: Server) -> None:
    event = {"hook_event_name": "beforeSubmitPrompt", "conversation_id": "c", "prompt": "invoices"}
    assert json.loads(answer(event)) == {"continue": True}
    assert env.seen == []


def test_a_session_end_is_told_without_its_transcript(env: Server) -> None:
    event = {"hook_event_name": "SessionEnd", "session_id": "s1", "transcript_path": "/secret.jsonl", "reason": "exit"}
    assert answer(event, "session-end") == ""
    [(path, _, body)] = env.seen
    assert path == "/v1/events"
    assert (body["kind"], body["conversation_id"], body["body"]["content"]) == ("session_end", "s1", "exit")
    assert "secret" not in json.dumps(body)


@pytest.mark.parametrize(
    "event",
    [
        {"hook_event_name": "PreToolUse", "prompt": "x"},
        {"hook_event_name": "UserPromptSubmit"},
        {"hook_event_name": "UserPromptSubmit", "prompt": ""},
        {"hook_event_name": "UserPromptSubmit", "prompt": " \n"},
        {"hook_event_name": "UserPromptSubmit", "prompt": ["x"]},
        {"hook_event_name": ["x"], "prompt": {}},
        [],
        "prompt",
        None,
    ],
)
def test_other_events_are_silent(env: Server, event: object) -> None:
    assert answer(event) == ""
    assert env.seen == []


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"not json",
        b"\x00" * 1000,
        b"\xff\xfe{}",
        b"[" * 200_000,
        b'{"prompt": "' + b"x" * (10 << 20) + b'"}',
    ],
    ids=["empty", "no-json", "nul", "utf-16", "deep", "10-mb"],
)
def test_hostile_input_is_silent(server: Server, given: bytes) -> None:
    done = run(given, environment(server.url))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert server.seen == []


def test_a_prompt_with_nul_and_lone_surrogates_goes_through(env: Server) -> None:
    assert answer({"prompt": "a\x00b \ud800 c"}) == BLOCK.rstrip("\n")


def test_a_long_prompt_is_cut(env: Server) -> None:
    answer({"prompt": "x" * 1_000_000})
    assert len(env.seen[0][2]["body"]["content"]) == hooks.MAX_PROMPT


@pytest.mark.parametrize("name", ["prompt", "session-end"])
def test_a_server_that_hangs_is_not_waited_for(silent: str, name: str) -> None:
    command = [sys.executable, "-m", "warmstart.hooks", name]
    given = json.dumps(PROMPT).encode()
    done = subprocess.run(
        command, input=given, env=environment(silent), capture_output=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_input_that_never_ends_is_not_waited_for(server: Server) -> None:
    command = [sys.executable, "-m", "warmstart.hooks", "prompt"]
    with subprocess.Popen(command, env=environment(server.url), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.wait(PATIENCE_S) == 0
        assert child.stdout is not None
        assert child.stdout.read() == b""


def test_the_prompt_may_come_in_the_environment(server: Server) -> None:
    command = [sys.executable, "-c", PATIENT, "prompt"]
    env = environment(server.url, USER_PROMPT="invoices")
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.wait(PATIENCE_S) == 0
    assert [body["body"]["content"] for _, _, body in server.seen] == ["invoices"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://", "nonsense", "ftp://127.0.0.1/", "http://127.0.0.1:x"])
def test_a_server_that_is_not_there_is_silent(url: str) -> None:
    done = run(PROMPT, environment(url))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.parametrize(
    ("status", "raw"),
    [
        (401, b'{"type": "x"}'),
        (500, b"boom"),
        (200, b"no json"),
        (200, b"[]"),
        (200, b'{"retrieval": null}'),
        (200, b'{"retrieval": {"context": 5}}'),
        (200, b'{"retrieval": {"context": ""}}'),
        (302, b""),
    ],
)
def test_an_answer_of_no_use_is_silent(env: Server, status: int, raw: bytes) -> None:
    env.status, env.raw = status, raw or b"-"
    try:
        said = answer(PROMPT)
    except ValueError:  # `run` says nothing then
        said = ""
    assert said == ""


def test_a_server_elsewhere_is_asked_too(env: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "NEAR", ())
    monkeypatch.setenv("WARMSTART_URL", env.url + "/behind/")
    assert answer(PROMPT) == BLOCK.rstrip("\n")
    assert env.seen[0][0] == "/behind/v1/events?retrieve=true"


def test_the_homes_server_is_found_and_none_is_started(
    env: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WARMSTART_URL")
    monkeypatch.delenv("WARMSTART_API_KEY")
    monkeypatch.setenv("WARMSTART_HOME", str(tmp_path / "home"))
    assert answer(PROMPT) == ""
    assert not (tmp_path / "home").exists()
    home = Home(tmp_path / "home")
    with home.lock(Holder(os.getpid(), env.url)):
        home.publish(ServerInfo(env.url, os.getpid(), "0", "now", KEY))
        assert answer(PROMPT) == BLOCK.rstrip("\n")
    # what a dead server left behind may be anybody's port by now
    assert answer(PROMPT) == ""
    assert len(env.seen) == 1


def test_a_wrong_call_does_not_stop_the_prompt() -> None:
    done = run(PROMPT, environment("http://127.0.0.1:9"), "nonsense")
    assert (done.returncode, done.stdout) == (0, b"")
    assert b"Usage" in done.stderr


def test_the_command_takes_the_fast_way(server: Server) -> None:
    """No command line library, nothing of the service, no HTTP library."""
    code = """
import os, sys
from warmstart import hooks
hooks.LIMIT_S, end = 4.5, os._exit
os._exit = lambda code: (os.write(2, ' '.join(sys.modules).encode()), end(code))
sys.argv = ['warmstart', 'hook', 'prompt']
from warmstart.entry import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(PROMPT).encode(), env=environment(server.url),
        capture_output=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.stdout.decode() == BLOCK.rstrip("\n")
    loaded = set(done.stderr.decode().split())
    assert "warmstart.hooks" in loaded
    assert not loaded & {
        "click",
        "pydantic",
        "httpx",
        "http.client",
        "ssl",
        "asyncio",
        "warmstart.cli",
        "warmstart.config",
    }
