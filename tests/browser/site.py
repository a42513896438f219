"""The whole service on a real socket, beside the browser in one event loop, and a person who uses it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import uvicorn
from axe_playwright_python.base import AXE_FILE_PATH
from playwright.async_api import Browser, BrowserContext, Page, Request, Response, expect
from starlette.types import Receive, Scope, Send

from fakes.provider import FakeProvider
from integration.service import App, Tenant
from warmstart.runtime import Runtime
from warmstart.web.app import create_app

SCREENSHOTS: Final = Path(__file__).parents[2] / ".cache" / "screenshots"
DESKTOP: Final = {"width": 1280, "height": 860}
PHONE: Final = {"width": 360, "height": 740}
AXE: Final = Path(AXE_FILE_PATH).read_text()
#: Of which nothing may be found, however slight.
RULES: Final = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}

COLOURS: Final = {"runOnly": ["color-contrast"]}
#: What a narrow screen changes.
SIZES: Final = {"runOnly": ["target-size", "scrollable-region-focusable", "meta-viewport"]}

expect.set_options(timeout=15_000)


@dataclass
class Site:
    """`delay_s` holds every answer back."""

    app: App
    provider: FakeProvider
    url: str = ""
    delay_s: float = 0.0


@asynccontextmanager
async def serving(runtime: Runtime, provider: FakeProvider) -> AsyncIterator[Site]:
    application = create_app(lambda: nullcontext(runtime))
    async with application.router.lifespan_context(application) as state:

        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and site.delay_s and not scope["path"].startswith("/static"):
                await asyncio.sleep(site.delay_s)
            await application({**scope, "state": dict(state or {})}, receive, send)

        site = Site(App(runtime, call, provider), provider)
        config = uvicorn.Config(call, port=0, lifespan="off", log_config=None, access_log=False, proxy_headers=False)
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve())
        while not server.started:  # noqa: ASYNC110 - it has no event to wait for
            await asyncio.sleep(0.01)
        site.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        try:
            yield site
        finally:
            server.should_exit = True
            await task
            await site.app.close()


@dataclass
class Person:
    """A signed-in tenant at a browser. What the console complains of and what is asked of other hosts is kept."""

    site: Site
    tenant: Tenant
    context: BrowserContext
    page: Page
    complaints: list[str] = field(default_factory=list)

    async def go(self, path: str) -> Response | None:
        return await self.page.goto(self.site.url + path)

    async def sign_in(self, key: str = "") -> None:
        await self.page.get_by_label("API key").fill(key or self.tenant.key)
        await self.page.get_by_role("button", name="Sign in").click()
        await expect(self.page.get_by_role("button", name="Sign out")).to_be_visible()

    async def count(self) -> int:
        return int(await self.page.locator("#count").get_attribute("data-total") or -1)

    async def titles(self) -> list[str]:
        return [text.strip() for text in await self.page.locator(".memories h2").all_inner_texts()]

    async def offences(self, rules: dict[str, list[str]] = RULES) -> list[str]:
        """What axe finds on the page as it is shown."""
        await self.page.evaluate(AXE + "\n;0")
        found = await self.page.evaluate("rules => axe.run(rules)", rules)
        return [
            f"{self.page.url}: {v['id']} ({v['impact']}): {node['html'][:160]}: {node['failureSummary'][:300]}"
            for v in found["violations"]
            for node in v["nodes"]
        ]

    async def overflow(self) -> int:
        """By how many pixels the page is wider than the screen."""
        script = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        return int(await self.page.evaluate(script))

    async def shoot(self, name: str) -> Path:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{re.sub(r'[^a-z0-9-]+', '-', name)}.png"
        await self.page.screenshot(path=path, full_page=True)
        return path


async def visit(site: Site, browser: Browser, tenant: Tenant, **options: Any) -> Person:
    context = await browser.new_context(
        **({"viewport": DESKTOP, "locale": "en-GB", "reduced_motion": "reduce"} | options)
    )
    page = await context.new_page()
    person = Person(site, tenant, context, page)

    def asked(request: Request) -> None:
        if not request.url.startswith((site.url + "/", "about:", "data:")):
            person.complaints.append(f"asked another host: {request.url}")

    page.on("request", asked)
    page.on("pageerror", lambda error: person.complaints.append(f"script: {error}"))
    page.on("console", lambda line: person.complaints.append(line.text) if _is_bad(line.type, line.text) else None)
    return person


def _is_bad(kind: str, text: str) -> bool:
    # that an answer was 401 or 412 is for the test to say
    return kind in ("error", "warning") and "the server responded with a status of" not in text
