"""Events over REST: recorded once, never their body, and a prompt is answered with a block."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from structlog.testing import capture_logs

from integration.conftest import TestServer
from integration.service import App, Tenant, until
from warmstart import events, scrub
from warmstart.store.bookkeeping import EVENT_DAYS

pytestmark = pytest.mark.asyncio(loop_scope="module")

#: Time enough on however busy a machine; the race itself has a test of its own.
SETTINGS = {
    "context_budget_ms": 20_000,
    "context_embed_budget_ms": 10_000,
    "arm_budget_ms": 10_000,
    "embed_query_budget_ms": 10_000,
    "search_budget_ms": 20_000,
}
SECRET = "ghp_" + "0123456789abcdefghijABCDEFGHIJ0123ab"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "RECORD_S", 5.0)


def prompt(text: str, event_id: str = "e1", **fields: Any) -> dict[str, Any]:
    return {"event_id": event_id, "kind": "prompt", "body": {"type": "text", "content": text}, **fields}


async def rows(app: App, tenant: Tenant) -> list[tuple[Any, ...]]:
    dsn = app.runtime.settings.database_url.get_secret_value()
    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        asked = await connection.execute(
            "SELECT id, kind, hash FROM events WHERE user_id = %s ORDER BY id", (tenant.user_id,)
        )
        return await asked.fetchall()


async def test_a_prompt_is_answered_with_a_block_and_recorded_once(app: App, alice: Tenant) -> None:
    saved = await alice.save("the walrus eats clams")
    first = await alice.post("/v1/events?retrieve=true", prompt("what does the walrus eat"))
    assert (first["event_id"], first["stored"], first["retrieval"]["ids"]) == ("e1", True, [saved["id"]])
    assert first["retrieval"]["context"].startswith("## Prior observations from warmstart\n")
    assert first["retrieval"]["latency_ms"] > 0
    again = await alice.post("/v1/events?retrieve=true", prompt("what does the walrus eat"))
    assert again["stored"] is False
    [(event_id, kind, digest)] = await rows(app, alice)
    assert (event_id, kind, len(digest)) == ("e1", "prompt", 64)


async def test_both_conditions_must_hold(alice: Tenant) -> None:
    await alice.save("the walrus eats clams")
    unasked = await alice.post("/v1/events", prompt("walrus"))
    assert (unasked["stored"], unasked["retrieval"]) == (True, None)
    other = await alice.post("/v1/events?retrieve=true", prompt("walrus", "e2") | {"kind": "tool_use"})
    assert (other["stored"], other["retrieval"]) == (True, None)
    assert (await alice.post("/v1/events?retrieve=false", prompt("walrus", "e3")))["retrieval"] is None


@pytest.mark.parametrize(
    "body",
    [
        {"type": "text", "content": "what does the walrus eat"},
        {
            "type": "message",
            "turns": [{"role": "user", "content": "zebra"}, {"role": "user", "content": "what does the walrus eat"}],
        },
        {"type": "json", "data": {"question": "what does the walrus eat", "n": [1, None, True]}},
        {"type": "json", "data": "what does the walrus eat"},
    ],
)
async def test_the_shapes_of_a_body(alice: Tenant, body: dict[str, Any]) -> None:
    saved = await alice.save("the walrus eats clams")
    answer = await alice.post("/v1/events?retrieve=true", {"event_id": "e", "kind": "prompt", "body": body})
    assert answer["retrieval"]["ids"] == [saved["id"]]


@pytest.mark.parametrize(
    "body",
    [
        {"type": "text", "content": ""},
        {"type": "text", "content": " \n"},
        {"type": "text", "content": "\x00"},
        {"type": "message", "turns": []},
        {"type": "json", "data": None},
        {"type": "json", "data": {}},
    ],
)
async def test_a_body_that_asks_nothing_gets_nothing(alice: Tenant, body: dict[str, Any]) -> None:
    await alice.save("the walrus eats clams")
    answer = await alice.post("/v1/events?retrieve=true", {"event_id": "e", "kind": "prompt", "body": body})
    assert (answer["stored"], answer["retrieval"]["context"], answer["retrieval"]["ids"]) == (True, "", [])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"event_id": ""}, "event_id"),
        ({"event_id": "x" * 201}, "event_id"),
        ({"event_id": "a\x00b"}, "event_id"),
        ({"kind": "Prompt!"}, "kind"),
        ({"token_budget": 0}, "token_budget"),
        ({"namespace": "code-**"}, "namespace"),
        ({"other": 1}, "other"),
        ({"body": {"type": "video"}}, "body"),
    ],
)
async def test_what_is_refused_names_its_field(app: App, alice: Tenant, change: dict[str, Any], field: str) -> None:
    refused = await alice.post("/v1/events?retrieve=true", prompt("walrus") | change, 422)
    assert refused["field"].startswith(field)
    assert await rows(app, alice) == []


async def test_tenants_have_events_of_their_own(alice: Tenant, bob: Tenant) -> None:
    await alice.save("the walrus eats clams")
    assert (await alice.post("/v1/events", prompt("walrus")))["stored"] is True
    theirs = await bob.post("/v1/events?retrieve=true", prompt("walrus"))
    assert (theirs["stored"], theirs["retrieval"]["ids"]) == (True, [])


async def test_a_long_prompt_is_cut_not_refused(alice: Tenant) -> None:
    saved = await alice.save("the walrus eats clams")
    answer = await alice.post("/v1/events?retrieve=true", prompt("what does the walrus eat " * 4_000))
    assert answer["retrieval"]["ids"] in ([saved["id"]], [])
    assert answer["stored"] is True


async def test_secrets_reach_neither_the_provider_nor_the_log_nor_the_cache(app: App, alice: Tenant) -> None:
    assert app.provider is not None
    await alice.save("the walrus eats clams")
    app.provider.requests.clear()
    with capture_logs() as logs:
        await alice.post("/v1/events?retrieve=true", prompt(f"walrus clone with {SECRET} and DB_PASSWORD=Tr0ub4dor3"))
    sent = str(app.provider.requests)
    assert "walrus" in sent
    for secret in (SECRET, "Tr0ub4dor3"):
        assert secret not in sent
        assert secret not in str(logs)


async def test_where_secrets_cannot_be_taken_out_nothing_is_used(
    app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(text: str) -> str:
        raise RuntimeError(f"no rules for {text}")

    await alice.save("the walrus eats clams")
    assert app.provider is not None
    app.provider.requests.clear()
    monkeypatch.setattr(events, "scrub", broken)
    with capture_logs() as logs:
        answer = await alice.post("/v1/events?retrieve=true", prompt("walrus " + SECRET))
    assert (answer["stored"], answer["retrieval"]["ids"]) == (True, [])
    assert app.provider.requests == []
    assert SECRET not in str(logs)
    assert [row[2] for row in await rows(app, alice)] == [""]
    assert scrub.scrub("walrus") == "walrus"


async def test_a_lost_race_is_empty_and_has_its_latency(
    app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch
) -> None:
    await alice.save("the walrus eats clams")
    run = app.runtime.search.run

    async def slow(*arguments: Any, **named: Any) -> Any:
        await asyncio.sleep(60)
        return await run(*arguments, **named)

    monkeypatch.setattr(app.runtime.search, "run", slow)
    answer = await alice.post("/v1/events?retrieve=true", prompt("walrus", budget_ms=300))
    assert (answer["stored"], answer["retrieval"]["context"], answer["retrieval"]["mode"]) == (True, "", None)
    assert answer["retrieval"]["latency_ms"] > 0


async def test_with_postgres_down_events_are_known_and_written_later(
    app: App, alice: Tenant, postgres: TestServer
) -> None:
    saved = await alice.save("the walrus eats clams")
    await postgres.kill()
    first = await alice.post("/v1/events?retrieve=true", prompt("what does the walrus eat"))
    assert (first["stored"], first["retrieval"]["ids"]) == (True, [saved["id"]])
    assert (await alice.post("/v1/events", prompt("walrus")))["stored"] is False
    await postgres.heal()

    async def written() -> bool:
        try:
            return [row[0] for row in await rows(app, alice)] == ["e1"]
        except psycopg.OperationalError:
            return False

    await until(written)
    assert (await alice.post("/v1/events", prompt("walrus")))["stored"] is False


async def test_events_are_forgotten_after_their_days(app: App, alice: Tenant) -> None:
    for event_id in ("old", "young"):
        await alice.post("/v1/events", prompt("walrus", event_id))
    dsn = app.runtime.settings.database_url.get_secret_value()
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        for event_id, days in (("old", EVENT_DAYS + 1), ("young", EVENT_DAYS - 1)):
            await connection.execute(
                "UPDATE events SET created_at = now() - make_interval(days => %s) WHERE user_id = %s AND id = %s",
                (days, alice.user_id, event_id),
            )
    await app.runtime.bookkeeping.purge()
    assert [row[0] for row in await rows(app, alice)] == ["young"]


# -- what was given does not come back


async def test_what_was_given_is_not_saved_back(alice: Tenant) -> None:
    saved = await alice.save("The walrus eats clams.", title="Diet", facts=["no fish"])
    block = (await alice.post("/v1/events?retrieve=true", prompt("what does the walrus eat")))["retrieval"]["context"]
    assert "clams" in block
    for text in (
        block,
        "\n" + block + "\n",
        block.split("\n\n", 1)[1],
        "### Diet\n\nThe walrus eats clams.\n\n- no fish",
        "### Diet\n\nThe walrus eats clams.",
        "Diet: the walrus eats clams",
    ):
        back = await alice.save(text, 200, namespace="elsewhere")
        assert (back["id"], back["duplicate"]) == (saved["id"], True)
    new = {"content": "the zebra eats grass", "namespace": "elsewhere"}
    results = (await alice.post("/v1/memories/batch", {"memories": [{"content": block}, new, {"content": block}]}))[
        "results"
    ]
    assert [r["status"] for r in results] == ["duplicate", "created", "duplicate"]
    assert results[0]["id"] == results[2]["id"] == saved["id"]
    assert len(await alice.page()) == 2


async def test_a_block_that_nothing_is_known_of_is_refused(app: App, alice: Tenant) -> None:
    await alice.save("The walrus eats clams.")
    block = (await alice.post("/v1/context", {"query": "what does the walrus eat"}))["context"]
    await app.forget()
    refused = await alice.save(block, 422)
    assert refused["field"] == "content"
    assert (await alice.post("/v1/memories/batch", {"memories": [{"content": "x"}, {"content": block}]}, 422))[
        "field"
    ] == "memories.1.content"
    assert len(await alice.page()) == 1


async def test_a_block_as_a_prompt_gets_nothing(alice: Tenant) -> None:
    await alice.save("The walrus eats clams.")
    block = (await alice.post("/v1/context", {"query": "what does the walrus eat"}))["context"]
    answer = await alice.post("/v1/events?retrieve=true", prompt(block))
    assert answer["retrieval"]["ids"] == []


async def test_what_was_given_to_one_tenant_is_new_to_another(alice: Tenant, bob: Tenant) -> None:
    await alice.save("The walrus eats clams.")
    assert (await alice.post("/v1/context", {"query": "what does the walrus eat"}))["ids"]
    assert (await bob.save("The walrus eats clams."))["duplicate"] is False


async def test_a_memory_that_was_deleted_since_can_be_saved_anew(alice: Tenant) -> None:
    saved = await alice.save("The walrus eats clams.")
    assert (await alice.post("/v1/context", {"query": "what does the walrus eat"}))["ids"] == [saved["id"]]
    await alice.delete(f"/v1/memories/{saved['id']}")
    assert (await alice.save("The walrus eats clams."))["id"] != saved["id"]


# -- namespaces by their beginning


async def test_namespaces_by_their_beginning(alice: Tenant, bob: Tenant) -> None:
    ids = {}
    for namespace in ("code-app", "code-app2", "code_app", "code", "default", "cod"):
        ids[namespace] = (await alice.save(f"walrus of {namespace}", namespace=namespace))["id"]
    await bob.save("walrus of bob", namespace="code-app")
    for pattern, names in (
        ("code-*", {"code-app", "code-app2"}),
        ("code-app*", {"code-app", "code-app2"}),
        ("code-app", {"code-app"}),
        ("code*", {"code-app", "code-app2", "code_app", "code"}),
        ("code_*", {"code_app"}),
        ("x*", set()),
    ):
        wanted = {ids[name] for name in names}
        assert set(await alice.found("walrus", namespace=pattern)) == wanted
        assert set(await alice.page(namespace=pattern)) == wanted
        recalled = (await alice.get("/v1/recall", namespace=pattern))["memories"]
        assert {m["id"] for m in recalled} == wanted
        given = await alice.post("/v1/context", {"query": "walrus of code-app2 app", "namespace": pattern})
        assert set(given["ids"]) <= wanted
    for pattern in ("*", "*code", "co*de", "code-**"):
        assert (await alice.search("walrus", 422, namespace=pattern))["field"] == "namespace"
    assert (await alice.save("x", 422, namespace="code-*"))["field"] == "namespace"


async def test_of_near_duplicates_the_newest_is_given(alice: Tenant) -> None:
    await alice.save("The walrus house opens at nine in the morning, and closes at five.")
    newer = await alice.save("The walrus house opens at ten in the morning, and closes at five.")
    answer = await alice.post("/v1/context", {"query": "when does the walrus house open in the morning"})
    assert answer["ids"] == [newer["id"]]
