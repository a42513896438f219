"""healthcheck: for containers, which then need no curl. Imports nothing heavy: it runs every few seconds."""

from __future__ import annotations

import http.client
import os
from contextlib import closing
from typing import Final
from urllib.parse import urlsplit

import click

TIMEOUT_S: Final = 3.0


@click.command()
@click.argument("url", required=False)
def healthcheck(url: str | None) -> None:
    """Exit 0 if a server answers /healthz, else 1.

    URL is http://127.0.0.1:$PORT where not given.
    """
    base = url or f"http://127.0.0.1:{os.environ.get('PORT') or 8484}"
    if fault := _fault(base):
        click.echo(f"Error: {base} is not healthy: {fault}", err=True)
        raise SystemExit(1)


def _fault(base: str) -> str:
    try:
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return "not a URL such as http://127.0.0.1:8484"
        secure = parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        with closing(kind(parts.hostname, parts.port, timeout=TIMEOUT_S)) as connection:
            connection.request("GET", parts.path.rstrip("/") + "/healthz")
            status = connection.getresponse().status
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return "" if status == 200 else f"it answered {status}"
