"""The first API key, where there is none yet."""

from __future__ import annotations

import json
from typing import Final

from pyinfra.operations import python

from ops.facts import remote
from ops.runner import Deploy, Refused

LINES: Final = """
API key (shown this once): {key}

  claude mcp add --transport http warmstart {url}/mcp --header "Authorization: Bearer {key}"

  {{"mcpServers": {{"warmstart": {{"type": "http", "url": "{url}/mcp",
    "headers": {{"Authorization": "Bearer {key}"}}}}}}}}

  curl {url}/v1/memories -H "Authorization: Bearer {key}" -H "Content-Type: application/json" -d '{{"content": "…"}}'
"""


def apply(deploy: Deploy) -> None:
    found = remote("warmstart-vm first-key --check")
    if not found.ok and not deploy.dry:
        raise Refused([f"the api can't be asked for its keys: {found.last_error}"])
    if found.ok and json.loads(found.out)["exists"]:
        return

    def make() -> None:
        made = remote("warmstart-vm first-key")
        if not made.ok:
            raise Refused([f"no key could be made: {made.last_error}"])
        deploy.notes.append(LINES.format(key=made.out.strip(), url=deploy.target.url))

    unknown = "" if found.ok else ", where there is none yet"
    python.call(name=f"make the first API key{unknown}", function=make)
