"""`warmstart-vm smoke`: a memory's way there and back, as the canary tenant, through the public URL or into one api."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from .secrets import read, write
from .stack import PATIENCE, SLOTS, Refused, Release, Stack, VmError, last_json

TENANT: Final = "canary"
KEY_NAME: Final = "smoke"
KEY_FILE: Final = "canary.key"
#: Where caddy keeps the certificate of its own authority, in its container.
AUTHORITY: Final = "/tmp/data/caddy/pki/authorities/local/root.crt"  # noqa: S108 - a volume
TIMEOUT_S: Final = 60
#: For the container, and for the deletion that has time of its own.
GRACE_S: Final = 40
ONE_OFF_TIMEOUT_S: Final = 90.0
HARDENED: Final = (
    "--cap-drop=ALL", "--security-opt=no-new-privileges:true", "--read-only", "--tmpfs=/tmp", "--tmpfs=/data",
    "--pids-limit=256", "--memory=384m",
)  # fmt: skip


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser("smoke", help="try the service as a client does")
    parser.set_defaults(run=_smoke)


def _smoke(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    release = stack.current()
    if release is None:
        raise Refused("nothing was rolled out on this machine yet: deploy to it")
    print(report(stack, release, base=None), end="", flush=True)
    return 0


def run_smoke(stack: Stack, release: Release, *, base: str | None) -> None:
    """Raises VmError where the service does not work.

    `base` is None for the public URL, or http://SLOT:PORT for the api of a slot, whether or not it has traffic.
    """
    report(stack, release, base=base)


def report(stack: Stack, release: Release, *, base: str | None) -> str:
    """What it did, a line a step."""
    key = canary_key(stack, release)
    try:
        return _run(stack, release, base, key)
    except VmError as error:
        if not re.search(r"\b401\b|unauthorized|key (was|is) refused", str(error), re.IGNORECASE):
            raise
    # a database that was restored doesn't know it
    (stack.etc / KEY_FILE).unlink()
    return _run(stack, release, base, canary_key(stack, release))


def _run(stack: Stack, release: Release, base: str | None, key: str) -> str:
    settings = read(stack.etc / "settings.env")
    mode = "keyword" if settings.get("EMBEDDING_ENABLED", "").lower() in ("false", "0", "no") else "hybrid"
    with _scratch(stack) as folder:
        environment = folder / "key.env"
        with open(os.open(environment, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"WARMSTART_API_KEY={key}\n")
        way = _public(stack, settings, folder) if base is None else _inner(stack, base)
        image = release.images[SLOTS[0]]
        command = [
            "docker", "run", "--rm", f"--name={stack.project}-smoke-{os.getpid()}", "--log-driver=none",
            *HARDENED, *way[0], "--env-file", str(environment),
            image.id or image.name, "smoke", "--timeout", str(round(TIMEOUT_S * PATIENCE)), "--mode", mode, *way[1],
        ]  # fmt: skip
        try:
            return stack.run(command, timeout_s=TIMEOUT_S + GRACE_S)
        except VmError as error:
            raise VmError(_reason(str(error))) from None


def _reason(text: str) -> str:
    """Of what the smoke said, the steps that failed; all of it where none is named."""
    failed = [" ".join(line.split()) for line in text.splitlines() if line.startswith(("failed", "Error:"))]
    return "; ".join(failed) or text


Way = tuple[list[str], list[str]]


def _public(stack: Stack, settings: Mapping[str, str], folder: Path) -> Way:
    """Docker's and the command's arguments: as a client comes, certificate checked."""
    name = settings.get("DOMAIN") or settings["ADDRESS"]
    port = settings.get("HTTPS_PORT") or "443"
    shown = f"[{name}]" if ":" in name else name
    network = ["--network=host"]
    if not re.fullmatch(r"[\d.]+|.*:.*", name):
        # many networks let no machine reach itself by its public address
        bind = settings.get("BIND_ADDRESS", "")
        network.append(f"--add-host={name}:{'127.0.0.1' if bind in ('', '0.0.0.0') else bind}")  # noqa: S104
    words = ["--url", f"https://{shown}" + ("" if port == "443" else f":{port}")]
    if settings.get("DOMAIN"):
        return network, words
    authority = folder / "root.crt"
    authority.write_text(stack.exec("caddy", "cat", AUTHORITY))
    authority.chmod(0o644)
    return [*network, f"--volume={authority}:/root.crt:ro"], [*words, "--ca-file", "/root.crt"]


def _inner(stack: Stack, base: str) -> Way:
    """Beside the api of a slot, since it answers to its own machine's names alone."""
    slot, port = urlsplit(base).hostname or "", urlsplit(base).port
    found = [c for c in stack.containers(slot) if c.running] if slot in SLOTS else []
    if not found:
        raise VmError(f"{base}: no such api runs")
    return [f"--network=container:{found[0].id}"], ["--url", f"http://127.0.0.1:{port}"]


@contextmanager
def _scratch(stack: Stack) -> Iterator[Path]:
    """In memory, and for root alone but for what says otherwise."""
    stack.run_dir.mkdir(parents=True, exist_ok=True, mode=0o755)
    folder = Path(tempfile.mkdtemp(prefix="smoke-", dir=stack.run_dir))
    try:
        folder.chmod(0o711)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# -- the canary


def canary_key(stack: Stack, release: Release) -> str:
    """Of a tenant that only this test uses. It is made where there is none."""
    path = stack.etc / KEY_FILE
    if path.exists() and (key := path.read_text().strip()):
        return key
    try:
        _one_off(stack, release, "tenants", "create", TENANT, "--json")
    except VmError as error:
        if "ended with 4" not in str(error):  # it is there already
            raise
    key = str(_one_off(stack, release, "keys", "create", KEY_NAME, "--tenant", TENANT, "--json")["key"])
    write(path, key + "\n")
    return key


def _one_off(stack: Stack, release: Release, *words: str) -> Any:
    command = stack.compose(release, "run", "--rm", "--no-deps", "--no-TTY", SLOTS[0], *words)
    return last_json(stack.run(command, timeout_s=ONE_OFF_TIMEOUT_S))
