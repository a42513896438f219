"""What an operator may call this machine, where a command asks for its name before it destroys something."""

from __future__ import annotations

import socket
import subprocess
from contextlib import suppress

from .secrets import read
from .stack import Stack


def names(stack: Stack) -> set[str]:
    """Its own names and addresses, and the one it is deployed by."""
    found = {socket.gethostname(), socket.getfqdn(), "localhost", "127.0.0.1"}
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(["hostname", "--all-ip-addresses"], capture_output=True, text=True, timeout=10)
        found |= set(listed.stdout.split())
    settings = read(stack.etc / "settings.env")
    return found | {settings[name] for name in ("DOMAIN", "ADDRESS") if settings.get(name)}
