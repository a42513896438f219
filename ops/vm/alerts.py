"""Who is told when something breaks: alertmanager's files, and the containers that watch.

They are no part of a roll-out: a release isn't undone because nobody could be told of it. What is wanted comes as JSON
by standard input, the fields of the inventory's `alerts`; secrets are those of secrets.env.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from .metrics import FILE, FOLDER, collect, render, write
from .secrets import read
from .stack import UP, Refused, Release, Stack

PROFILE: Final = "monitoring"
OVERLAY: Final = "compose.monitoring.yml"
SERVICES: Final = ("alertmanager", "host-metrics", "prometheus")
#: Those that read files of ours when they start.
READERS: Final = ("alertmanager", "prometheus")
#: The one group in compose.monitoring.yml that may read alertmanager's files, some of which are secrets.
GROUP: Final = 10005
#: As its container has the folder.
INSIDE: Final = "/etc/alertmanager"
WAIT_S: Final = 120
#: A message holds at most so many alerts.
MAX_ALERTS: Final = 50


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser("alerts", help="who is told when something breaks")
    parser.add_argument("--pending", action="store_true", help="only say what would be changed")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    wanted = json.load(sys.stdin)
    if args.pending:
        lines = pending(stack, wanted)
    else:
        with stack.lock("alerts"):
            lines = apply(stack, wanted)
    for line in lines:
        print(line)
    return 0


def pending(stack: Stack, wanted: Mapping[str, str]) -> list[str]:
    """What `apply` would change, in words; nothing where all is as it should be."""
    files = files_for(wanted, read(stack.etc / "secrets.env"))
    there = {c.service: c for c in stack.containers() if c.service in SERVICES}
    if not files:
        return [f"{service}: is not wanted any more" for service in sorted(there)]
    lines = [f"{path.name}: other content" for path, text in _paths(stack, files).items() if _read(path) != text]
    hashes = _hashes(stack, _release(stack))
    for service in SERVICES:
        found = there.get(service)
        if found is None or not found.running:
            lines.append(f"{service}: does not run")
        elif found.config_hash != hashes[service]:
            lines.append(f"{service}: other settings")
    if not lines and _read(_record(stack)) != _content(stack, files):
        lines.append("prometheus: other rules")
    return lines


def apply(stack: Stack, wanted: Mapping[str, str]) -> list[str]:
    """Makes it so, and says what was done. Raises Refused, VmError."""
    todo = pending(stack, wanted)
    if not todo:
        return []
    release = _release(stack)
    files = files_for(wanted, read(stack.etc / "secrets.env"))
    if not files:
        stack.run(_compose(stack, release, "rm", "--stop", "--force", *SERVICES))
        shutil.rmtree(_folder(stack), ignore_errors=True)
        _record(stack).unlink(missing_ok=True)
        return todo
    _lay(stack, files)
    write(stack.state / FOLDER / FILE, render(collect(stack)))
    before = {c.service: c.id for c in stack.containers()}
    _up(stack, release)
    content = _content(stack, files)
    if _read(_record(stack)) != content:
        # they read their files once: those that stayed would go on with the old ones
        after = {c.service: c.id for c in stack.containers()}
        if kept := [after[service] for service in READERS if before.get(service) == after.get(service)]:
            stack.run(["docker", "restart", *kept])
            _up(stack, release)
    _record(stack).write_text(content)
    return todo


def _up(stack: Stack, release: Release) -> None:
    words = [*UP, "--wait", "--wait-timeout", str(WAIT_S)]
    stack.run(_compose(stack, release, *words, *SERVICES), timeout_s=WAIT_S + 30)


def _compose(stack: Stack, release: Release, *words: str) -> list[str]:
    """With the watchers' own file behind the stack's, and before the one that has the images."""
    command = stack.compose(release, "--profile", PROFILE, *words)
    place = command.index("--file") + 2
    return [*command[:place], "--file", str(release.folder / "compose" / OVERLAY), *command[place:]]


def _release(stack: Stack) -> Release:
    release = stack.current()
    if release is None:
        raise Refused("nothing is rolled out on this machine yet: deploy to it")
    return release


def _hashes(stack: Stack, release: Release) -> dict[str, str]:
    lines = stack.run(_compose(stack, release, "config", "--hash", ",".join(SERVICES)))
    return dict(line.split() for line in lines.splitlines() if line.strip())


# -- files


def files_for(wanted: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Name → content; none where nobody is to be told. Raises Refused for what can't work.

    Alertmanager fills in no variables, so what is secret stands in files of its own, and the configuration names them.
    """
    webhook, mail_to = wanted.get("webhook", ""), wanted.get("mail_to", "")
    if not webhook and not mail_to:
        return {}
    files: dict[str, str] = {}
    receiver: dict[str, Any] = {"name": "operator"}
    common: dict[str, Any] = {}
    if webhook:
        # an address often is the secret
        files["webhook_url"] = webhook
        hook: dict[str, Any] = {"url_file": f"{INSIDE}/webhook_url", "max_alerts": MAX_ALERTS}
        if token := secrets.get("ALERT_WEBHOOK_TOKEN"):
            files["webhook_token"] = token
            hook["http_config"] = {"authorization": {"credentials_file": f"{INSIDE}/webhook_token"}}
        receiver["webhook_configs"] = [hook]
    if mail_to:
        common = {"smtp_smarthost": wanted["smtp"], "smtp_from": wanted["mail_from"]}
        if user := wanted.get("smtp_user"):
            if not (password := secrets.get("ALERT_SMTP_PASSWORD")):
                raise Refused("alerts: smtp_user is given, but ALERT_SMTP_PASSWORD is not: add it to `secrets`")
            files["smtp_password"] = password
            common |= {"smtp_auth_username": user, "smtp_auth_password_file": f"{INSIDE}/smtp_password"}
        receiver["email_configs"] = [{"to": mail_to, "send_resolved": True}]
    # JSON is YAML, and needs no care with quotes
    files["alertmanager.yml"] = json.dumps({"global": common, **routing(), "receivers": [receiver]}, indent=1) + "\n"
    return files


def routing() -> dict[str, Any]:
    """When somebody is told, and of what not: an alert that another one explains."""

    def explains(cause: str, effects: str, equal: list[str] | None = None) -> dict[str, Any]:
        return {
            "source_matchers": [f'alertname="{cause}"'], "target_matchers": [f'alertname=~"{effects}"'],
            "equal": equal or [],
        }  # fmt: skip

    return {
        "route": {
            "receiver": "operator", "group_by": ["alertname"],
            "group_wait": "15s", "group_interval": "5m", "repeat_interval": "12h",
            "routes": [{"matchers": ['severity="critical"'], "receiver": "operator", "repeat_interval": "2h"}],
        },
        "inhibit_rules": [
            explains("DiskFull", "DiskLow", ["mount"]),
            explains("DockerDown", "ContainerDown"),
            explains("BackupStale", "DrillFailed|DrillStale"),
            explains("SearchOverBudget", "SearchSlow"),
        ],
    }  # fmt: skip


def _folder(stack: Stack) -> Path:
    return stack.etc / "alertmanager"


def _paths(stack: Stack, files: Mapping[str, str]) -> dict[Path, str]:
    return {_folder(stack) / name: text for name, text in files.items()}


def _lay(stack: Stack, files: Mapping[str, str]) -> None:
    folder = _folder(stack)
    folder.mkdir(mode=0o750, parents=True, exist_ok=True)
    _own(folder, 0o750)
    for stale in folder.iterdir():
        if stale.name not in files:
            stale.unlink()
    for path, text in _paths(stack, files).items():
        new = path.with_name(f".{path.name}.new")
        new.touch(mode=0o600)
        new.write_text(text)
        _own(new, 0o640)
        new.replace(path)


def _own(path: Path, mode: int) -> None:
    if os.geteuid() == 0:
        os.chown(path, 0, GROUP)
    path.chmod(mode)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _record(stack: Stack) -> Path:
    """Of what the containers have read; where it is old, they are started anew."""
    return stack.state / "alerts-read"


def _content(stack: Stack, files: Mapping[str, str]) -> str:
    rules = sorted((stack.config / "prometheus").glob("*.yml"))
    parts = [*(f"{name}\0{text}" for name, text in sorted(files.items())), *(rule.read_text() for rule in rules)]
    return hashlib.sha256("\0\0".join(parts).encode()).hexdigest() + "\n"
