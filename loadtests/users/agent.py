"""An agent's session over MCP: search, save, search again, in both generations of the protocol.

The bytes are those of the SDKs' clients over streamable HTTP: both content
types accepted, the version in a header of each request after the first, the
stateless generation with its method and name in headers and itself in `_meta`.
A session that is lost (a restart, a proxy without a server) is opened anew
before the next call, as a host does when it connects again.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from loadtests.users.caller import Answer, Caller, Verdict, expects
from loadtests.users.rest import mode
from loadtests.users.world import World

#: By `initialize`; without a handshake.
LEGACY: Final = "2025-11-25"
MODERN: Final = "2026-07-28"
CLIENT: Final = {"name": "loadtests", "version": "1"}
_META: Final = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientInfo": CLIENT,
    "io.modelcontextprotocol/clientCapabilities": {},
}
#: After these nobody knows whether the server still knows the session.
_LOST: Final = frozenset({0, 404, 502, 503, 504})


class Lost(Exception):
    """The session can't be opened now; its requests are on record as failed."""


class Session:
    """One client's connection to `/mcp`."""

    def __init__(self, key: str, version: str) -> None:
        self._key, self.version = key, version
        self._ids = itertools.count(1)
        self._id = ""
        self.is_open = False

    def open(self, caller: Caller) -> None:
        """The handshake and the list of tools, as `mcp open`; raises Lost."""
        if self.version == LEGACY:
            self._id = ""
            opening = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": CLIENT}
            answer = self._post(caller, "mcp open", "initialize", opening, caller.clock())
            if answer.status == 200:
                self._id = answer.headers.get("mcp-session-id", "")
                body = {"jsonrpc": "2.0", "method": "notifications/initialized"}
                headers = self._headers("notifications/initialized", "")
                caller.call(
                    "mcp open", "/mcp", body, caller.clock(), key=self._key, headers=headers, judge=expects(202)
                )
        else:
            answer = self._post(caller, "mcp open", "server/discover", {}, caller.clock())
        if answer.status == 200:
            answer = self._post(caller, "mcp open", "tools/list", {}, caller.clock())
        self.is_open = answer.status == 200
        if not self.is_open:
            raise Lost

    def call_tool(self, caller: Caller, endpoint: str, tool: str, arguments: dict[str, Any], due: float) -> None:
        answer = self._post(caller, endpoint, "tools/call", {"name": tool, "arguments": arguments}, due, tool_verdict)
        if answer.status in _LOST:
            self.is_open = False

    def _post(
        self,
        caller: Caller,
        endpoint: str,
        method: str,
        params: dict[str, Any],
        due: float,
        judge: Callable[[Answer], Verdict] | None = None,
    ) -> Answer:
        judge = judge or result_verdict
        if self.version == MODERN:
            params = {**params, "_meta": _META}
        body = {"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params}
        headers = self._headers(method, str(params.get("name", "")))
        return caller.call(endpoint, "/mcp", body, due, key=self._key, headers=headers, judge=judge)

    def _headers(self, method: str, name: str) -> dict[str, str]:
        headers = {"Accept": "application/json, text/event-stream"}
        if method != "initialize":
            headers["MCP-Protocol-Version"] = self.version
        if self._id:
            headers["Mcp-Session-Id"] = self._id
        if self.version == MODERN:
            headers["Mcp-Method"] = method
            if name:
                headers["Mcp-Name"] = name
        return headers


class Agent:
    """Sessions that live on between visits; each does one thing at a time, so a slow server meets more of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._free: deque[Session] = deque()
        self._versions = itertools.cycle((LEGACY, MODERN))

    def visit(self, caller: Caller, due: float) -> None:
        session = self._free.popleft() if self._free else Session(self._world.key(), next(self._versions))
        generator = self._world.generator
        try:
            for tool in ("search", "save", "search"):
                if not session.is_open:
                    session.open(caller)
                arguments = {"query": generator.query()} if tool == "search" else generator.item().memory
                session.call_tool(caller, f"mcp {tool}", f"memory_{tool}", arguments, due)
                # what comes next could not begin before this was answered
                due = caller.clock()
        except Lost:
            pass
        finally:
            self._free.append(session)


def message(answer: Answer) -> dict[str, Any]:
    """The JSON-RPC message of an answer, from an event stream or plain. Raises ValueError."""
    text = answer.text
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        # events without data are there to keep the stream open
        text = next((line[6:] for line in text.split("\n") if line.startswith("data: {")), "")
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"no message: {text[:100]}")
    return found


def result_verdict(answer: Answer) -> Verdict:
    if answer.status != 200:
        return Verdict(False, answer.status, answer.text)
    try:
        found = message(answer)
    except ValueError as error:
        return Verdict(False, 200, f"no JSON-RPC message: {error}")
    return Verdict("result" in found, 200, "" if "result" in found else json.dumps(found.get("error")))


def tool_verdict(answer: Answer) -> Verdict:
    """A tool's refusal has the status of its problem; the note of a search is its rung."""
    verdict = result_verdict(answer)
    if not verdict.ok:
        return verdict
    result = message(answer)["result"]
    if result.get("isError"):
        text = result["content"][0]["text"]
        try:
            return Verdict(False, int(json.loads(text)["status"]), text)
        except (ValueError, KeyError):
            return Verdict(False, 200, text)
    content = result["structuredContent"]
    return Verdict(True, 200, mode(content) if "hits" in content else "")
