"""The system's `ssh` with the same parameters that pyinfra connects with: for what a terminal or a pipe is needed."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Final

from ops.inventory import Target

CONNECT_TIMEOUT_S: Final = 10


def known_hosts(target: Target) -> str:
    return str(Path(target.ssh_known_hosts or "~/.ssh/known_hosts").expanduser())


def command(target: Target, *remote: str, tty: bool = False) -> list[str]:
    """`remote` is run by root; without it, a login shell."""
    words = [
        "ssh", "-p", str(target.ssh_port), "-o", f"ConnectTimeout={CONNECT_TIMEOUT_S}",
        "-o", "ServerAliveInterval=15", "-o", "StrictHostKeyChecking=accept-new",
        "-o", f"UserKnownHostsFile={known_hosts(target)}",
    ]  # fmt: skip
    if target.ssh_key:
        words += ["-i", str(Path(target.ssh_key).expanduser()), "-o", "IdentitiesOnly=yes"]
    if tty:
        words.append("-t")
    elif remote:
        words += ["-o", "BatchMode=yes"]
    words.append(f"{target.ssh_user}@{target.host}")
    if remote:
        sudo = [] if target.ssh_user == "root" else ["sudo", "-n"]
        # ssh joins its words with blanks, and the other side's shell takes them apart again
        words += ["--", shlex.join([*sudo, *remote])]
    return words


def pyinfra_data(target: Target) -> dict[str, Any]:
    """Connection data of the pyinfra host."""
    data: dict[str, Any] = {
        "ssh_hostname": target.host,
        "ssh_user": target.ssh_user,
        "ssh_port": target.ssh_port,
        "ssh_known_hosts_file": known_hosts(target),
        "ssh_strict_host_key_checking": "accept-new",
        # a VM that boots, or reboots
        "ssh_connect_retries": 3,
    }
    if target.ssh_key:
        data["ssh_key"] = str(Path(target.ssh_key).expanduser())
        data |= {"ssh_look_for_keys": False, "ssh_allow_agent": False}
    return data
