"""What a server says when it is ready: how to use it, and on the first start the key."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from warmstart import __version__
from warmstart.home import Home
from warmstart.paths import default_home


def plain(url: str) -> None:
    _print(f"Warmstart {__version__} is running at {url}")


def ready(url: str, api_key: str | None, home: Home) -> None:
    """`api_key` where it was made at this start: it is shown this once."""
    plain(url)
    _print(f"Its data is in {home.path}")
    _print("Open that URL in a browser to search and edit what is remembered; an API key signs you in.")
    if api_key is None:
        _print()
        _print("Lost the API key? This makes another: warmstart keys create")
        _print("Ctrl-C stops it.")
        return
    _print()
    _print("API key, shown this once", bold=True)
    _print(f"  {api_key}")
    header = f"Authorization: Bearer {api_key}"
    _print()
    _print("Save and search", bold=True)
    _print(f"  {_curl(url, '/v1/memories', header, {'content': 'The staging database is called heron.'})}")
    _print(f"  {_curl(url, '/v1/search', header, {'query': 'which database is for staging?'})}")
    _print()
    _print("Claude Code", bold=True)
    _print(f'  claude mcp add --transport http warmstart {url}/mcp --header "{header}"')
    _print()
    _print("Any client's mcpServers, over HTTP", bold=True)
    _print(_stanza({"type": "http", "url": f"{url}/mcp", "headers": {"Authorization": f"Bearer {api_key}"}}))
    _print()
    _print("or over stdio, which needs no key and starts a server where none runs", bold=True)
    _print(_stanza(_stdio(home)))
    _print()
    _print("Ctrl-C stops it.")


def _stdio(home: Home) -> dict[str, Any]:
    beside = Path(sys.executable).parent / "warmstart"
    server: dict[str, Any] = {"type": "stdio", "command": str(beside) if beside.exists() else "warmstart"}
    server["args"] = ["mcp"]
    if home.path != default_home():
        server["env"] = {"WARMSTART_HOME": str(home.path)}
    return server


def _stanza(server: dict[str, Any]) -> str:
    return json.dumps({"mcpServers": {"warmstart": server}}, indent=2)


def _curl(url: str, path: str, header: str, body: dict[str, str]) -> str:
    return shlex.join(
        ["curl", "-sS", url + path, "-H", header, "-H", "Content-Type: application/json", "-d", json.dumps(body)]
    )


def _print(text: str = "", *, bold: bool = False) -> None:
    # no wrapping and no markup: these lines are copied
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True)
    console.print(text, style="bold" if bold else None)
    sys.stdout.flush()
