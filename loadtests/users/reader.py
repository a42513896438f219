"""Somebody who looks through the dashboard: signs in once, then a page a visit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import quote_plus, urlencode

from loadtests.users.caller import Answer, Caller, Verdict
from loadtests.users.world import World

#: A form of the page itself, as a browser sends it.
FORM: Final = {"Content-Type": "application/x-www-form-urlencoded", "Sec-Fetch-Site": "same-origin"}
HTML: Final = {"Accept": "text/html"}
MEMORY_LINK: Final = re.compile(r'href="(/memories/mem_\w+)"')


class Reader:
    """Of the largest tenant; the cookie is kept by Locust's session, as by a browser."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._signed_in = False
        self._pages = self._way()
        self._memory = ""

    def visit(self, caller: Caller, due: float) -> None:
        if not self._signed_in:
            form = urlencode({"key": self._world.keys[0], "next": "/"})
            answer = caller.call("sign in", "/login", form, due, key="", headers=HTML | FORM, judge=page)
            self._signed_in = page(answer).ok
            return
        answer = caller.call("page", next(self._pages), None, due, key="", headers=HTML, judge=page)
        if found := MEMORY_LINK.search(answer.text):
            self._memory = found[1]
        self._signed_in = page(answer).ok

    def _way(self) -> Iterator[str]:
        """From the newest to one of them, a search, and round the other pages."""
        for other in itertools.cycle(("/namespaces", "/activity", "/trash", "/health")):
            yield "/"
            yield self._memory or "/"
            yield f"/?q={quote_plus(self._world.generator.query())}"
            yield other


def page(answer: Answer) -> Verdict:
    """A whole page, and not the one to sign in."""
    whole = answer.text.rstrip().endswith("</html>")
    ok = answer.status == 200 and whole and 'action="/login"' not in answer.text
    return Verdict(ok, answer.status, "" if ok else answer.text[:200] if not whole else "the session was lost")
