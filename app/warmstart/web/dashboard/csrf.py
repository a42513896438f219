"""That a form was sent by a page of ours: the browser says where a request comes from, and the form has a token."""

from __future__ import annotations

import hmac
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request

from warmstart.errors import Forbidden

FIELD: Final = "csrf"
#: Where a script sends something else than a form.
HEADER: Final = "x-csrf-token"


def check_origin(request: Request) -> None:
    """Every browser of these years sends one of both headers with a form; other ports of this host are others."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is None and origin is None:
        raise Forbidden("a form is sent by a browser, from a page of this server; programs use /v1 with an API key")
    if site not in (None, "same-origin", "none"):
        raise Forbidden("this form was sent from a page of another server")
    if origin is not None and _authority(origin) != request.headers.get("host", "").lower():
        raise Forbidden(f"this form was sent from {origin[:100]!r}, which is another server")


def check_token(given: str, expected: str) -> None:
    if not hmac.compare_digest(given.encode(), expected.encode()):
        raise Forbidden("this form is of an earlier session: go back, load the page again, and repeat")


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
