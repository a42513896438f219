"""One service and one browser for all tests here, in one event loop; each test has a tenant and a window of its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright

from browser.site import Person, Site, serving, visit
from fakes.provider import FakeProvider
from integration.conftest import TestServer, postgres_session, quicken
from integration.service import DIM, Tenant, fresh_database, hosted, settings_for, until, well
from warmstart.config import Settings
from warmstart.runtime import open_runtime

__all__ = ["postgres_session"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/browser/" in str(item.path):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def provider() -> Iterator[FakeProvider]:
    with FakeProvider(DIM) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def site(
    postgres_session: TestServer, tmp_path_factory: pytest.TempPathFactory, provider: FakeProvider
) -> AsyncIterator[Site]:
    dsn = await fresh_database(postgres_session.dsn)
    settings = settings_for(tmp_path_factory.mktemp("home"), dsn, provider)
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        async with hosted(opened(settings, provider)) as made:
            yield made


@asynccontextmanager
async def opened(settings: Settings, provider: FakeProvider) -> AsyncIterator[Site]:
    async with open_runtime(settings) as runtime, serving(runtime, provider) as site:
        yield site


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> AsyncIterator[Browser]:
    """The distribution's own, so that nothing is downloaded; as root it has no sandbox."""
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    async with async_playwright() as playwright:
        chromium = await playwright.chromium.launch(executable_path=shutil.which("chromium"), args=options)
        yield chromium
        await chromium.close()


@pytest_asyncio.fixture(loop_scope="session")
async def tenant(site: Site, provider: FakeProvider) -> AsyncIterator[Tenant]:
    await site.app.compact()
    made = await site.app.tenant()

    async def known() -> bool:
        """On a busy machine Postgres may take longer than a request waits for it."""
        return (await made.http.get("/v1/health")).status_code == 200

    await until(known)
    yield made
    site.delay_s = 0.0
    well(provider)


@pytest_asyncio.fixture(loop_scope="session")
async def stranger(site: Site, browser: Browser, tenant: Tenant) -> AsyncIterator[Person]:
    """Somebody who has not signed in."""
    person = await visit(site, browser, tenant)
    yield person
    await person.context.close()
    assert person.complaints == []


@pytest_asyncio.fixture(loop_scope="session")
async def person(stranger: Person) -> Person:
    """The tenant, signed in, on the first page."""
    await stranger.go("/")
    await stranger.sign_in()
    return stranger
