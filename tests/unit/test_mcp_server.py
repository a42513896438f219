from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import anyio
import httpx
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp import Client, MCPError

from fakes.memory_api import FakeIdentity, FakeRuntime, InMemoryAPI
from warmstart.config import Settings
from warmstart.errors import (
    Conflict,
    DiskFull,
    Duplicate,
    Migrating,
    NotFound,
    RateLimited,
    ServerUnreachable,
    StoreUnavailable,
    TenantAssertion,
)
from warmstart.mcp_server import build_server, forms, server, stdio, streamable_http
from warmstart.mcp_server.http import MAX_MESSAGE_BYTES
from warmstart.mcp_server.json_text import mended
from warmstart.mcp_server.tools import TOOLS
from warmstart.memory import Health, Hit, Memory, NewMemory, Ranks, Saved, SearchRequest, SearchResult

with warnings.catch_warnings():
    # it reads its data in a way that the standard library deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    import bpe_openai

    ENCODING = bpe_openai.get_encoding("o200k_base")

LEGACY, MODERN = "2025-11-25", "2026-07-28"
SERVER = Path(__file__).parents[1] / "clients" / "mcp" / "server.py"
MISSING = "mem_" + "0" * 26


def token_count(value: Any) -> int:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return len(ENCODING.encode(text))


@pytest.fixture
def api() -> InMemoryAPI:
    return InMemoryAPI()


@pytest.fixture(params=["legacy", MODERN])
async def client(request: pytest.FixtureRequest, api: InMemoryAPI) -> AsyncIterator[Any]:
    """The mcp package's own client, opened and closed in the task of the test."""

    @asynccontextmanager
    async def connected() -> AsyncIterator[Client]:
        async with Client(build_server(lambda ctx: api), mode=request.param) as client:
            yield client

    return connected


async def call(client: Any, name: str, **arguments: Any) -> Any:
    """The result, or the error as it came: not in the group that leaving a client puts it in."""
    fault = None
    async with client() as connection:
        try:
            return await connection.call_tool(name, arguments)
        except MCPError as error:
            fault = error
    raise fault


def problem(result: Any) -> dict[str, Any]:
    assert result.is_error
    assert result.structured_content is None
    return dict(json.loads(result.content[0].text))


# --- the list -----------------------------------------------------------------


def walk(node: Any) -> Any:
    yield node
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from walk(child)


async def test_tools_come_in_order_with_titles_and_all_four_hints(client: Any) -> None:
    async with client() as connection:
        tools = (await connection.list_tools()).tools
    assert [tool.name for tool in tools] == [
        "memory_save", "memory_search", "memory_recall", "memory_get",
        "memory_update", "memory_delete", "memory_list_namespaces", "memory_health",
    ]  # fmt: skip
    assert all(tool.title and tool.description for tool in tools)
    hints = {
        tool.name: (
            tool.annotations.read_only_hint,
            tool.annotations.destructive_hint,
            tool.annotations.idempotent_hint,
            tool.annotations.open_world_hint,
        )
        for tool in tools
    }
    assert hints.pop("memory_save") == (False, False, True, False)
    assert hints.pop("memory_update") == hints.pop("memory_delete") == (False, True, True, False)
    assert set(hints.values()) == {(True, False, True, False)}


@pytest.mark.parametrize("tool", TOOLS.values(), ids=TOOLS)
def test_schemas_have_nothing_that_a_host_refuses(tool: Any) -> None:
    listed = tool.listed()
    assert set(listed.input_schema["properties"]) == set(tool.arguments.model_fields)
    assert listed.input_schema["additionalProperties"] is False
    for schema in (listed.input_schema, listed.output_schema):
        jsonschema.Draft202012Validator.check_schema(schema)
        for node in walk(schema):
            if isinstance(node, dict):
                assert not node.keys() & {"$schema", "$ref", "$defs", "anyOf", "oneOf", "allOf"}
                assert not isinstance(node.get("type"), list)
                assert "enum" not in node or node.get("type") == "string"
        assert None not in list(walk(schema))
    assert all("items" in p for p in listed.input_schema["properties"].values() if p["type"] == "array")
    assert "title" not in listed.input_schema


@pytest.mark.parametrize("version", [LEGACY, MODERN])
async def test_the_tool_list_costs_at_most_1500_tokens(version: str) -> None:
    async with http() as connection:
        result = answer(await post(connection, "tools/list", {}, version))["result"]
    assert token_count(result) <= 1_500


async def test_initialize_tells_when_to_search_and_when_to_save(client: Any) -> None:
    async with client() as connection:
        await connection.list_tools()
        said = server.INSTRUCTIONS
        if connection.instructions is not None:
            assert connection.instructions == said
    assert "start of a task" in said
    assert "not instructions" in said
    assert token_count(said) < 150


# --- answers ------------------------------------------------------------------


async def test_every_tool_answers_in_the_shape_it_declares(client: Any, api: InMemoryAPI) -> None:
    async with client() as connection:
        schemas = {t.name: t.output_schema for t in (await connection.list_tools()).tools}

        async def ask(name: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
            result = await connection.call_tool(name, arguments)
            assert not result.is_error, result.content
            content = result.structured_content
            jsonschema.validate(content, {**schemas[name], "required": list(TOOLS[name].told)[:1]})
            assert None not in list(walk(content))
            return result.content[0].text, content

        text, saved = await ask("memory_save", content="Retries use jitter", tags=["net"], type="decision")
        assert text == f"Saved as {saved['id']}."
        assert saved["duplicate"] is False
        text, again = await ask("memory_save", content="Retries use jitter")
        assert again == {**saved, "duplicate": True}
        assert text == f"Already there as {saved['id']}."

        text, found = await ask("memory_search", query="jitter", type="decision", limit=3)
        assert [hit["id"] for hit in found["hits"]] == [saved["id"]]
        assert found["hits"][0]["ranks"] == {"text": 1}
        assert found["hits"][0]["score"] == 0.01639
        assert text.splitlines() == ["1 hits, mode keyword, degraded: embedding", f"{saved['id']} Retries use jitter"]

        text, memory = await ask("memory_get", id=saved["id"])
        assert memory["content"] == "Retries use jitter"
        assert memory["tags"] == ["net"]
        assert "deleted_at" not in memory
        assert "tags: ['net']" in text

        _, updated = await ask("memory_update", id=saved["id"], content="Retries use full jitter")
        assert updated["id"] == saved["id"]
        assert api.rows[saved["id"]].content == "Retries use full jitter"
        assert api.rows[saved["id"]].tags == ["net"]

        await ask("memory_save", content="Second")
        text, page = await ask("memory_recall", limit=1)
        assert text.endswith("More with cursor 1")
        _, rest = await ask("memory_recall", limit=1, cursor=page["next_cursor"])
        assert "next_cursor" not in rest
        assert [page["memories"][0]["title"], rest["memories"][0]["id"]] == ["Second", saved["id"]]

        _, spaces = await ask("memory_list_namespaces")
        assert spaces == {"namespaces": [{"name": "default", "active": 2, "trashed": 0}]}
        _, health = await ask("memory_health")
        assert health["status"] == "ok"

        text, deleted = await ask("memory_delete", id=saved["id"])
        assert deleted == {"id": saved["id"], "hard": False}
        assert "trash" in text
        assert api.rows[saved["id"]].deleted_at is not None
        await ask("memory_delete", id=saved["id"], hard=True)
        assert saved["id"] not in api.rows


async def test_metadata_keeps_its_nulls_since_they_are_the_users(client: Any) -> None:
    saved = await call(client, "memory_save", content="x", metadata={"a": None})
    got = await call(client, "memory_get", id=saved.structured_content["id"])
    assert got.structured_content["metadata"] == {"a": None}


def test_health_leaves_out_what_is_null() -> None:
    parts = [{"name": "cache", "status": "down", "detail": "refused", "since": datetime(2026, 1, 2, tzinfo=UTC)}]
    parts.append({"name": "store", "status": "ok"})
    health = Health.model_validate(
        {"status": "degraded", "mode": "keyword", "degraded": ["cache"], "dependencies": parts,
         "queued": 2, "failed": 1, "unindexed_rows": 0, "version": "1"}
    )  # fmt: skip
    answer = forms.health(health)
    assert None not in list(walk(forms.plain(answer.structured)))
    assert "cache: down since 2026-01-02T00:00:00+00:00 (refused)" in answer.text
    assert answer.text.startswith("degraded, mode keyword, version 1, degraded: cache")


# --- what a search costs ------------------------------------------------------

NOTES = {
    "english": "We chose exponential backoff with full jitter for the upload client because synchronized retries "
    "took the gateway down twice in March. The cap is thirty seconds and the budget is five attempts, after which "
    "the job goes to the dead letter queue and an operator is paged. Don't lower the cap without load testing it. ",
    "german": "Die Verbindungspools der Datenbank werden pro Prozess angelegt, weil ein geteilter Pool nach dem "
    "Gabeln der Arbeitsprozesse beschädigte Antworten lieferte. Die Höchstgröße beträgt zwanzig Verbindungen, "
    "Wartezeit zwei Sekunden; Überschreitungen werden als Warnung protokolliert und nicht wiederholt. ",
    "chinese": "我们决定在上传客户端使用带完全抖动的指数退避，因为三月份同步重试两次导致网关崩溃。"
    "上限为三十秒，最多尝试五次，之后任务进入死信队列并通知值班人员。未经压力测试不要降低上限。"
    "数据库连接池按进程创建，共享连接池会损坏响应。",
    "japanese": "アップロードクライアントでは完全ジッター付きの指数バックオフを採用した。"
    "三月に同期した再試行がゲートウェイを二度停止させたためである。上限は三十秒、試行は五回まで。"
    "その後ジョブはデッドレターキューに入り担当者に通知される。負荷試験なしに上限を下げないこと。",
    "code": "def acquire_connection(self, timeout_s: float = 2.0) -> AsyncConnection: raises PoolTimeout (E_POOL_0042) "
    "when max_waiting=50 is exceeded; see app/store/bookkeeping.py:118 and test_pool_exhausted. "
    "kwargs={'autocommit': True, 'row_factory': dict_row, 'options': '-c timezone=UTC'} must stay as they are. ",
    "russian": "Мы выбрали экспоненциальную задержку с полным джиттером, потому что синхронные повторы дважды "
    "положили шлюз в марте. Предел тридцать секунд, пять попыток, затем задача уходит в очередь недоставленных. ",
}


def hits(content: str, count: int, title: str | None = None) -> SearchResult:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    ids = ["mem_" + f"01jq8z3xk5c9v7h2m4n6p8r{n:03}"[:26].ljust(26, "w") for n in range(count)]
    found = [
        Hit(
            id=memory_id, namespace="default", type="fact", title=title or content[:200], content=content,
            facts=[], tags=[], entities=[], importance=0.5, source="", metadata={}, content_hash="",
            embedding_status="ready", occurred_at=now, created_at=now, updated_at=now,
            score=1 / (61 + place), ranks=Ranks(vector=place + 1, text=place + 2),
        )
        for place, memory_id in enumerate(ids)
    ]  # fmt: skip
    return SearchResult(hits=found, mode="hybrid", degraded=[], took_ms=1)


@pytest.mark.parametrize("title", [None, "A title of its own that is some fifty characters long"])
@pytest.mark.parametrize("language", NOTES)
def test_the_text_of_ten_hits_costs_at_most_500_tokens(language: str, title: str | None) -> None:
    text = forms.search(hits(NOTES[language] * 8, 10, title)).text
    assert 300 < token_count(text) <= 500


@pytest.mark.parametrize("language", NOTES)
def test_structured_content_costs_its_field_names_more(language: str) -> None:
    answer = forms.search(hits(NOTES[language] * 8, 10))
    assert token_count(forms.plain(answer.structured)) <= 1_000


def test_few_hits_get_400_characters_and_better_hits_get_more() -> None:
    two = forms.plain(forms.search(hits("x" * 900, 2, "Title")).structured)["hits"]
    assert [hit["excerpt"] for hit in two] == ["x" * 400 + "…"] * 2
    ten = forms.plain(forms.search(hits(NOTES["english"] * 8, 10, "Title")).structured)["hits"]
    lengths = [len(hit["excerpt"]) for hit in ten]
    assert lengths[0] > lengths[4] >= lengths[9] > 0


def test_a_title_cut_from_the_content_is_not_said_twice() -> None:
    hit = forms.plain(forms.search(hits("Use uv.\nIt is fast.", 1, "Use uv.")).structured)["hits"][0]
    assert hit["excerpt"] == "It is fast."
    short = forms.search(hits("Use uv.", 1))
    assert "excerpt" not in forms.plain(short.structured)["hits"][0]
    assert short.text.splitlines()[1:] == [f"{short.structured.hits[0].id} Use uv."]


@given(st.text(max_size=600), st.integers(0, 400), st.floats(0, 200))
def test_cut_keeps_a_start_within_both_limits(text: str, chars: int, budget: float) -> None:
    line = " ".join(text.split())
    short = forms.cut(text, chars, budget)
    kept = short.removesuffix("…") if short != line else short
    assert line.startswith(kept)
    assert len(kept) <= chars
    assert forms.tokens(kept) <= budget
    assert "\n" not in short


# --- faults -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("memory_search", {"query": "x", "limt": 3}, "unknown field 'limt'; allowed: query,"),
        ("memory_health", {"verbose": True}, "unknown field 'verbose'; allowed: none"),
        ("memory_save", {"title": "x"}, "field 'content' is missing"),
        ("memory_get", {}, "field 'id' is missing"),
        ("memory_update", {"content": "x"}, "field 'id' is missing"),
        ("memory_search", {"query": 3}, "field 'query' has the wrong type"),
        ("memory_search", {"query": "x", "limit": "3"}, "field 'limit' has the wrong type"),
        ("memory_delete", {"id": MISSING, "hard": "yes"}, "field 'hard' has the wrong type"),
        ("memory_save", {"content": "x", "tags": ["a", 1]}, "field 'tags.1' has the wrong type"),
        ("memory_save", {"content": "x", "occurred_at": 5}, "field 'occurred_at' has the wrong type"),
        ("memory_save", {"content": "", "extra": 1}, "unknown field 'extra'"),
    ],
)
async def test_a_fault_of_form_is_invalid_params(client: Any, name: str, arguments: Any, message: str) -> None:
    with pytest.raises(MCPError) as caught:
        await call(client, name, **arguments)
    assert caught.value.code == -32602
    assert f"{name}: {message}" in caught.value.message


async def test_an_unknown_tool_is_invalid_params(client: Any) -> None:
    with pytest.raises(MCPError, match="Unknown tool 'memory_forget'; there are memory_save,") as caught:
        await call(client, "memory_forget")
    assert caught.value.code == -32602


@pytest.mark.parametrize(
    ("name", "arguments", "field"),
    [
        ("memory_search", {"query": "x", "limit": 51}, "limit"),
        ("memory_search", {"query": "x", "limit": 0}, "limit"),
        ("memory_search", {"query": "x", "min_score": 0.04}, "min_score"),
        ("memory_search", {"query": ""}, "query"),
        ("memory_search", {"query": "x", "type": ["fat"]}, "type.0"),
        ("memory_save", {"content": "x" * 8_001}, "content"),
        ("memory_save", {"content": "x\x00"}, "content"),
        ("memory_save", {"content": "x", "type": "fat"}, "type"),
        ("memory_save", {"content": "x", "namespace": "No Such"}, "namespace"),
        ("memory_save", {"content": "x", "occurred_at": "yesterday"}, "occurred_at"),
        ("memory_get", {"id": "42"}, "id"),
        ("memory_update", {"id": MISSING}, ""),
    ],
)
async def test_a_value_out_of_range_is_a_result_that_a_model_can_correct(
    client: Any, api: InMemoryAPI, name: str, arguments: Any, field: str
) -> None:
    found = problem(await call(client, name, **arguments))
    assert (found["status"], found["field"]) == (422, field)
    assert found["detail"]
    assert not api.rows


ERRORS = [
    (NotFound("no such memory"), 404, "not-found"),
    (Duplicate("there already", id=MISSING), 409, "duplicate"),
    (Conflict("no"), 409, "conflict"),
    (RateLimited("slower", retry_after=7), 429, "rate-limited"),
    (TenantAssertion("a foreign row"), 500, "tenant-assertion"),
    (StoreUnavailable("no answer"), 503, "store-unavailable"),
    (Migrating("wait"), 503, "migrating"),
    (DiskFull("full"), 507, "disk-full"),
    (ServerUnreachable("nothing listens on port 1"), 503, "server-unreachable"),
]


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS, ids=[kind for _, _, kind in ERRORS])
@pytest.mark.parametrize("name", ["memory_search", "memory_save"])
async def test_a_problem_is_a_result_with_the_problem_object(
    client: Any, api: InMemoryAPI, error: Exception, status: int, kind: str, name: str
) -> None:
    api.error = error
    arguments = {"query": "x"} if name == "memory_search" else {"content": "x"}
    found = problem(await call(client, name, **arguments))
    assert found["status"] == status
    assert found["type"].endswith("/" + kind)
    assert found["detail"] == str(error)
    assert found.get("retry_after") == (7 if status == 429 else None)


async def test_an_unexpected_error_tells_the_log_and_not_the_client(
    client: Any, api: InMemoryAPI, caplog: pytest.LogCaptureFixture
) -> None:
    api.error = RuntimeError("password=hunter2")
    with caplog.at_level(logging.ERROR):
        result = await call(client, "memory_search", query="x")
    assert problem(result)["type"].endswith("/internal")
    assert "hunter2" not in result.content[0].text
    assert "memory_search failed" in caplog.text


async def test_a_write_that_hangs_is_answered_with_what_to_do(
    client: Any, api: InMemoryAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(new: NewMemory) -> Saved:
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(api, "save", hang)
    monkeypatch.setattr(server, "WRITE_TIMEOUT_S", 0.05)
    found = problem(await call(client, "memory_save", content="x"))
    assert found["status"] == 503
    assert "search for it before you try again" in found["detail"]


# --- the prompt ---------------------------------------------------------------


async def test_the_prompt_gives_the_context_as_a_user_message(client: Any, api: InMemoryAPI) -> None:
    await api.save(NewMemory(content="Deploys run on Tuesdays"))
    async with client() as connection:
        listed = (await connection.list_prompts()).prompts
        assert [(a.name, a.required) for a in listed[0].arguments] == [
            ("query", True), ("namespace", False), ("token_budget", False),
        ]  # fmt: skip
        arguments = {"query": "deploys", "token_budget": "200", "namespace": ""}
        got = await connection.get_prompt("context", arguments)
        nothing = await connection.get_prompt("context", {"query": "holidays"})
    assert got.messages[0].role == "user"
    assert "Deploys run on Tuesdays" in got.messages[0].content.text
    assert nothing.messages[0].content.text == "Nothing found in memory about: holidays"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("other", {"query": "x"}, "Unknown prompt 'other'"),
        ("context", {}, "query"),
        ("context", {"query": "x", "budget": "1"}, "unknown argument 'budget'"),
        ("context", {"query": "x", "token_budget": "many"}, "token_budget"),
        ("context", {"query": "x", "token_budget": "99999"}, "token_budget"),
    ],
)
async def test_a_prompt_with_faults_is_invalid_params(client: Any, name: str, arguments: Any, message: str) -> None:
    async with client() as connection:
        with pytest.raises(MCPError, match=message) as caught:
            await connection.get_prompt(name, arguments)
    assert caught.value.code == -32602


@pytest.mark.parametrize("error", [TenantAssertion("a foreign row"), RuntimeError("hunter2")])
async def test_a_prompt_that_fails_is_an_internal_error(client: Any, api: InMemoryAPI, error: Exception) -> None:
    api.error = error
    async with client() as connection:
        with pytest.raises(MCPError) as caught:
            await connection.get_prompt("context", {"query": "x"})
    assert caught.value.code == -32603
    assert caught.value.data["status"] == 500
    assert "hunter2" not in caught.value.message


# --- streamable HTTP ----------------------------------------------------------

META = {"io.modelcontextprotocol/protocolVersion": MODERN, "io.modelcontextprotocol/clientCapabilities": {}}


def as_alice(app: Any) -> Any:
    async def authenticated(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "user": FakeIdentity("alice", "key")}, receive, send)

    return authenticated


@asynccontextmanager
async def http(runtime: FakeRuntime | None = None, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
    async with streamable_http(runtime or FakeRuntime()) as app:
        transport = httpx.ASGITransport(as_alice(app))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8484", headers=headers) as client:
            yield client


def message(method: str, params: dict[str, Any], version: str) -> tuple[dict[str, Any], dict[str, str]]:
    headers = {"accept": "application/json, text/event-stream", "mcp-protocol-version": version}
    if version == MODERN:
        params = {**params, "_meta": META}
        headers["mcp-method"] = method
        if "name" in params:
            headers["mcp-name"] = params["name"]
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}, headers


async def post(client: httpx.AsyncClient, method: str, params: dict[str, Any], version: str) -> httpx.Response:
    body, headers = message(method, params, version)
    headers["content-type"] = "application/json"
    return await client.post("/mcp", content=json.dumps(body).encode(), headers=headers)


def answer(response: httpx.Response) -> dict[str, Any]:
    text = response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        text = next(line[6:] for line in text.splitlines() if line.startswith("data: {"))
    return dict(json.loads(text))


@pytest.mark.parametrize("version", [LEGACY, MODERN])
async def test_no_session_is_needed_and_proxies_must_not_buffer(version: str) -> None:
    runtime = FakeRuntime()
    async with http(runtime) as client:
        saved = await post(client, "tools/call", {"name": "memory_save", "arguments": {"content": "x"}}, version)
    assert saved.status_code == 200
    assert saved.headers.get_list("x-accel-buffering") == ["no"]
    assert "mcp-session-id" not in saved.headers
    memory_id = answer(saved)["result"]["structuredContent"]["id"]
    assert memory_id in runtime.service("alice").rows
    assert not runtime.service("bob").rows


async def test_initialize_over_http_and_discover() -> None:
    async with http() as client:
        opening = {"protocolVersion": "2024-11-05", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        body, headers = message("initialize", opening, LEGACY)
        del headers["mcp-protocol-version"]
        old = answer(await client.post("/mcp/", json=body, headers=headers))["result"]
        new = answer(await post(client, "server/discover", {}, MODERN))["result"]
        body, headers = message("server/discover", {}, MODERN)
        body["params"]["_meta"] = {**META, "io.modelcontextprotocol/protocolVersion": "2031-01-01"}
        unknown = await client.post("/mcp", json=body, headers={**headers, "mcp-protocol-version": "2031-01-01"})
    assert old["protocolVersion"] == "2024-11-05"
    assert old["instructions"] == new["instructions"] == server.INSTRUCTIONS
    assert new["ttlMs"] == 3_600_000
    assert answer(unknown)["error"]["code"] == -32022


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "OPTIONS"])
async def test_only_post_is_served(method: str) -> None:
    async with http() as client:
        response = await client.request(method, "/mcp", headers={"accept": "text/event-stream"})
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert response.json()["type"].endswith("/method-not-allowed")


@pytest.mark.parametrize("version", [LEGACY, MODERN])
async def test_a_notification_is_accepted(version: str) -> None:
    async with http() as client:
        body, headers = message("notifications/initialized", {}, version)
        del body["id"]
        response = await client.post("/mcp", json=body, headers=headers)
    assert response.status_code == 202


@pytest.mark.parametrize("version", [LEGACY, MODERN])
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 421),
        ({"host": "localhost"}, 200),
        ({"host": "[::1]:8484"}, 200),
        ({"host": "memory.example"}, 200),
        ({"host": "memory.example:8443", "origin": "https://memory.example:8443"}, 200),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://localhost:3000"}, 200),
    ],
)
async def test_hosts_and_origins(version: str, headers: dict[str, str], status: int) -> None:
    settings = Settings(allowed_hosts=["memory.example"])
    async with http(FakeRuntime(settings=settings), **headers) as client:
        response = await post(client, "tools/list", {}, version)
    assert response.status_code == status


@pytest.mark.parametrize("version", [LEGACY, MODERN])
async def test_a_body_over_one_mebibyte_is_refused(version: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(MAX_MESSAGE_BYTES // 65_536 + 1):
            yield b" " * 65_536

    _, headers = message("tools/list", {}, version)
    headers["content-type"] = "application/json"
    async with http() as client:
        streamed = await client.post("/mcp", content=chunks(), headers=headers)
        whole = await client.post("/mcp", content=b" " * (MAX_MESSAGE_BYTES + 1), headers=headers)
        fits = await client.post("/mcp", content=b" " * MAX_MESSAGE_BYTES, headers=headers)
    assert (streamed.status_code, whole.status_code, fits.status_code) == (413, 413, 400)


@pytest.mark.parametrize("version", [LEGACY, MODERN])
async def test_lone_surrogates_leave_queries_and_are_refused_in_content(version: str) -> None:
    runtime = FakeRuntime()
    await runtime.service("alice").save(NewMemory(content="find me"))
    async with http(runtime) as client:
        save = {"name": "memory_save", "arguments": {"content": "bad \ud800"}}
        refused = answer(await post(client, "tools/call", save, version))["result"]
        search = {"name": "memory_search", "arguments": {"query": "find\udfff me"}}
        found = answer(await post(client, "tools/call", search, version))["result"]
    assert refused["isError"] is True
    assert json.loads(refused["content"][0]["text"])["field"] == "content"
    assert len(found["structuredContent"]["hits"]) == 1


def test_mending_touches_lone_surrogates_only() -> None:
    whole = rb'{"a": "\ud83d\ude00 \\ud800", "n": 1.50}'
    assert mended(whole) is whole
    assert json.loads(mended(rb'{"a": "\ud83d\ude00 \udc00 \\ud800"}')) == {"a": "😀 \0 \\ud800"}
    assert mended(rb'{"a": "\ud800') == rb'{"a": "\ud800'


class SlowAPI(InMemoryAPI):
    """Says when it began, and waits to be let on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go, self.ended = anyio.Event(), anyio.Event(), anyio.Event()
        self.cancelled = False

    async def _wait(self) -> None:
        self.begun.set()
        try:
            await self.go.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled = True
            self.ended.set()
            raise

    async def save(self, new: NewMemory) -> Saved:
        await self._wait()
        saved = await super().save(new)
        self.ended.set()
        return saved

    async def search(self, request: SearchRequest) -> SearchResult:
        await self._wait()
        return await super().search(request)


@pytest.mark.parametrize("version", [LEGACY, MODERN])
@pytest.mark.parametrize("name", ["memory_save", "memory_search"])
async def test_a_write_outlives_its_client_and_a_read_does_not(version: str, name: str) -> None:
    api = SlowAPI()
    runtime = FakeRuntime(tenants={"alice": api})  # type: ignore[dict-item]
    arguments = {"content": "kept"} if name == "memory_save" else {"query": "x"}
    body, headers = message("tools/call", {"name": name, "arguments": arguments}, version)
    raw = [(k.encode(), v.encode()) for k, v in {**headers, "host": "localhost"}.items()]
    scope = {
        "type": "http", "method": "POST", "path": "/mcp", "query_string": b"", "user": FakeIdentity("alice", "k"),
        "headers": [*raw, (b"content-type", b"application/json")],
    }  # fmt: skip
    inbox = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive() -> Any:
        if (first := next(inbox, None)) is not None:
            return first
        await api.begun.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if api.begun.is_set():
            raise OSError("the client has gone")

    with anyio.fail_after(5):
        async with streamable_http(runtime) as app, anyio.create_task_group() as tg:
            tg.start_soon(quietly, app, scope, receive, send)
            await api.begun.wait()
            await anyio.sleep(0.05)
            api.go.set() if name == "memory_save" else None
            await api.ended.wait()
            api.go.set()
    assert api.cancelled is (name == "memory_search")
    assert len(api.rows) == (name == "memory_save")


async def quietly(app: Any, *arguments: Any) -> None:
    """As a server does: what fails after the client has gone is nobody's."""
    try:
        await app(*arguments)
    except* OSError:
        pass


# --- stdio --------------------------------------------------------------------

OPENING = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}


def lines(*requests: tuple[str, dict[str, Any]]) -> bytes:
    texts = [
        json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        for number, (method, params) in enumerate(requests, start=1)
    ]
    return "".join(text + "\n" for text in texts).encode()


async def start(*command: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe, stderr=pipe)


async def test_stdio_answers_everything_before_it_ends_with_its_input() -> None:
    """Only JSON-RPC on stdout, though something in the process prints and a child writes to fd 1."""
    noisy = (
        "import os, sys, anyio\n"
        f"sys.path.insert(0, {str(SERVER.parents[2])!r})\n"
        "from fakes.memory_api import InMemoryAPI\n"
        "from warmstart.mcp_server import run_stdio\n"
        "class Noisy(InMemoryAPI):\n"
        "    async def search(self, request):\n"
        "        print('stray print', flush=True)\n"
        "        os.system('echo stray child')\n"
        "        await anyio.sleep(0.3)\n"
        "        return await super().search(request)\n"
        "anyio.run(run_stdio, Noisy())\n"
    )
    requests = lines(
        ("initialize", OPENING),
        ("tools/call", {"name": "memory_save", "arguments": {"content": "bad \ud800"}}),
        ("tools/call", {"name": "memory_save", "arguments": {"content": "good 😀"}}),
        ("tools/call", {"name": "memory_search", "arguments": {"query": "good"}}),
    )
    process = await start("-c", noisy)
    out, err = await asyncio.wait_for(process.communicate(b"not JSON\n\n" + requests), 20)
    answers = {reply["id"]: reply["result"] for reply in map(json.loads, out.splitlines())}
    assert process.returncode == 0, err.decode()
    assert sorted(answers) == [1, 2, 3, 4]
    assert answers[2]["isError"] is True
    assert answers[4]["structuredContent"]["hits"][0]["title"] == "good 😀"
    assert b"stray print" in err
    assert b"stray child" in err


async def test_stdio_ends_quietly_when_nobody_reads_its_answers() -> None:
    process = await start(str(SERVER), "stdio")
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.write(lines(("initialize", OPENING)))
    assert b"protocolVersion" in await asyncio.wait_for(process.stdout.readline(), 20)
    process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
    process.stdin.write(lines(("ping", {})))
    assert await asyncio.wait_for(process.wait(), 2) == 0
    assert b"Traceback" not in await process.stderr.read()


async def test_a_line_without_an_end_ends_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "MAX_LINE_BYTES", 10)
    reading, writing = os.pipe()
    os.write(writing, b"first\n" + b"x" * 11)
    assert [line async for line in stdio._lines(reading)] == ["first"]
    os.close(writing)


async def test_stdio_ends_at_once_on_a_signal() -> None:
    await asyncio.gather(ends_on(signal.SIGINT), ends_on(signal.SIGTERM))


async def ends_on(number: signal.Signals) -> None:
    process = await start(str(SERVER), "stdio")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(lines(("initialize", OPENING)))
    assert b"protocolVersion" in await asyncio.wait_for(process.stdout.readline(), 20)
    process.send_signal(number)
    assert await asyncio.wait_for(process.wait(), 2) == 0
    assert process.stderr is not None
    assert await process.stderr.read() == b""


def test_a_client_machine_needs_no_server_parts() -> None:
    code = (
        "import sys, warmstart.mcp_server\n"
        "print(sorted({'lancedb', 'pyarrow', 'numpy', 'psycopg', 'redis'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_get_shows_a_memory_whole() -> None:
    memory = Memory.model_validate(hits("Body\n\n# heading", 1, "Head").hits[0].model_dump())
    memory = memory.model_copy(update={"facts": ["one"], "entities": ["Redis"]})
    text = forms.whole(memory).text
    assert text.startswith(f"{memory.id} fact in default: Head\n\nBody\n\n# heading\n\n- one\n\n")
    assert "entities: ['Redis']" in text
    assert "content_hash" not in text
