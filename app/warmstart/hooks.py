"""What a coding agent runs at a prompt and at a session's end: `warmstart hook prompt`, `warmstart hook session-end`.

It stands between a person and their agent, so it always ends with 0, within
LIMIT_S from the start of the process, and says nothing where it has nothing to
say: a server that is down or slow, no key, input that is none. So that it
starts fast, only the standard library is imported, and of that little.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, Final, NoReturn

#: From the start of the process; the host waits for no longer.
LIMIT_S: Final = 0.6
#: For the way there and back and the end of this process, of which the server knows nothing.
RESERVE_S: Final = 0.06
#: Where the start of the process is not known: what an interpreter takes to get here.
STARTED_BEFORE_S: Final = 0.15
#: More than the longest query; the server cuts.
MAX_PROMPT: Final = 24_576
#: Input is read to its end, so that its writer sees no broken pipe, but not kept beyond this.
MAX_INPUT: Final = 2 << 20
MAX_ANSWER: Final = 1 << 20
#: URLs whose server answers itself, in one piece: no proxy stands before it.
NEAR: Final = ("http://127.0.0.1:", "http://localhost:")

#: The events of hosts that can add to a prompt what a hook prints: Claude Code and Codex, Kiro.
PROMPT_EVENTS: Final = ("UserPromptSubmit", "userPromptSubmit", "promptSubmit")
#: Cursor asks whether to go on, and has no place for a text: nothing is sent for it.
CURSOR_EVENT: Final = "beforeSubmitPrompt"


def run(name: str) -> NoReturn:
    """`name`: prompt or session-end. Ends the process."""
    deadline = time.monotonic() + LIMIT_S - _age()
    # a thread: a look-up of a host's name can't be interrupted, and a signal that kills is no exit with 0
    watchdog = threading.Timer(max(0.0, deadline - time.monotonic() - 0.01), os._exit, (0,))
    watchdog.daemon = True
    watchdog.start()
    try:
        text = answer(name, _read_input(), deadline)
        if text:
            os.write(1, text.encode("utf-8", "replace"))
    except BaseException:  # noqa: S110 - nothing that goes wrong here may reach the prompt
        pass
    os._exit(0)


def answer(name: str, raw: bytes, deadline: float) -> str:
    """What to print for an event; `deadline` is of time.monotonic."""
    event = json.loads(raw.decode())
    if not isinstance(event, dict):
        return ""
    host_event = event.get("hook_event_name", "")
    if name == "session-end":
        _send(_event(event, "session_end", str(event.get("reason", ""))[:200]), deadline, retrieve=False)
        return ""
    if host_event == CURSOR_EVENT:
        return '{"continue": true}'
    prompt = event.get("prompt")
    if host_event not in (*PROMPT_EVENTS, "") or not isinstance(prompt, str) or not prompt.strip():
        return ""
    found = _send(_event(event, "prompt", prompt[:MAX_PROMPT]), deadline, retrieve=True)
    context = (found.get("retrieval") or {}).get("context", "")
    return context.rstrip("\n") if isinstance(context, str) else ""


def _event(event: dict[str, Any], kind: str, text: str) -> dict[str, Any]:
    conversation = event.get("session_id") or event.get("conversation_id")
    made: dict[str, Any] = {"kind": kind, "body": {"type": "text", "content": text}}
    prompt_id = event.get("prompt_id") or event.get("generation_id")
    made["event_id"] = f"{kind}:{prompt_id}"[:200] if prompt_id else f"{kind}:{os.urandom(16).hex()}"
    if isinstance(conversation, str) and conversation:
        made["conversation_id"] = conversation[:200]
    return made


def _send(event: dict[str, Any], deadline: float, *, retrieve: bool) -> dict[str, Any]:
    url, key = _target()
    left = deadline - time.monotonic() - RESERVE_S
    if not url or not key or left <= 0:
        return {}
    if retrieve:
        event["budget_ms"] = max(1, int(left * 1000))
    path = "/v1/events" + ("?retrieve=true" if retrieve else "")
    post = _post_near if url.startswith(NEAR) else _post_far
    status, body = post(url.rstrip("/"), path, key, json.dumps(event).encode(), left)
    found = json.loads(body) if status == 200 else {}
    return found if isinstance(found, dict) else {}


def _post_near(url: str, path: str, key: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
    """To this machine's own server: the standard library's client would take as long to load as all else together."""
    from socket import create_connection

    host, _, port = url.removeprefix("http://").partition(":")
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    received = b""
    with create_connection((host, int(port)), timeout_s) as connection:
        connection.sendall(head.encode("ascii") + body)
        while (chunk := connection.recv(1 << 16)) and len(received) < MAX_ANSWER:
            received += chunk
    answered, _, content = received.partition(b"\r\n\r\n")
    return int(answered.split(None, 2)[1]), content


def _post_far(url: str, path: str, key: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
    from http.client import HTTPConnection, HTTPSConnection
    from urllib.parse import urlsplit

    parts = urlsplit(url)
    connect = {"https": HTTPSConnection, "http": HTTPConnection}[parts.scheme]
    connection = connect(parts.hostname or "", parts.port, timeout=timeout_s)
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", parts.path + path, body, headers)
    response = connection.getresponse()
    return response.status, response.read(MAX_ANSWER)


def _target() -> tuple[str, str]:
    """URL and key: of the environment, or of the home's server where one runs. None is started here."""
    url, key = os.environ.get("WARMSTART_URL", "").strip(), os.environ.get("WARMSTART_API_KEY", "").strip()
    if url:
        return url, key
    from warmstart.home import Home

    info = Home.from_environ().server()
    return (info.url, key or info.api_key) if info else ("", "")


def _read_input() -> bytes:
    """Of stdin; Kiro's editor before 1.0 gives the prompt in the environment, and a stdin that never ends."""
    if prompt := os.environ.get("USER_PROMPT"):
        return json.dumps({"prompt": prompt}).encode()
    chunks, size = [], 0
    while chunk := os.read(0, 1 << 16):
        size += len(chunk)
        if size <= MAX_INPUT:
            chunks.append(chunk)
    return b"".join(chunks) if size <= MAX_INPUT else b""


def _age() -> float:
    """Seconds since this process was started."""
    try:
        with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
            ticks = int(stat.read().rpartition(")")[2].split()[19])
            age = float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return STARTED_BEFORE_S
    return min(max(age, 0.0), LIMIT_S)


def main(arguments: list[str]) -> NoReturn:
    if arguments not in (["prompt"], ["session-end"]):
        sys.stderr.write("Usage: warmstart hook prompt|session-end, with the event of the agent's hook on stdin\n")
        # of a hook that was written wrongly, too, the prompt goes on
        os._exit(0)
    run(arguments[0])


if __name__ == "__main__":
    main(sys.argv[1:])
