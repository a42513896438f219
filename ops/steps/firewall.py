"""Firewall: SSH, 80 and 443 from outside and nothing else, whatever ports Docker would publish."""

from __future__ import annotations

import hashlib
import os
import shlex
from typing import Final

from pyinfra import host
from pyinfra.api import FactBase

from ops import packages
from ops.deadman import FOLDER, Armed, guarded
from ops.facts import text
from ops.runner import Deploy, Refused

FILE: Final = "/etc/warmstart/firewall.nft"
UNIT_FILE: Final = "/etc/systemd/system/warmstart-firewall.service"
UNIT: Final = "warmstart-firewall.service"
#: What the kernel said of the table when it was proved: a rule that was taken out by hand is seen.
PROVED: Final = "/var/lib/warmstart/firewall.proved"
NEW: Final = f"{FOLDER}/firewall.nft"
BEFORE: Final = f"{FOLDER}/firewall.before"
LISTING: Final = "nft --stateless list table inet warmstart"

#: A table of its own, replaced at once; Docker's rules stand beside it, untouched. A `drop` is final in any table.
RULES: Final = """#!/usr/sbin/nft -f
# Written by make deploy.
table inet warmstart
delete table inet warmstart
table inet warmstart {
  set web { type inet_service; elements = { @WEB@ }; }
  set ssh { type inet_service; elements = { @SSH@ }; }

  chain input {
    type filter hook input priority filter - 10; policy drop;
    ct state established,related accept
    ct state invalid drop
    iif lo accept
    # containers reach what is outside, and one another, but no service of the machine
    iifname "docker*" jump container
    iifname "br-*" jump container
    icmp type { destination-unreachable, time-exceeded, parameter-problem } accept
    icmp type echo-request limit rate 20/second accept
    icmpv6 type { destination-unreachable, packet-too-big, time-exceeded, parameter-problem } accept
    icmpv6 type echo-request limit rate 20/second accept
    icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit, nd-router-advert } ip6 hoplimit 255 accept
    icmpv6 type { mld-listener-query, mld-listener-report, mld2-listener-report } ip6 saddr fe80::/10 accept
    # an address by DHCP
    udp sport 67 udp dport 68 accept
    ip6 saddr fe80::/10 udp sport 547 udp dport 546 accept
    tcp dport @ssh accept
    tcp dport @web accept
    udp dport @web accept
  }

  chain container {
    icmp type echo-request accept
    icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept
    drop
  }

  # before Docker's own chains: a published port is turned to its container first, and so never comes to `input`
  chain forward {
    type filter hook forward priority filter - 10; policy accept;
    ct state established,related accept
    iifname "docker*" jump from_container
    iifname "br-*" jump from_container
    iifname != "docker*" oifname "docker*" jump into_container
    iifname != "br-*" oifname "br-*" jump into_container
  }

  # the cloud's metadata service gives out credentials of the machine; some clouds answer DNS there as well
  chain from_container {
    ip daddr 169.254.0.0/16 meta l4proto { tcp, udp } th dport 53 return
    ip daddr 169.254.0.0/16 drop
    ip6 daddr fd00:ec2::254 drop
    # between networks of containers, Docker decides
    oifname "docker*" accept
    oifname "br-*" accept
  }

  chain into_container {
    ct status dnat ct original proto-dst @web accept
    drop
  }
}
"""
SERVICE: Final = f"""# Written by make deploy.
[Unit]
Description=Firewall of the warmstart memory
After=nftables.service
Before=network-pre.target docker.service
Wants=network-pre.target
DefaultDependencies=no
Conflicts=shutdown.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/sbin/nft -f {FILE}
ExecReload=/usr/sbin/nft -f {FILE}
ExecStop=/usr/sbin/nft delete table inet warmstart

[Install]
WantedBy=sysinit.target
"""
#: That service empties the kernel's whole ruleset at each start, reload and stop.
BESIDE_FILE: Final = "/etc/systemd/system/nftables.service.d/warmstart.conf"
BESIDE: Final = f"""# Written by make deploy.
[Service]
ExecStartPost=-/usr/sbin/nft -f {FILE}
ExecReload=-/usr/sbin/nft -f {FILE}
ExecStopPost=-/usr/sbin/nft -f {FILE}
"""
UNITS: Final = {UNIT_FILE: SERVICE, BESIDE_FILE: BESIDE}
NOTE: Final = f"{{ {LISTING} > {BEFORE} 2>/dev/null || rm -f {BEFORE}; }}"
UNDO: Final = f"nft delete table inet warmstart 2>/dev/null\nif [ -s {BEFORE} ]; then nft -f {BEFORE}; fi"


class SshPorts(FactBase[list[int]]):
    """Where sshd listens, and where this connection came in."""

    default = list

    def command(self) -> str:
        return "{ sshd -T | awk '$1 == \"port\" {print $2}'; echo \"$SSH_CONNECTION\" | awk '{print $4}'; } | sort -nu"

    def process(self, output: list[str]) -> list[int]:
        return sorted({int(line) for line in output if line.strip().isdigit()})


class Loaded(FactBase[str]):
    """Hash of the table that is in the kernel; empty where there is none."""

    default = staticmethod(lambda: "")

    def command(self) -> str:
        return f"{LISTING} 2>/dev/null | sha256sum | cut -c 1-64"

    def process(self, output: list[str]) -> str:
        return "" if output == [hashlib.sha256().hexdigest()] else output[0]


class Enabled(FactBase[bool]):
    default = staticmethod(lambda: False)

    def command(self) -> str:
        both = f"systemctl is-enabled --quiet {UNIT} 2>/dev/null && systemctl is-active --quiet {UNIT}"
        return f"{both} && echo yes || echo no"

    def process(self, output: list[str]) -> bool:
        return output == ["yes"]


def rules(ssh_ports: list[int], web_ports: list[int]) -> str:
    def listed(ports: list[int]) -> str:
        return ", ".join(str(port) for port in sorted(set(ports)))

    return RULES.replace("@WEB@", listed(web_ports)).replace("@SSH@", listed(ssh_ports))


def apply(deploy: Deploy) -> None:
    packages.installed(name="Install nftables", packages=["nftables"])
    ssh_ports = host.get_fact(SshPorts)
    if not ssh_ports:
        raise Refused(["which port SSH uses can't be told (`sshd -T` names none): a firewall would shut it"])
    ruleset = rules(ssh_ports, [deploy.target.http_port, deploy.target.https_port])
    if (
        text(FILE) == ruleset
        and all(text(path) == content for path, content in UNITS.items())
        and host.get_fact(Loaded) == (text(PROVED) or "").strip() != ""
        and host.get_fact(Enabled)
        and not host.get_fact(Armed, change="firewall")
    ):
        host.noop("the firewall is as it was proved")
        return
    guarded(
        name="Load the firewall", change="firewall", deploy=deploy, note=NOTE, undo=UNDO,
        do=[f"printf '%s' {shlex.quote(ruleset)} > {NEW} && nft --check -f {NEW} && nft -f {NEW}"],
        # in its place only now: a machine that reboots before that comes back without it
        keep=[
            f"mkdir -p /etc/warmstart && cp {NEW} {FILE}.new && mv {FILE}.new {FILE}",
            f"mkdir -p {os.path.dirname(BESIDE_FILE)}",
            *(f"printf '%s' {shlex.quote(content)} > {path}" for path, content in UNITS.items()),
            f"systemctl daemon-reload && systemctl enable --quiet {UNIT}",
            # loads the same rules once more, in one transaction, and makes systemd know
            f"systemctl is-active --quiet {UNIT} && systemctl reload {UNIT} || systemctl start {UNIT}",
            f"{Loaded().command()} > {PROVED}",
        ],
    )  # fmt: skip
