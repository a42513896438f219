"""A browser without a screen: keeps cookies, sends forms as their pages have them, says where it comes from."""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field
from urllib.parse import urlencode

import httpx

FORM = {"content-type": "application/x-www-form-urlencoded", "sec-fetch-site": "same-origin"}


@dataclass
class Visitor:
    http: httpx.AsyncClient
    page: str = ""
    status: int = 0
    url: str = "/"
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    async def sign_in(self, key: str, **fields: str) -> None:
        await self.post("/login", key=key, **fields)

    async def get(self, path: str, **headers: str) -> str:
        """The page; redirects are followed."""
        return await self._followed(await self.http.get(path, headers=headers))

    async def post(self, path: str, ids: list[str] | None = None, token: str | None = None, **fields: str) -> str:
        given = [*fields.items(), *(("id", one) for one in ids or [])]
        given.append(("csrf", self.token if token is None else token))
        headers = FORM | {"referer": f"http://127.0.0.1:8484{self.url}"}
        return await self._followed(await self.http.post(path, content=urlencode(given), headers=headers))

    async def submit(self, action: str, **changes: str) -> str:
        """The form of this page that goes to `action`, as it is shown, with `changes`."""
        return await self.post(action, **(self.fields(action) | changes))

    async def _followed(self, response: httpx.Response) -> str:
        for _ in range(5):
            if response.status_code != 303:
                break
            response = await self.http.get(response.headers["location"])
        self.page, self.status, self.headers = response.text, response.status_code, response.headers
        self.url = response.request.url.raw_path.decode()
        return self.page

    @property
    def token(self) -> str:
        found = re.search(r'name="csrf" value="([^"]+)"', self.page)
        return found[1] if found else ""

    @property
    def count(self) -> int:
        """The number that the page tells."""
        found = re.search(r'id="count" data-total="(\d+)">([^<]*)<', self.page)
        if not found:
            assert 'class="empty' in self.page, self.page[:500]
            return 0
        said = re.search(r"\d[\d,]*", found[2])
        assert not said or int(said[0].replace(",", "")) == int(found[1])
        return int(found[1])

    @property
    def ids(self) -> list[str]:
        return re.findall(r'<input type="checkbox" name="id" value="([^"]+)"', self.page)

    @property
    def notice(self) -> str:
        found = re.search(r'class="notice" role="status">\s*<span dir="auto">(.*?)</span>', self.page, re.DOTALL)
        return html.unescape(found[1]) if found else ""

    @property
    def next(self) -> str:
        found = re.search(r'href="([^"]+)" rel="next"', self.page)
        return html.unescape(found[1]) if found else ""

    async def walk(self, path: str) -> list[str]:
        """The ids of all pages, each of which tells the same number."""
        await self.get(path)
        count, ids = self.count, self.ids
        while self.next:
            await self.get(self.next)
            assert self.count == count
            ids += self.ids
        assert count == len(ids)
        return ids

    def fields(self, action: str) -> dict[str, str]:
        form = re.search(rf'<form[^>]*action="{re.escape(action)}".*?</form>', self.page, re.DOTALL)
        assert form, f"no form to {action} in {self.page[:1000]}"
        found = {}
        for tag in re.findall(r"<input ([^>]*)>", form[0]):
            attributes = dict(re.findall(r'([a-z-]+)="([^"]*)"', tag))
            if attributes.get("type") != "checkbox" and attributes["name"] != "csrf":
                found[attributes["name"]] = html.unescape(attributes.get("value", ""))
        for name, value in re.findall(r'<textarea [^>]*name="([^"]+)"[^>]*>\n(.*?)</textarea>', form[0], re.DOTALL):
            found[name] = html.unescape(value).replace("\n", "\r\n")  # as browsers send it
        for name, options in re.findall(r'<select [^>]*name="([^"]+)"[^>]*>(.*?)</select>', form[0], re.DOTALL):
            chosen = re.search(r"<option selected>([^<]*)<", options)
            found[name] = html.unescape(chosen[1]) if chosen else ""
        return found
