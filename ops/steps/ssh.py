"""SSH: keys only, no root password; proved by a second connection before it stays."""

from __future__ import annotations

import shlex
from typing import Final

from pyinfra import host
from pyinfra.api import FactBase

from ops.deadman import FOLDER, Armed, guarded, login_fault
from ops.facts import text
from ops.runner import Deploy, Refused

#: sshd takes the first value it reads: this name comes before cloud-init's 50-cloud-init.conf.
FILE: Final = "/etc/ssh/sshd_config.d/10-warmstart.conf"
SETTINGS: Final = {
    "PubkeyAuthentication": "yes",
    "PasswordAuthentication": "no",
    "KbdInteractiveAuthentication": "no",
    "PermitEmptyPasswords": "no",
    "PermitRootLogin": "prohibit-password",
    "MaxAuthTries": "4",
    "LoginGraceTime": "30",
    "X11Forwarding": "no",
}
#: An operator who is stricter stays so.
STRICTER: Final = ("no", "forced-commands-only")
RELOAD: Final = "systemctl try-reload-or-restart ssh.service"
#: Where `sshd -T` says it in its own words.
SAME: Final = {"without-password": "prohibit-password"}
BEFORE: Final = f"{FOLDER}/ssh.before"
NOTE: Final = f"if [ -e {FILE} ]; then cp -p {FILE} {BEFORE}; else rm -f {BEFORE}; fi"
UNDO: Final = f"if [ -e {BEFORE} ]; then cp -p {BEFORE} {FILE}; else rm -f {FILE}; fi\n{RELOAD}"


class Effective(FactBase[dict[str, str]]):
    """What sshd makes of all its files, for root who comes from somewhere."""

    default = dict

    def command(self) -> str:
        return "sshd -T -C user=root,host=client,addr=203.0.113.1"

    def process(self, output: list[str]) -> dict[str, str]:
        return {name: SAME.get(value, value) for name, _, value in (line.partition(" ") for line in output)}


class IncludesFirst(FactBase[bool]):
    """Whether the drop-ins are read before anything else is set."""

    default = staticmethod(lambda: False)

    def command(self) -> str:
        return "grep -vE '^[[:space:]]*(#|$)' /etc/ssh/sshd_config | head -n 1"

    def process(self, output: list[str]) -> bool:
        words = " ".join(output).lower().split()
        return words[:1] == ["include"] and "/etc/ssh/sshd_config.d/*.conf" in words


def apply(deploy: Deploy) -> None:
    effective = host.get_fact(Effective)
    wanted = dict(SETTINGS)
    if effective.get("permitrootlogin") in STRICTER:
        wanted["PermitRootLogin"] = effective["permitrootlogin"]
    config = "# Written by make deploy.\n" + "".join(f"{name} {value}\n" for name, value in wanted.items())
    counts = all(effective.get(name.lower()) == value for name, value in wanted.items())
    if counts and text(FILE) == config and not host.get_fact(Armed, change="ssh"):
        host.noop("SSH takes keys only")
        return
    if not host.get_fact(IncludesFirst):
        raise Refused([
            "/etc/ssh/sshd_config has no `Include /etc/ssh/sshd_config.d/*.conf` first, so settings of ours "
            "might not count: put that line at its beginning"
        ])  # fmt: skip
    if fault := login_fault(deploy.target):
        target = deploy.target
        raise Refused([
            f"{target.ssh_user} does not get in with a key alone ({fault}), and passwords are about to be turned off: "
            f"`ssh-copy-id -p {target.ssh_port} {target.ssh_user}@{target.host}`, or name the key by `ssh_key`"
        ])  # fmt: skip
    guarded(
        name="Keys only for SSH", change="ssh", deploy=deploy, note=NOTE, undo=UNDO,
        do=[
            f"printf '%s' {shlex.quote(config)} > {FILE} && chmod 644 {FILE}",
            "sshd -t",
            _counts(wanted),
            RELOAD,
        ],
    )  # fmt: skip


def _counts(wanted: dict[str, str]) -> str:
    """Fails where another file says otherwise, and earlier, or for some users only."""
    checks = [f"said=$({Effective().command()})"]
    for name, value in wanted.items():
        own_word = next((word for word, same in SAME.items() if same == value), value)
        others = f"grep -liE '^[[:space:]]*{name}' /etc/ssh/sshd_config /etc/ssh/sshd_config.d/*.conf | grep -vx {FILE}"
        fault = f"{{ echo '{name} is not {value}, as {FILE} says; another file sets it:' $({others}) >&2; false; }}"
        checks.append(f"{{ echo \"$said\" | grep -qix '{name} {own_word}' || {fault}; }}")
    return " && ".join(checks)
