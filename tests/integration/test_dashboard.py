"""The dashboard over the real service: it tells what there is, and nothing is lost, forged or shown to others."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from fakes.visitor import FORM, Visitor
from integration.service import App, Tenant, down
from warmstart.web.dashboard.session import SECRET_FILE, shared_secret

pytestmark = pytest.mark.asyncio(loop_scope="module")


def browser(app: App) -> Visitor:
    return Visitor(app.client())


@pytest_asyncio.fixture(loop_scope="module")
async def visitor(app: App, alice: Tenant) -> AsyncIterator[Visitor]:
    made = browser(app)
    await made.sign_in(alice.key)
    yield made


# -- who comes in


async def test_without_a_session_every_page_leads_to_the_sign_in_and_back(app: App, alice: Tenant) -> None:
    visitor = browser(app)
    for path in ("/", "/trash", "/namespaces", "/keys", "/activity", "/health", "/transfer", "/?q=a+b&type=fact"):
        await visitor.get(path)
        assert visitor.url.startswith("/login")
        assert "API key" in visitor.page
    await visitor.submit("/login", key=alice.key)
    assert visitor.url == "/?q=a+b&type=fact"


@pytest.mark.parametrize(
    "way_out",
    [
        "//evil.example",
        "/\\evil.example",
        "https://evil.example",
        "/\t/evil.example",
        "/ /x",
        "javascript:alert(1)",
        "",
    ],
)
async def test_the_way_back_stays_here(app: App, alice: Tenant, way_out: str) -> None:
    visitor = browser(app)
    await visitor.sign_in(alice.key, next=way_out)
    assert (visitor.status, visitor.url) == (200, "/")


async def test_the_cookie_is_signed_and_says_no_key(app: App, alice: Tenant) -> None:
    http = app.client()
    answer = await http.post("/login", content=f"key={alice.key}", headers=FORM)
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=lax" in cookie.lower()
    assert alice.key not in cookie
    assert alice.key[6:] not in cookie
    value = http.cookies["warmstart"]
    body, stamp, signature = value.rsplit(".", 2)  # a body that was compressed begins with one
    for forged in (body[:-2] + "AA." + stamp + "." + signature, f"{body}.{stamp}.{signature[::-1]}", "x", body):
        http.cookies.set("warmstart", forged)
        assert (await http.get("/keys")).headers["location"].startswith("/login")


async def test_over_tls_the_cookie_is_for_tls_alone(app: App, alice: Tenant, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = FORM | {"x-forwarded-proto": "https"}
    answer = await app.client().post("/login", content=f"key={alice.key}", headers=headers)
    assert "Secure" not in answer.headers["set-cookie"]  # nobody but a trusted proxy is believed
    monkeypatch.setattr("warmstart.web.auth.Clients._is_trusted", lambda self, address: True)
    answer = await app.client().post("/login", content=f"key={alice.key}", headers=headers)
    assert answer.headers["set-cookie"].startswith("__Host-warmstart=")
    assert "Secure" in answer.headers["set-cookie"]


async def test_a_revoked_key_ends_its_session(app: App, alice: Tenant, visitor: Visitor) -> None:
    await visitor.get("/health")
    assert visitor.url == "/health"
    [key] = await app.runtime.account(alice.user_id).keys()
    await app.runtime.account(alice.user_id).revoke_key(key.id)
    async with asyncio.timeout(10):
        while visitor.url == "/health":
            await visitor.get("/health")
            await asyncio.sleep(0.1)
    assert visitor.url.startswith("/login")


async def test_failed_sign_ins_are_counted_with_those_of_the_api(app: App, alice: Tenant) -> None:
    address = "203.0.113.77"
    visitor = Visitor(app.client(address=address))
    for _ in range(app.runtime.settings.login_failures_per_minute):
        await visitor.sign_in("ws_sk_" + "x" * 43)
        assert visitor.status == 401
    await visitor.sign_in(alice.key)
    assert visitor.status == 429
    assert int(visitor.headers["retry-after"]) > 0
    assert (await app.client(alice.key, address=address).get("/v1/health")).status_code == 429


async def test_signing_out(visitor: Visitor) -> None:
    await visitor.post("/logout")
    await visitor.get("/")
    assert visitor.url == "/login"


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://127.0.0.1:3000"},
        {"origin": "null"},
        {},
    ],
)
async def test_forms_of_other_pages_are_refused(
    app: App, alice: Tenant, visitor: Visitor, headers: dict[str, str]
) -> None:
    made = await alice.save("stays")
    token = visitor.token
    for path, body in (("/memories/trash", f"csrf={token}&id={made['id']}"), ("/login", f"key={alice.key}")):
        answer = await visitor.http.post(path, content=body, headers={"content-type": FORM["content-type"], **headers})
        assert answer.status_code == 403
    assert await alice.page() == [made["id"]]


async def test_a_form_without_this_sessions_token_is_refused(
    app: App, alice: Tenant, bob: Tenant, visitor: Visitor
) -> None:
    made = await alice.save("stays")
    other = browser(app)
    await other.sign_in(bob.key)
    for token in ("", "x", other.token, visitor.token + "é"):
        await visitor.post("/memories/trash", [made["id"]], token=token)
        assert visitor.status == 403
        await visitor.get("/")
    assert await alice.page() == [made["id"]]


async def test_nobody_sees_or_changes_what_is_anothers(app: App, alice: Tenant, bob: Tenant, visitor: Visitor) -> None:
    theirs = await bob.save("bob's own secret plan", namespace="bobs")
    [key] = await app.runtime.account(bob.user_id).keys()
    for path in (
        f"/memories/{theirs['id']}",
        f"/memories/{theirs['id']}/edit",
        "/namespaces/bobs",
        f"/keys/{key.id}/revoke",
    ):
        await visitor.get(path)
        assert visitor.status == 404
    await visitor.get("/")
    await visitor.post("/memories/trash", [theirs["id"]])
    await visitor.post("/memories/restore", [theirs["id"]])
    await visitor.post(f"/memories/{theirs['id']}/edit", content="mine", etag=theirs["updated_at"])
    await visitor.post("/namespaces/bobs", name="mine")
    await visitor.post("/namespaces/bobs/trash")
    await visitor.post(f"/keys/{key.id}/revoke")
    await visitor.post("/trash/empty", until="2099-01-01T00:00:00+00:00")
    assert (await bob.get(f"/v1/memories/{theirs['id']}"))["content"] == "bob's own secret plan"
    for path in ("/", "/?q=secret+plan", "/trash", "/namespaces", "/keys"):
        assert "secret plan" not in (await visitor.get(path)).replace("q=secret+plan", "").replace(
            'value="secret plan"', ""
        )


async def test_processes_of_one_home_share_the_secret(tmp_path: Path) -> None:
    path = tmp_path / "home" / SECRET_FILE
    made = await asyncio.gather(*(asyncio.to_thread(shared_secret, path) for _ in range(16)))
    assert len(set(made)) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    assert [found.name for found in path.parent.iterdir()] == [SECRET_FILE]


async def test_pages_carry_what_keeps_scripts_out(visitor: Visitor) -> None:
    for path in ("/", "/login", "/memories/mem_00000000000000000000000000", "/nowhere/at/all"):
        answer = await visitor.http.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    assert harm_in(await visitor.get("/")) == []


# -- what it tells


async def test_counts_match_the_view_after_random_actions(alice: Tenant, visitor: Visitor) -> None:
    chance = random.Random(20261130)
    names, kinds = ["default", "work", "home"], ["fact", "gotcha"]
    await alice.batch(
        *(
            {"content": f"{n}", "namespace": chance.choice(names), "type": chance.choice(kinds), "tags": [f"t{n % 3}"]}
            for n in range(70)
        )
    )

    async def agree() -> tuple[list[str], list[str]]:
        """The active and the trashed ids, as pages and rows have them alike."""
        rows = (await alice.get("/v1/memories", include_deleted="true", limit=200))["memories"]
        trashed = [row["id"] for row in rows if "deleted_at" in row]
        active = [row for row in rows if "deleted_at" not in row]
        assert await visitor.walk("/") == [row["id"] for row in active]
        assert await visitor.walk("/trash") == trashed
        tag, kind = f"t{chance.randrange(3)}", chance.choice(kinds)
        passing = [row["id"] for row in active if tag in row["tags"] and row["type"] == kind]
        assert await visitor.walk(f"/?tag={tag}&type={kind}") == passing
        await visitor.get("/namespaces")
        told = re.findall(
            r'namespace=([a-z0-9]+)">.*?data-active="(\d+)">[^<]*</span>\s*(?:<span data-trashed="(\d+)")?',
            visitor.page,
            re.DOTALL,
        )
        counted = Counter((row["namespace"], "deleted_at" in row) for row in rows)
        assert {name: (int(n), int(gone or 0)) for name, n, gone in told} == {
            name: (counted[name, False], counted[name, True]) for name in {row["namespace"] for row in rows}
        }
        assert visitor.count == len(told)
        return [row["id"] for row in active], trashed

    active, trashed = await agree()
    for action in ("trash", "restore", "rename", "namespace", "empty"):
        await visitor.get("/")
        if action == "trash":
            chosen = chance.sample(active, 12)
            await visitor.post("/memories/trash", chosen)
            assert visitor.notice == "12 memories are in the trash."
        elif action == "restore":
            await visitor.post("/memories/restore", chance.sample(trashed, 5))
            assert visitor.notice == "5 restored."
        elif action == "rename":
            await visitor.post("/namespaces/work", name="office")
        elif action == "namespace":
            await visitor.post("/namespaces/home/trash")
        else:
            await visitor.get("/trash/empty")
            assert visitor.count == len(trashed)
            await visitor.submit("/trash/empty")
            assert visitor.notice == f"{len(trashed)} memories were removed for good."
        active, trashed = await agree()


async def test_only_deleted_wins(alice: Tenant, visitor: Visitor) -> None:
    kept, gone = (await alice.save("kept"))["id"], (await alice.save("gone"))["id"]
    await alice.delete(f"/v1/memories/{gone}")
    assert await visitor.walk("/trash?include_deleted=true&only_deleted=false") == [gone]
    assert await visitor.walk("/?include_deleted=true&only_deleted=true") == [kept]
    assert await alice.page(include_deleted=True, only_deleted=True) == [gone]


async def test_emptying_leaves_what_came_later(alice: Tenant, visitor: Visitor) -> None:
    seen, later = (await alice.save("seen"))["id"], (await alice.save("later"))["id"]
    await alice.delete(f"/v1/memories/{seen}")
    await visitor.get("/trash/empty")
    await alice.delete(f"/v1/memories/{later}")
    await visitor.submit("/trash/empty")
    assert visitor.notice == "1 memory was removed for good."
    assert await alice.page(only_deleted=True) == [later]


async def test_search_shows_ranks_and_why(alice: Tenant, visitor: Visitor) -> None:
    await alice.save("Deploys go through the blue pipeline since March", tags=["deploy"])
    await alice.save("Nothing of the kind")
    await visitor.get("/?q=blue+pipeline")
    assert "1st by words: blue, pipeline" in visitor.page
    assert "1st by meaning" in visitor.page
    assert "<mark>blue</mark> <mark>pipeline</mark>" in visitor.page
    fragment = await visitor.get("/?q=blue+pipeline&fragment=1")
    assert "<html" not in fragment
    assert visitor.count == len(visitor.ids) == 2
    await visitor.get("/?q=blue+pipeline&tag=deploy&type=fact&from=2020-01-01&to=2099-01-01")
    assert visitor.count == 1


async def test_filters_by_day_hold_the_whole_day(alice: Tenant, visitor: Visitor) -> None:
    made = await alice.save("late in the evening", occurred_at="2026-03-07T23:59:59Z")
    assert await visitor.walk("/?from=2026-03-07&to=2026-03-07") == [made["id"]]
    assert await visitor.walk("/?from=2026-03-08") == []
    assert await visitor.walk("/?to=2026-03-06") == []
    assert await visitor.walk("/?to=9999-12-31") == [made["id"]]
    await visitor.get("/?from=yesterday")
    assert visitor.status == 422
    assert "must be a date" in visitor.page
    await visitor.get("/?namespace=NOT+ONE")
    assert visitor.status == 422


# -- an edit


async def test_an_edit_changes_what_was_changed_and_nothing_else(alice: Tenant, visitor: Visitor) -> None:
    content = "first line\r\nsecond\rthird\n\n  indented\n"
    made = await alice.save(content, tags=["a, b", "c"], metadata={"k": [1]}, importance=0.1, title="T")
    await visitor.get(f"/memories/{made['id']}/edit")
    await visitor.submit(f"/memories/{made['id']}/edit", type="gotcha", facts="one\r\n\r\ntwo")
    assert visitor.notice == "Saved."
    now = await alice.get(f"/v1/memories/{made['id']}")
    assert now["content"] == content
    assert (now["type"], now["facts"], now["tags"], now["metadata"]) == (
        "gotcha",
        ["one", "two"],
        ["a, b", "c"],
        {"k": [1]},
    )
    assert now["importance"] == 0.1
    await visitor.get(f"/memories/{made['id']}/edit")
    await visitor.submit(f"/memories/{made['id']}/edit")
    assert visitor.notice == "Nothing was changed."
    assert (await alice.get(f"/v1/memories/{made['id']}"))["updated_at"] == now["updated_at"]


async def test_a_text_that_begins_with_a_line_break_keeps_it(alice: Tenant, visitor: Visitor) -> None:
    made = await alice.save("\n\nbegins late")
    await visitor.get(f"/memories/{made['id']}/edit")
    await visitor.submit(f"/memories/{made['id']}/edit", tags="x")
    assert (await alice.get(f"/v1/memories/{made['id']}"))["content"] == "\n\nbegins late"


async def test_a_change_elsewhere_is_shown_and_not_overwritten(alice: Tenant, visitor: Visitor) -> None:
    made = await alice.save("the original text", tags=["old"])
    action = f"/memories/{made['id']}/edit"
    await visitor.get(action)
    await alice.patch(f"/v1/memories/{made['id']}", {"content": "their text", "tags": ["theirs"]})
    await visitor.submit(action, content="my <b>text</b>")
    assert visitor.status == 412
    assert (await alice.get(f"/v1/memories/{made['id']}"))["content"] == "their text"
    assert "Changed elsewhere" in visitor.page
    for text in ("their text", "my &lt;b&gt;text&lt;/b&gt;", "changed by both", "theirs"):
        assert text in visitor.page
    fields = visitor.fields(action)
    assert fields["content"] == "my <b>text</b>"
    assert fields["tags"] == "theirs"  # what only they changed is theirs
    await visitor.submit(action)
    assert visitor.notice == "Saved."
    now = await alice.get(f"/v1/memories/{made['id']}")
    assert (now["content"], now["tags"]) == ("my <b>text</b>", ["theirs"])


async def test_bad_values_stand_beside_their_fields_and_nothing_is_lost(alice: Tenant, visitor: Visitor) -> None:
    made = await alice.save("well")
    action = f"/memories/{made['id']}/edit"
    bad = {"content": "", "namespace": "No Such", "importance": "much", "metadata": "[1]", "tags": "x" * 65}
    for name, value in bad.items():
        await visitor.get(action)
        await visitor.submit(action, **{name: value})
        assert visitor.status == 422
        assert f'id="{name}-problem"' in visitor.page
        assert visitor.fields(action)[name] == value
    assert (await alice.get(f"/v1/memories/{made['id']}"))["content"] == "well"


async def test_a_duplicate_a_trashed_and_a_removed_memory_keep_what_was_typed(alice: Tenant, visitor: Visitor) -> None:
    other, made = await alice.save("the other"), await alice.save("this one")
    action = f"/memories/{made['id']}/edit"
    await visitor.get(action)
    await visitor.submit(action, content="the other")
    assert visitor.status == 409
    assert f'href="/memories/{other["id"]}"' in visitor.page
    assert visitor.fields(action)["content"] == "the other"
    await alice.delete(f"/v1/memories/{made['id']}")
    await visitor.submit(action, content="typed long")
    assert "in the trash" in visitor.page
    assert visitor.fields(action)["content"] == "typed long"
    await alice.delete(f"/v1/memories/{made['id']}", hard="true")
    await visitor.submit(action, content="typed longer")
    assert visitor.status == 404
    assert visitor.fields(action)["content"] == "typed longer"


async def test_a_session_lost_while_typing_loses_nothing(app: App, alice: Tenant, visitor: Visitor) -> None:
    made = await alice.save("before")
    action = f"/memories/{made['id']}/edit"
    await visitor.get(action)
    visitor.http.cookies.clear()
    await visitor.submit(action, content="typed for an hour", tags="x")
    assert visitor.status == 401
    assert "Nothing you typed is lost" in visitor.page
    await visitor.submit("/login", key="ws_sk_" + "x" * 43)
    assert visitor.status == 401
    await visitor.submit("/login", key=alice.key)
    assert visitor.status == 200
    assert visitor.fields(action)["content"] == "typed for an hour"
    assert (await alice.get(f"/v1/memories/{made['id']}"))["content"] == "before"
    await visitor.submit(action)
    assert visitor.notice == "Saved."
    now = await alice.get(f"/v1/memories/{made['id']}")
    assert (now["content"], now["tags"]) == ("typed for an hour", ["x"])


# -- namespaces, keys, state


async def test_a_namespace_is_not_renamed_onto_another(alice: Tenant, visitor: Visitor) -> None:
    await alice.save("a", namespace="one")
    await alice.save("b", namespace="two")
    await visitor.get("/namespaces/one")
    await visitor.submit("/namespaces/one", name="two")
    assert visitor.status == 409
    assert visitor.fields("/namespaces/one")["name"] == "two"
    await visitor.submit("/namespaces/one", name="three")
    assert "one is called three now" in visitor.notice


async def test_a_key_is_shown_once_works_and_is_revoked(app: App, alice: Tenant, visitor: Visitor) -> None:
    await visitor.get("/keys")
    assert visitor.count == 1
    await visitor.submit("/keys", name="CI <runner>")
    found = re.search(r"ws_sk_[A-Za-z0-9_-]{43}", visitor.page)
    assert found
    assert visitor.headers["cache-control"] == "no-store"
    assert (await app.client(found[0]).get("/v1/health")).status_code == 200
    await visitor.get("/keys")
    assert found[0] not in visitor.page
    assert "CI &lt;runner&gt;" in visitor.page
    assert visitor.count == 2
    revoke = re.findall(r'href="(/keys/[^"]+/revoke)"', visitor.page)[-1]
    await visitor.get(revoke)
    await visitor.submit(revoke)
    assert "is revoked" in visitor.notice
    assert visitor.count == 1
    async with asyncio.timeout(10):
        while (await app.client(found[0]).get("/v1/health")).status_code != 401:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await visitor.submit("/keys", name=" ")
    assert visitor.status == 422


async def test_activity_is_the_tenants_own(app: App, alice: Tenant, bob: Tenant, visitor: Visitor) -> None:
    await bob.search("something of bob's")
    await visitor.get("/activity")
    assert "No search yet" in visitor.page
    for _ in range(3):
        await alice.search("anything")
    await visitor.get("/activity")
    assert "3 searches in the last 24 hours: 3 hybrid" in visitor.page
    assert visitor.page.count("<rect") == 1
    await visitor.get("/activity?hours=168")
    assert "3 searches in the last 7 days" in visitor.page


async def test_a_degraded_service_says_so_on_every_page_and_goes_on(app: App, alice: Tenant, visitor: Visitor) -> None:
    made = await alice.save("the printer is on the third floor")
    assert app.provider
    with down(app.provider):
        await visitor.get("/?q=printer+floor")
        assert visitor.count == 1
        assert "keyword" in visitor.page
        for path in ("/", "/trash", "/namespaces", "/keys", "/activity", "/health", f"/memories/{made['id']}"):
            await visitor.get(path)
            assert visitor.status == 200
            assert "the embedding service does not answer" in visitor.page.lower()
        await visitor.get("/health")
        assert re.search(r'class="now".*?keyword', visitor.page, re.DOTALL)


async def test_without_postgres_all_pages_answer(
    app: App, alice: Tenant, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from warmstart.errors import BookkeepingUnavailable

    def gone(*args: object, **kwargs: object) -> None:
        raise BookkeepingUnavailable("Postgres does not answer")

    monkeypatch.setattr(app.runtime.bookkeeping, "connection", gone)
    for path in ("/", "/trash", "/namespaces", "/keys", "/activity", "/health"):
        await visitor.get(path)
        assert visitor.status == 200
    await visitor.get("/keys")
    assert "Keys can't be shown" in html_text(visitor.page)
    await visitor.post("/keys", name="new")
    assert visitor.status == 503


class Harm(HTMLParser):
    """Elements and attributes that could run, load or lead somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        scripts = tag == "script" and not (given.get("src") or "").startswith("/static/")
        if scripts or tag in ("img", "iframe", "object", "embed", "base", "style", "video", "audio"):
            self.found.append(tag)
        for name, value in attributes:
            leads = name in ("href", "src", "action") and not re.match(r"/(?!/)|https?:|mailto:|#", value or "")
            if name.startswith("on") or name == "style" or leads:
                self.found.append(f"{tag} {name}={value}")


def harm_in(page: str) -> list[str]:
    parser = Harm()
    parser.feed(page)
    return parser.found


def html_text(page: str) -> str:
    return page.replace("&#39;", "'")


HOSTILE = (
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)> [x](javascript:alert(1)) ![x](http://evil.example/x.png)",
    "\u202eright to left\u202c and \u200b\u200d\ufeff",
    "\u200b",
    "x" * 8000,
    "[" * 4000 + "](" * 2000,
    "*" * 8000,
    "> " * 4000,
    "\"'`${alert(1)}`{{7*7}}{% raw %}",
    "</textarea><script>alert(1)</script>",
)


@pytest.mark.parametrize("text", HOSTILE, ids=[text[:12] for text in HOSTILE])
async def test_hostile_memories_are_text(alice: Tenant, visitor: Visitor, text: str) -> None:
    made = await alice.save(
        text,
        title=text[:200],
        tags=[text[:64]],
        facts=[text[:300]],
        entities=[text[:64]],
        source=text[:200],
        metadata={"k": text[:900]},
    )
    for path in ("/", f"/?q={'alert'}", f"/memories/{made['id']}", f"/memories/{made['id']}/edit"):
        page = await visitor.get(path)
        assert visitor.status == 200
        assert harm_in(page) == []
    await visitor.submit(f"/memories/{made['id']}/edit", importance="0.7")
    assert visitor.notice == "Saved."
    assert (await alice.get(f"/v1/memories/{made['id']}"))["content"] == text
    await visitor.get("/")
    await visitor.post("/memories/trash", [made["id"]])
    assert harm_in(await visitor.get("/trash")) == []


async def test_forms_are_bounded(visitor: Visitor) -> None:
    send = visitor.http.post
    many = "&".join(f"f{i}=1" for i in range(400))
    assert (await send("/keys", content=many, headers=FORM)).status_code == 400
    assert (await send("/keys", content=b"a=" + b"x" * (2 << 20), headers=FORM)).status_code == 413
    assert (await send("/keys", content="{}", headers=FORM | {"content-type": "application/json"})).status_code == 415
    assert (await send("/keys", content="name=%ff", headers=FORM)).status_code == 400
    assert (await visitor.http.delete("/keys")).status_code == 405


async def test_static_files_are_kept_and_nothing_else_is_served(visitor: Visitor) -> None:
    [style] = re.findall(r'href="(/static/style.css\?v=[0-9a-f]+)"', await visitor.get("/"))
    answer: httpx.Response = await visitor.http.get(style)
    assert answer.status_code == 200
    assert "immutable" in answer.headers["cache-control"]
    for path in ("/static/../session.py", "/static/%2e%2e/session.py", "/static/", "/static/none.css"):
        assert (await visitor.http.get(path)).status_code == 404


async def test_everything_is_exported_and_imported_again(
    app: App, alice: Tenant, bob: Tenant, visitor: Visitor
) -> None:
    made = await alice.save("kept through it all", tags=["t"])
    await alice.patch(f"/v1/memories/{made['id']}", {"content": "edited"})
    gone = await alice.save("in the trash")
    await alice.delete(f"/v1/memories/{gone['id']}")
    await visitor.get("/transfer")
    assert visitor.count == 2
    answer = await visitor.http.get("/transfer/export?format=ndjson")
    assert answer.status_code == 200
    assert "attachment" in answer.headers["content-disposition"]
    header, *lines = answer.text.splitlines()
    assert len(lines) == 2
    [token] = re.findall(r'data-token="([^"]+)"', visitor.page)
    send = {"content-type": "application/x-ndjson", "sec-fetch-site": "same-origin"}
    refused = await visitor.http.post("/transfer/import", content="\n".join(lines), headers=send)
    assert refused.status_code == 403
    for memory in (made, gone):
        await alice.delete(f"/v1/memories/{memory['id']}", hard="true")
    taken = await visitor.http.post(
        "/transfer/import", content="\n".join(lines), headers=send | {"x-csrf-token": token}
    )
    assert taken.json()["created"] == 2
    again = await visitor.http.get("/transfer/export?format=ndjson")
    assert again.text.splitlines()[1:] == lines
    visitor.http.cookies.clear()
    lost = await visitor.http.post("/transfer/import", content=header, headers=send)
    assert (lost.status_code, lost.headers["content-type"]) == (401, "application/problem+json")


async def test_history_is_shown_and_an_earlier_version_comes_back(alice: Tenant, visitor: Visitor) -> None:
    made = await alice.save("<b>first</b>")
    await alice.patch(f"/v1/memories/{made['id']}", {"content": "second", "tags": ["new"]})
    await visitor.get(f"/memories/{made['id']}")
    assert "Version 1" in visitor.page
    assert "&lt;b&gt;first&lt;/b&gt;" in visitor.page
    action = f"/memories/{made['id']}/history/1/restore"
    stale = visitor.fields(action)
    await alice.patch(f"/v1/memories/{made['id']}", {"importance": 0.9})
    await visitor.post(action, **stale)
    assert visitor.notice.startswith("Nothing was restored")
    await visitor.submit(action)
    assert (await alice.get(f"/v1/memories/{made['id']}"))["content"] == "<b>first</b>"


async def test_what_a_trashed_memory_replaced_is_found_again(alice: Tenant, visitor: Visitor) -> None:
    old = await alice.save("the office is in Rome")
    new = await alice.save("the office is in Oslo", supersedes=old["id"])
    await visitor.get(f"/memories/{old['id']}")
    assert f'href="/memories/{new["id"]}"' in visitor.page
    await visitor.post("/memories/trash", [new["id"]])
    assert await alice.found("office in Rome") == [old["id"]]
