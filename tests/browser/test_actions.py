"""What a person does in a real browser: by mouse, by keyboard alone, without scripts, on a slow or broken service."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Browser, expect

from browser.site import PHONE, Person, Site, visit
from integration.service import Tenant, down


async def press_to(person: Person, selector: str, most: int = 60) -> None:
    """Tab until what matches `selector` has the focus, which can be seen."""
    for _ in range(most):
        await person.page.keyboard.press("Tab")
        if await person.page.evaluate("s => document.activeElement.matches(s)", selector):
            outline = "getComputedStyle(document.activeElement).outlineStyle"
            assert await person.page.evaluate(outline) != "none"
            return
    raise AssertionError(f"{selector} can't be reached by keyboard")


async def test_by_keyboard_alone_from_sign_in_to_a_saved_edit(stranger: Person, tenant: Tenant) -> None:
    made = await tenant.save("The blue pipeline deploys at noon", title="Deploys")
    await tenant.save("Something else entirely")
    page, keys = stranger.page, stranger.page.keyboard
    await stranger.go("/")
    await press_to(stranger, "#key")
    await keys.type(tenant.key)
    await keys.press("Enter")
    await expect(page.get_by_role("button", name="Sign out")).to_be_visible()
    await keys.press("Tab")
    await keys.press("Enter")  # past the pages' names
    await keys.press("/")
    await expect(page.locator("#q")).to_be_focused()
    await keys.type("blue pipeline")
    await expect(page.locator(".why").first).to_contain_text("by words: blue, pipeline")
    await expect(page.locator("#announce")).to_have_text("2 hits")
    await press_to(stranger, f'a[href="/memories/{made["id"]}"]')
    await keys.press("Enter")
    await page.wait_for_url(f"**/memories/{made['id']}")
    await press_to(stranger, 'a[href$="/edit"]')
    await keys.press("Enter")
    await page.wait_for_url("**/edit")
    await press_to(stranger, "#content")
    await keys.press("Control+End")
    await keys.type(", not on Fridays")
    await keys.press("Control+Enter")
    await expect(page.locator(".notice")).to_have_text("Saved.")
    assert (await tenant.get(f"/v1/memories/{made['id']}"))[
        "content"
    ] == "The blue pipeline deploys at noon, not on Fridays"
    await press_to(stranger, ".step summary")
    await keys.press("Enter")
    await press_to(stranger, ".step button")
    await keys.press("Enter")
    await expect(page.locator(".notice")).to_contain_text("The earlier version is back")
    assert (await tenant.get(f"/v1/memories/{made['id']}"))["content"] == "The blue pipeline deploys at noon"


async def test_several_to_the_trash_undone_restored_and_emptied(person: Person, tenant: Tenant) -> None:
    for number in range(5):
        await tenant.save(f"note {number}")
    page = person.page
    await person.go("/")
    assert await person.count() == 5
    move = page.get_by_role("button", name="Move to trash")
    await expect(move).to_be_disabled()
    boxes = page.locator(".memories input")
    await boxes.nth(0).check()
    await boxes.nth(2).click(modifiers=["Shift"])
    await expect(move).to_have_text("Move to trash (3)")
    await move.click()
    await expect(page.locator(".notice")).to_contain_text("3 memories are in the trash.")
    assert await person.count() == 2
    await page.get_by_role("button", name="Undo").click()
    await expect(page.locator(".notice")).to_contain_text("3 restored.")
    assert await person.count() == 5
    await page.get_by_label("All on this page").check()
    await move.click()
    await page.get_by_role("link", name="Trash", exact=True).click()
    assert await person.count() == 5
    await expect(page.locator(".memories .state").first).to_have_text("30 days left")
    await page.get_by_label("Select “note 3”").check()
    await page.get_by_role("button", name="Restore").click()
    assert await person.count() == 4
    await page.get_by_role("link", name="Empty the trash…").click()
    await page.get_by_role("link", name="Keep them").click()
    assert await person.count() == 4
    await page.get_by_role("link", name="Empty the trash…").click()
    await page.get_by_role("button", name="Remove for good").click()
    await expect(page.locator(".notice")).to_have_text("4 memories were removed for good.")
    assert (await tenant.get("/v1/memories/counts"))["trashed"] == 0


async def test_a_change_elsewhere_is_shown_beside_ones_own(person: Person, tenant: Tenant) -> None:
    made = await tenant.save("original")
    page = person.page
    await person.go(f"/memories/{made['id']}/edit")
    await tenant.patch(f"/v1/memories/{made['id']}", {"content": "theirs"})
    await page.locator("#content").fill("mine")
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator("#conflict")).to_be_focused()
    await expect(page.get_by_label("Text, stored now")).to_have_text("theirs")
    await expect(page.locator("#content")).to_have_value("mine")
    assert await person.offences() == []
    await person.shoot("conflict-light-wide")
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator(".notice")).to_have_text("Saved.")


async def test_namespaces_and_keys(person: Person, tenant: Tenant) -> None:
    await tenant.save("a", namespace="work")
    page = person.page
    await page.get_by_role("link", name="Namespaces").click()
    await page.get_by_role("link", name="Rename or trash work").click()
    await page.get_by_label("New name").fill("office")
    await page.get_by_role("button", name="Rename").click()
    await expect(page.locator(".rows h2")).to_have_text("office")
    await page.get_by_role("link", name="Rename or trash office").click()
    await page.get_by_label("Yes, all of them").check()
    await page.get_by_role("button", name="Move 1 memory to the trash").click()
    await expect(page.locator(".rows .meta")).to_contain_text("1 in the trash")

    await page.get_by_role("link", name="API keys").click()
    await page.get_by_label("What is it for?").fill("laptop")
    await page.get_by_role("button", name="Make a key").click()
    made = await page.get_by_label("The new key", exact=True).inner_text()
    assert re.fullmatch(r"ws_sk_[\w-]{43}", made)
    assert (await person.site.app.client(made).get("/v1/health")).status_code == 200
    await page.reload()  # makes no second one
    assert await person.count() == 2
    await page.get_by_role("link", name="Revoke laptop").click()
    await page.get_by_role("button", name="Revoke").click()
    await expect(page.locator(".notice")).to_contain_text("laptop is revoked")
    assert await person.count() == 1


async def memories(tenant: Tenant) -> list[dict[str, Any]]:
    """Without whether there is a vector: none is exported, and the worker makes it again."""
    found = (await tenant.get("/v1/memories"))["memories"]
    return [{name: value for name, value in memory.items() if name != "embedding_status"} for memory in found]


@pytest.mark.parametrize("form", ["JSON", "NDJSON"])
async def test_an_export_is_downloaded_and_imported_again(
    person: Person, tenant: Tenant, tmp_path: Path, form: str
) -> None:
    await tenant.save('first\nof two, with "quotes" and {braces},')
    await tenant.save("second", metadata={"big": 12345678901234567890})
    page = person.page
    await page.get_by_role("link", name="Export & import").click()
    async with page.expect_download() as download:
        await page.get_by_role("link", name=f"Download {form}", exact=True).click()
    file = tmp_path / (await download.value).suggested_filename
    await (await download.value).save_as(file)
    before = await memories(tenant)
    for memory in before:
        await tenant.delete(f"/v1/memories/{memory['id']}", hard="true")
    for outcome in ("Done: 2 imported.", "Done: 0 imported; 2 were here already."):
        await page.get_by_label("A file that Warmstart exported").set_input_files(file)
        await page.get_by_role("button", name="Import").click()
        await expect(page.locator("#outcome")).to_have_text(outcome)
    assert await memories(tenant) == before
    file.write_text("something else")
    await page.get_by_label("A file that Warmstart exported").set_input_files(file)
    await page.get_by_role("button", name="Import").click()
    await expect(page.locator("#outcome")).to_contain_text("This is no export of Warmstart.")


HOSTILE = (
    "<script>document.title='gone'</script><img src=x onerror=\"document.title='gone'\">",
    "\u202egnirts lartnec a fo eman eht\u202c \u2067עברית\u2069 and \u200b\u200d\ufeff zero width",
    "مرحبا بالعالم، هذه ذاكرة مكتوبة من اليمين إلى اليسار",
    "\u200b\u200d",
    "w" * 8000,
    "[a](javascript:document.title='gone') ![b](http://192.0.2.1/x.png) <http://192.0.2.1/>",
)


async def test_hostile_memories_do_nothing_and_break_nothing(person: Person, tenant: Tenant) -> None:
    ids = [(await tenant.save(text, title=text[:200], tags=[text[:64]]))["id"] for text in HOSTILE]
    page = person.page
    page.on("dialog", lambda dialog: person.complaints.append(f"dialog: {dialog.message}"))
    await page.set_viewport_size(PHONE)
    for path in ("/", "/?q=zero+width", "/trash", *(f"/memories/{id}" for id in ids), f"/memories/{ids[4]}/edit"):
        await person.go(path)
        assert await person.overflow() <= 0, path
        assert "gone" not in re.sub(r"='gone'", "", await page.title())
    await person.go("/")
    assert await person.offences() == []
    assert "(no visible title)" in await person.titles()
    await person.shoot("hostile-light-narrow")


async def test_a_session_lost_on_the_way_leads_back(person: Person, tenant: Tenant) -> None:
    made = await tenant.save("what the search was for")
    page = person.page
    await person.go("/")
    await person.context.clear_cookies()
    await page.locator("#q").fill("search")
    await expect(page.get_by_label("API key")).to_be_visible()
    await person.sign_in()
    await expect(page.locator("#q")).to_have_value("search")
    assert await person.titles() == ["what the search was for"]
    await person.go(f"/memories/{made['id']}/edit")
    await page.locator("#content").fill("typed for an hour")
    await person.context.clear_cookies()
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator(".alert")).to_contain_text("Nothing you typed is lost")
    await person.sign_in()
    await expect(page.locator("#content")).to_have_value("typed for an hour")
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator(".notice")).to_have_text("Saved.")


async def test_on_a_slow_server_the_last_word_wins(person: Person, tenant: Tenant) -> None:
    await tenant.save("alpha station")
    await tenant.save("beta station")
    page = person.page
    await person.go("/")
    person.site.delay_s = 1.0
    await page.locator("#q").press_sequentially("alpha", delay=20)
    await expect(page.locator("#results")).to_have_attribute("aria-busy", "true")
    await page.locator("#q").fill("beta station")
    await expect(page.locator("#results mark").first).to_have_text("beta")
    await expect(page.locator("#results")).not_to_have_attribute("aria-busy", "true")
    assert page.url.endswith("/?q=beta+station")
    assert (await person.titles())[0] == "beta station"


async def test_a_degraded_server_says_so_and_goes_on(person: Person, tenant: Tenant) -> None:
    await tenant.save("the printer is on the third floor")
    page = person.page
    await person.go("/")
    with down(person.site.provider):
        await page.locator("#q").fill("printer")
        await expect(page.locator("#results .banner")).to_contain_text("search goes by words alone")
        assert await person.titles() == ["the printer is on the third floor"]
        await person.go("/health")
        await expect(page.locator(".ladder .now")).to_contain_text("keyword")
        await expect(page.locator("main > .banner")).to_be_visible()
        assert await person.offences() == []
        await person.shoot("health-degraded-light-wide")


async def test_without_scripts_everything_still_works(site: Site, browser: Browser, tenant: Tenant) -> None:
    await tenant.save("alpha", title="alpha")
    await tenant.save("beta", title="beta")
    person = await visit(site, browser, tenant, java_script_enabled=False)
    page = person.page
    await person.go("/")
    await person.sign_in()
    await page.locator("#q").fill("alpha")
    await page.get_by_role("button", name="Search").click()
    await expect(page.locator(".why").first).to_contain_text("by words: alpha")
    await page.get_by_label("Select “alpha”").check()
    await page.get_by_role("button", name="Move to trash").click()
    await expect(page.locator(".notice")).to_contain_text("The memory is in the trash.")
    await page.get_by_role("button", name="Undo").click()
    await page.get_by_role("link", name="alpha").first.click()
    await page.get_by_role("link", name="Edit").click()
    await page.locator("#title").fill("alpha two")
    await page.get_by_role("button", name="Save").click()
    await expect(page.locator("h1")).to_have_text("alpha two")
    await person.context.close()
    assert person.complaints == []


async def test_a_revoked_key_ends_what_is_open(person: Person, tenant: Tenant) -> None:
    account = person.site.app.runtime.account(tenant.user_id)
    [key] = await account.keys()
    await account.revoke_key(key.id)
    async with asyncio.timeout(10):
        while "/login" not in person.page.url:
            await person.go("/health")
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("path", ["//example.com", "/\\example.com"])
async def test_a_sign_in_leads_nowhere_else(stranger: Person, path: str) -> None:
    await stranger.go(f"/login?next={path}")
    await stranger.sign_in()
    assert stranger.page.url == stranger.site.url + "/"
