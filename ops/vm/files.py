"""What containers read of this machine: the files of a release, and the flag by which caddy chooses the api's slot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import datetime

from .changes import CADDY, caddy_has_loaded_its_file, newest, stale_files
from .stack import SLOTS, Container, Release, Stack, VmError


def lay_files(stack: Stack, release: Release) -> list[str]:
    """Those of `release` in the folder that containers mount from, each replaced in one step."""
    stale = stale_files(stack, release)
    for path, content in stale.items():
        target = stack.config / path
        if content is None:
            target.unlink()
            continue
        for folder in reversed(target.parents[: len(path.parents) - 1]):
            # whatever the umask: those who read it are other users
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o755)
        new = target.with_name(f".{target.name}.new")
        new.write_bytes(content)
        new.chmod(0o644)
        new.replace(target)
    return [f"{path} {'gone' if content is None else 'written'}" for path, content in sorted(stale.items())]


def behind_their_files(stack: Stack, services: Sequence[str]) -> list[Container]:
    """Running ones that started before a file in the folder of their name was written; caddy can load its own anew."""
    found = newest(stack.containers())
    behind = []
    for name in services:
        written = [f.stat().st_mtime for f in (stack.config / name).glob("**/*") if f.is_file()]
        container = found.get(name)
        if name == CADDY or not written or container is None or not container.running:
            continue
        started = datetime.fromisoformat(f"{container.started_at[:19]}+00:00").timestamp()
        if started + 1 < max(written):
            behind.append(container)
    return behind


def reload_caddy(stack: Stack) -> list[str]:
    """Its rules are those of its file. What it refuses it does not take, and serves on by the rules it had."""
    caddy = newest(stack.containers(CADDY)).get(CADDY)
    if caddy is None or not caddy.running:
        return []
    try:
        if caddy_has_loaded_its_file(stack, caddy):
            return []
        stack.run(["docker", "exec", caddy.id, "caddy", "reload", "--config", "/etc/caddy/Caddyfile"])
    except VmError as error:
        raise VmError(f"caddy does not take its rules: {error}") from None
    return ["caddy's rules loaded anew"]


def move_traffic(stack: Stack, slot: str) -> list[str]:
    """From the next request on; those under way end where they are."""
    flag = stack.traffic_flag
    flag.parent.mkdir(parents=True, exist_ok=True)
    flag.parent.chmod(0o755)
    if slot == SLOTS[1]:
        flag.touch()
    else:
        flag.unlink(missing_ok=True)
    folder = os.open(flag.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # a power cut must not send the traffic to a slot that is empty by then
    finally:
        os.close(folder)
    return [f"to {slot}"]
