"""What each user sends, what it takes for right, and from when its latency counts."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from loadtests.data import Generator
from loadtests.users import agent, rest
from loadtests.users.abuser import GUESSES_PER_MINUTE, HUGE_BYTES, Abuser, limited
from loadtests.users.agent import LEGACY, MODERN, Agent
from loadtests.users.caller import Answer, Caller, Record
from loadtests.users.reader import Reader
from loadtests.users.rest import CommandLine, Hook, Indexer
from loadtests.users.world import World
from warmstart.memory import Batch, ContextRequest, NewMemory, SearchRequest, parse

FOUND = {"hits": [], "mode": "keyword", "degraded": ["embedding"], "took_ms": 1.0}


class Response:
    """As Locust's, in a `with`."""

    def __init__(self, status: int, body: Any = None, headers: dict[str, str] | None = None) -> None:
        self.status_code, self.headers, self.error = status, headers or {}, ConnectionError("refused")
        self.content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.request_meta: dict[str, Any] = {}
        self.outcome = ""

    def __enter__(self) -> Response:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.outcome, "neither success nor failure was said"

    def success(self) -> None:
        self.outcome = "ok"

    def failure(self, why: str) -> None:
        self.outcome = why


class Server:
    """Answers from `reply`, and keeps what was sent."""

    def __init__(self, reply: Callable[[str, dict[str, Any], dict[str, str]], Response]) -> None:
        self._reply = reply
        self.sent: list[tuple[str, Any, dict[str, str]]] = []
        self.responses: list[Response] = []

    def get(self, path: str, *, headers: dict[str, str], name: str, catch_response: bool) -> Response:
        self.sent.append((path, None, headers))
        self.responses.append(self._reply(path, {}, headers))
        return self.responses[-1]

    def post(self, path: str, *, data: str, headers: dict[str, str], name: str, catch_response: bool) -> Response:
        body = json.loads(data) if headers["Content-Type"] == "application/json" else data
        self.sent.append((path, body, headers))
        self.responses.append(self._reply(path, body, headers))
        return self.responses[-1]


def caller(server: Server) -> tuple[Caller, io.StringIO]:
    file = io.StringIO()
    return Caller(server, Record(file), Caller.clock()), file  # type: ignore[arg-type]


def samples(file: io.StringIO) -> list[tuple[str, int, bool, str]]:
    rows = [line.split(",", 6) for line in file.getvalue().splitlines()[1:]]
    return [(row[1], int(row[4]), row[5] == "1", row[6]) for row in rows]


def world(limited_key: str = "") -> World:
    return World(["first", "second"], Generator(1, "load-x-load", 2), random.Random(1), limited_key)


# -- one request


def test_latency_counts_from_when_the_request_was_due() -> None:
    server = Server(lambda *_: Response(200, FOUND))
    calling, file = caller(server)
    calling.call("search", "/v1/search", {}, Caller.clock() - 2.0, key="k")
    row = file.getvalue().splitlines()[1].split(",")
    assert 2_000 <= float(row[2]) < 3_000
    assert float(row[3]) < 1_000
    assert server.responses[0].request_meta["response_time"] >= 2_000
    assert server.sent[0][2]["Authorization"] == "Bearer k"


def test_no_answer_and_a_wrong_one_are_failures_with_a_reason() -> None:
    answers = iter([Response(0), Response(500, "broken\nbadly")])
    calling, file = caller(Server(lambda *_: next(answers)))
    for _ in range(2):
        calling.call("save", "/v1/memories", {}, Caller.clock(), key="k")
    assert samples(file) == [
        ("save", 0, False, "ConnectionError: refused"), ("save", 500, False, "broken badly"),
    ]  # fmt: skip


# -- REST


def test_what_rest_users_send_is_valid() -> None:
    bodies: dict[str, type[Any]] = {
        "/v1/search": SearchRequest, "/v1/memories": NewMemory, "/v1/context": ContextRequest,
        "/v1/memories/batch": Batch,
    }  # fmt: skip

    def reply(path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        parse(bodies[path], body)
        found = {"/v1/search": FOUND, "/v1/context": {"mode": None}}.get(path, {})
        return Response(201 if path == "/v1/memories" else 200, found)

    server = Server(reply)
    calling, file = caller(server)
    shared = world()
    for user in (CommandLine(shared), Hook(shared), Indexer(shared)):
        for _ in range(20):
            user.visit(calling, Caller.clock())
    assert {path for path, _, _ in server.sent} == set(bodies)
    assert all(ok for _, _, ok, _ in samples(file))
    assert ("search", 200, True, "keyword embedding") in samples(file)
    assert ("context", 200, True, "empty") in samples(file)
    assert {len(body["memories"]) for path, body, _ in server.sent if path.endswith("batch")} == {100}
    assert {headers["Authorization"] for _, _, headers in server.sent} == {"Bearer first", "Bearer second"}


PAGE = '<html><a href="/memories/mem_0123456789abcdef">one</a></html>'


def test_a_reader_signs_in_once_then_looks_around_without_the_key() -> None:
    server = Server(lambda *_: Response(200, PAGE))
    calling, file = caller(server)
    reader = Reader(world())
    for _ in range(9):
        reader.visit(calling, Caller.clock())
    paths = [path for path, _, _ in server.sent]
    assert paths[:3] == ["/login", "/", "/memories/mem_0123456789abcdef"]
    assert paths[3].startswith("/?q=")
    assert (paths[4], paths[8]) == ("/namespaces", "/activity")
    assert server.sent[0][1].startswith("key=first&")
    assert not any("Authorization" in headers for _, _, headers in server.sent)
    assert samples(file) == [("sign in", 200, True, ""), *[("page", 200, True, "")] * 8]


def test_a_session_that_ends_is_a_failure_and_begun_anew() -> None:
    answers = iter([PAGE, '<html><form action="/login"></form></html>', PAGE, "<html>cut"])
    calling, file = caller(Server(lambda *_: Response(200, next(answers))))
    reader = Reader(world())
    for _ in range(4):
        reader.visit(calling, Caller.clock())
    assert samples(file) == [
        ("sign in", 200, True, ""), ("page", 200, False, "the session was lost"), ("sign in", 200, True, ""),
        ("page", 200, False, "<html>cut"),
    ]  # fmt: skip


def test_an_answer_that_is_no_search_result_is_a_failure() -> None:
    assert not rest.search_verdict(Answer(200, "{}", {})).ok
    assert not rest.search_verdict(Answer(200, "<html>", {})).ok
    assert not rest.search_verdict(Answer(503, "down", {})).ok


# -- MCP


def stream(message: dict[str, Any]) -> Response:
    body = f": ping\n\nevent: message\ndata: \n\nevent: message\ndata: {json.dumps(message, ensure_ascii=False)}\n\n"
    return Response(200, body, {"Content-Type": "text/event-stream"})


def mcp(path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
    """A server without sessions, with characters at which a line could be taken to end."""
    if "id" not in body:
        return Response(202, "")
    content = FOUND if body["params"].get("name") == "memory_search" else {"id": "mem_1", "text": "\x85\u2028"}
    return stream({"jsonrpc": "2.0", "id": body["id"], "result": {"structuredContent": content}})


def test_a_session_of_each_generation_searches_saves_and_searches_again() -> None:
    server = Server(mcp)
    calling, file = caller(server)
    user = Agent(world())
    user._free.extend(agent.Session("key", version) for version in (LEGACY, MODERN))
    for _ in range(4):
        user.visit(calling, Caller.clock())
    methods = [body["method"] for _, body, _ in server.sent]
    calls = ["tools/call"] * 3
    assert methods == [
        "initialize", "notifications/initialized", "tools/list", *calls,
        "server/discover", "tools/list", *calls, *calls, *calls,
    ]  # fmt: skip
    assert [e for e, _, _, _ in samples(file) if e != "mcp open"] == ["mcp search", "mcp save", "mcp search"] * 4
    assert all(ok for _, _, ok, _ in samples(file))


def test_headers_and_meta_are_those_of_each_generation() -> None:
    server = Server(mcp)
    calling, _ = caller(server)
    for version in (LEGACY, MODERN):
        session = agent.Session("key", version)
        session.open(calling)
        session.call_tool(calling, "mcp search", "memory_search", {"query": "x"}, Caller.clock())
    (_, opening, first), *_ = server.sent
    assert "MCP-Protocol-Version" not in first
    assert opening["params"]["protocolVersion"] == LEGACY
    for _, body, headers in server.sent:
        assert headers["Accept"] == "application/json, text/event-stream"
        modern = "_meta" in body.get("params", {})
        assert headers.get("Mcp-Method") == (body["method"] if modern else None)
        if body["method"] != "initialize":
            assert headers["MCP-Protocol-Version"] == (MODERN if modern else LEGACY)
    assert server.sent[-1][2]["Mcp-Name"] == "memory_search"
    assert server.sent[-1][1]["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == MODERN


def test_a_session_that_a_restart_lost_is_opened_anew() -> None:
    sessions = iter(["one", "two"])
    known: set[str] = set()

    def reply(path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        if body["method"] == "initialize":
            assert "Mcp-Session-Id" not in headers
            known.add(session := next(sessions))
            made = stream({"jsonrpc": "2.0", "id": body["id"], "result": {}})
            made.headers["Mcp-Session-Id"] = session
            return made
        if headers["Mcp-Session-Id"] not in known:
            return Response(404, "no such session")
        return mcp(path, body, headers)

    server = Server(reply)
    calling, file = caller(server)
    user = Agent(world())
    user._free.append(agent.Session("key", LEGACY))
    user.visit(calling, Caller.clock())
    known.clear()
    user.visit(calling, Caller.clock())
    assert [headers.get("Mcp-Session-Id") for _, body, headers in server.sent if body["method"] == "tools/call"] == [
        "one", "one", "one", "one", "two", "two",
    ]  # fmt: skip
    assert [(e, s) for e, s, ok, _ in samples(file) if not ok] == [("mcp search", 404)]


def test_while_nothing_answers_a_session_tries_to_open_and_gives_its_visit_up() -> None:
    server = Server(lambda *_: Response(0))
    calling, file = caller(server)
    user = Agent(world())
    user.visit(calling, Caller.clock())
    user.visit(calling, Caller.clock())
    assert [e for e, _, _, _ in samples(file)] == ["mcp open", "mcp open"]
    assert len(user._free) == 1


@pytest.mark.parametrize(
    ("result", "ok", "status"),
    [
        ({"result": {"structuredContent": FOUND}}, True, 200),
        ({"error": {"code": -32602, "message": "unknown field"}}, False, 200),
        ({"result": {"isError": True, "content": [{"text": '{"status": 507, "title": "full"}'}]}}, False, 507),
        ({"result": {"isError": True, "content": [{"text": "not a problem"}]}}, False, 200),
    ],
)
def test_a_tools_refusal_has_the_status_of_its_problem(result: dict[str, Any], ok: bool, status: int) -> None:
    verdict = agent.tool_verdict(Answer(200, json.dumps(result), {"content-type": "application/json"}))
    assert (verdict.ok, verdict.status) == (ok, status)


# -- abuse


def test_abuse_is_right_when_it_is_refused() -> None:
    def reply(path: str, body: dict[str, Any], headers: dict[str, str]) -> Response:
        if len(json.dumps(body)) > HUGE_BYTES:
            return Response(413, "too large")
        if headers["Authorization"] == "Bearer limited":
            return Response(429, "slow down", {"Retry-After": "30"})
        return Response(401, "who?")

    calling, file = caller(Server(reply))
    user = Abuser(world("limited"))
    for _ in range(60):
        user.visit(calling, Caller.clock())
    assert {(e, s, ok) for e, s, ok, _ in samples(file)} == {
        ("abuse key", 401, True), ("abuse huge", 413, True), ("abuse storm", 429, True),
    }  # fmt: skip


def test_abuse_that_is_let_in_is_a_failure() -> None:
    calling, file = caller(Server(lambda *_: Response(200, FOUND)))
    user = Abuser(world())
    for _ in range(20):
        user.visit(calling, Caller.clock())
    assert not any(ok for _, _, ok, _ in samples(file))
    assert "abuse storm" not in {e for e, _, _, _ in samples(file)}  # it has no key for that


def test_guesses_stay_below_what_an_address_is_allowed() -> None:
    calling, file = caller(Server(lambda *_: Response(401, "who?")))
    user = Abuser(world())
    now = Caller.clock()
    for _ in range(4 * GUESSES_PER_MINUTE):
        user.visit(calling, now)
    assert [e for e, _, _, _ in samples(file)].count("abuse key") == GUESSES_PER_MINUTE


@pytest.mark.parametrize(
    ("status", "headers", "ok"),
    [
        (200, {}, True),
        (429, {"retry-after": "1"}, True),
        (429, {"retry-after": "0"}, False),
        (429, {}, False),
        (500, {}, False),
    ],
)
def test_a_limit_says_when_to_come_back(status: int, headers: dict[str, str], ok: bool) -> None:
    assert limited(Answer(status, "", headers)).ok is ok
