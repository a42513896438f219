"""Each page in both themes, wide and narrow: axe finds nothing, nothing sticks out, and pictures of it are kept."""

from __future__ import annotations

from browser.site import COLOURS, DESKTOP, PHONE, RULES, SIZES, Person
from integration.service import Tenant

NOTES = [
    ("decision", "payments", "Idempotency keys live for 48 hours",
     "## Why\n\nThe queue retries for up to **36 hours**, so a key must outlive it.\n\n- stored in "
     "`payments.idempotency`\n- swept by the nightly job\n\n```python\nKEY_TTL = timedelta(hours=48)\n```\n\n"
     "See [the incident review](https://example.com/reviews/17).",
     ["payments", "retries"]),
    ("gotcha", "payments", "Stripe sends webhooks twice after a timeout",
     "A webhook that takes over 10 s is sent again while the first is still being handled. "
     "Take the lock on the event id first.",
     ["stripe", "webhooks"]),
    ("fact", "default", "The staging database is called heron",
     "The staging database is called heron. It is restored from production every Sunday at 03:00 UTC, "
     "without personal data.",
     ["staging", "postgres"]),
    ("preference", "default", "Tests come before the refactoring",
     "The team wants characterisation tests merged on their own before any refactoring starts.", ["review"]),
    ("goal", "search", "p95 of search below 80 ms by March",
     "Agreed with product: p95 of search under 80 ms at 100,000 documents, measured at the edge.", ["latency", "slo"]),
    ("insight", "search", "Résumés und Lebensläufe: two words for one thing",
     "Users type “resume”, “résumé” and “Lebenslauf”; the vector arm finds all three, "
     "the text arm only the first two.", ["i18n"]),
]  # fmt: skip


async def furnish(tenant: Tenant) -> list[str]:
    ids = [
        (await tenant.save(content, type=kind, namespace=where, title=title, tags=tags, source="claude-code"))["id"]
        for kind, where, title, content, tags in reversed(NOTES)
    ]
    await tenant.patch(f"/v1/memories/{ids[-1]}", {"facts": ["48 h > 36 h of retries"], "entities": ["payments-api"]})
    for content in ("Deploys freeze on Fridays after noon.", "The old VPN host is gone."):
        made = await tenant.save(content)
        await tenant.delete(f"/v1/memories/{made['id']}")
    for query in ("how long do idempotency keys live", "staging database", "webhooks twice", "resume"):
        await tenant.search(query)
    return ids


PAGES = {
    "memories": "/",
    "search": "/?q=how+long+must+idempotency+keys+live",
    "filters": "/?namespace=payments&type=gotcha",
    "nothing": "/?namespace=payments&type=event",
    "memory": "/memories/{id}",
    "edit": "/memories/{id}/edit",
    "trash": "/trash",
    "empty-trash": "/trash/empty",
    "namespaces": "/namespaces",
    "namespace": "/namespaces/payments",
    "keys": "/keys",
    "activity": "/activity",
    "health": "/health",
    "transfer": "/transfer",
    "missing": "/memories/mem_00000000000000000000000000",
}


async def look(person: Person, name: str) -> list[str]:
    """The page as it is, in both themes and on a phone; what is wrong with it."""
    wrong = await person.offences(RULES)
    await person.shoot(f"{name}-light-wide")
    await person.page.emulate_media(color_scheme="dark")
    wrong += await person.offences(COLOURS)
    await person.shoot(f"{name}-dark-wide")
    await person.page.set_viewport_size(PHONE)
    if (pixels := await person.overflow()) > 0:
        wrong.append(f"{name}: {pixels} pixels wider than a phone")
    wrong += await person.offences(SIZES)
    await person.shoot(f"{name}-dark-narrow")
    await person.page.emulate_media(color_scheme="light")
    await person.page.set_viewport_size(DESKTOP)
    return wrong


async def test_each_page(stranger: Person, tenant: Tenant) -> None:
    ids = await furnish(tenant)
    await stranger.go("/login")
    wrong = await look(stranger, "login")
    await stranger.sign_in()
    for name, path in PAGES.items():
        await stranger.go(path.format(id=ids[-1]))
        wrong += await look(stranger, name)
    assert wrong == []


async def test_the_first_pages_of_a_new_tenant_teach(person: Person) -> None:
    wrong = await look(person, "first")
    assert f"{person.site.url}/mcp" in await person.page.inner_text("main")
    for name in ("trash", "namespaces", "activity"):
        await person.go(f"/{name}")
        assert await person.page.locator(".empty").count() == 1
        wrong += await look(person, f"first-{name}")
    assert wrong == []
