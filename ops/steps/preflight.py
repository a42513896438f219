"""Is this machine fit for the memory? All faults are told at once, and nothing has been changed by then."""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator
from typing import Final

from ops.facts import remote
from ops.inventory import Target
from ops.runner import Deploy, Refused

SUPPORTED: Final = {("debian", "13"): "Debian 13", ("ubuntu", "24.04"): "Ubuntu 24.04"}
#: LanceDB's library is compiled for this generation of processors (Haswell) and is killed by an illegal instruction on
#: an older one; the kernel's name for lzcnt is abm. The embedding server's arithmetic wants avx2 and fma as well.
CPU_FLAGS: Final = ("avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "popcnt")
MIN_CPUS: Final = 2
#: What remains of 4 GB when the kernel and the hypervisor took their part.
MIN_RAM_MB: Final = 3500
#: All memory limits are under three quarters of the RAM; Prometheus and those beside it have 304 MB of their own.
MIN_RAM_WATCHED_MB: Final = 4400
#: Images 4 GB, one release more during an upgrade, the model, data and backups.
MIN_DISK_MB: Final = 10_000
MIN_INODES: Final = 200_000
MAX_SKEW_S: Final = 30
PROJECT: Final = "warmstart"
NAT: Final = (
    "`domain`'s address could not be compared: this VM knows only private addresses. Make sure that {domain} "
    "({found}) leads to it."
)

#: One round trip: `key value` lines. Each question stands for itself, and a tool that is missing answers nothing.
SCRIPT: Final = r""": preflight
say() { printf '%s %s\n' "$1" "$2"; }
say clock "$(date +%s)"
say uid "$(id -u)"
( . /etc/os-release; say os "$ID $VERSION_ID"; say os_name "$PRETTY_NAME" ) 2>/dev/null
say init "$(cat /proc/1/comm)"
say arch "$(uname -m)"
say cpus "$(grep -c ^processor /proc/cpuinfo)"
say flags "$(grep -m1 ^flags /proc/cpuinfo | cut -d: -f2)"
say ram_kb "$(awk '/^MemTotal/ {print $2}' /proc/meminfo)"
for d in /var/lib/docker /var/lib /var; do [ -d $d ] && break; done
say disk "$(df -Pk $d | awk 'NR==2 {print $4, $6}')"
say inodes "$(df -Pi $d | awk 'NR==2 {print $2, $4}')"
say addresses "$(hostname -I 2>/dev/null)"
ss -Hltnp 2>/dev/null | while read -r line; do say listener "$line"; done
command -v docker >/dev/null &&
  docker ps --format '{{.Ports}}|{{.Names}}|{{.Label "com.docker.compose.project"}}' 2>/dev/null |
  while read -r line; do say container "$line"; done
command -v ufw >/dev/null && ufw status 2>/dev/null | grep -q '^Status: active' && say firewall ufw
systemctl is-active --quiet firewalld 2>/dev/null && say firewall firewalld
for p in apt-get dpkg systemctl; do command -v $p >/dev/null || say missing $p; done
say dpkg "$(dpkg --audit 2>/dev/null | head -n 1)"
say sources "$(grep -rhsE '^(deb |URIs:)' /etc/apt/sources.list /etc/apt/sources.list.d | wc -l)"
say docker_package "$(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' docker-ce podman-docker 2>/dev/null |
  awk '$1 == "ii" {printf "%s ", $2}')"
say snap_docker "$(ls -d /snap/docker 2>/dev/null)"
true
"""

Answers = dict[str, list[str]]


def apply(deploy: Deploy) -> None:
    asked = time.time()
    found = remote(SCRIPT)
    answered = time.time()
    if not found.ok:
        raise Refused([
            f"no command can be run as root ({found.last_error}): log in as root, or let {deploy.target.ssh_user} sudo "
            "without a password"
        ])  # fmt: skip
    answers: Answers = {}
    for line in found.out.splitlines():
        key, _, value = line.partition(" ")
        answers.setdefault(key, []).append(value.strip())
    faults = [
        *_system(answers), *_processor(answers), *_room(answers, watched=deploy.target.alerts.wanted),
        *_clock(answers, asked, answered), *_ports(answers, deploy.target), *_others(answers),
    ]  # fmt: skip
    if deploy.target.domain:
        faults += _dns(deploy, answers)
    if faults:
        raise Refused(faults)


def _one(answers: Answers, key: str) -> str:
    return answers.get(key, [""])[0]


def _number(answers: Answers, key: str, index: int = 0) -> int | None:
    words = _one(answers, key).split()
    return int(words[index]) if len(words) > index and words[index].isdigit() else None


def _system(answers: Answers) -> Iterator[str]:
    if _one(answers, "uid") not in ("", "0"):
        yield "commands don't run as root, although sudo did not complain: look at the sudo rules of the SSH user"
    name, _, version = _one(answers, "os").partition(" ")
    if (name, version) not in SUPPORTED:
        yield f"the system is {_one(answers, 'os_name') or 'unknown'}: take a VM with {' or '.join(SUPPORTED.values())}"
    if _one(answers, "init") != "systemd":
        yield f"process 1 is {_one(answers, 'init') or 'unknown'}, not systemd, which has to start the services"
    if missing := answers.get("missing"):
        yield f"not on this machine: {', '.join(missing)}"
    if broken := _one(answers, "dpkg"):
        yield f"dpkg has unfinished work ({broken}): run `dpkg --configure -a` and `apt-get -f install` there"
    if _number(answers, "sources") == 0:
        yield "apt has no package source: look at /etc/apt/sources.list.d"


def _processor(answers: Answers) -> Iterator[str]:
    if (arch := _one(answers, "arch")) != "x86_64":
        yield f"the processor is {arch}: the embedding server's image is made for x86-64 (amd64) only"
        return
    flags = _one(answers, "flags").split()
    if lacks := [flag for flag in CPU_FLAGS if flag not in flags]:
        yield (
            f"the processor, as the VM sees it, lacks {', '.join(lacks)}: LanceDB would die of an illegal instruction. "
            "Take another type of VM, or let the hypervisor hand the host's processor on (QEMU: -cpu host)"
        )
    if (cpus := _number(answers, "cpus")) is not None and cpus < MIN_CPUS:
        yield f"{cpus} virtual processor: at least {MIN_CPUS} are needed"


def _room(answers: Answers, *, watched: bool) -> Iterator[str]:
    ram = _number(answers, "ram_kb")
    least, size = (MIN_RAM_WATCHED_MB, "6 GB, or an inventory without alerts") if watched else (MIN_RAM_MB, "4 GB")
    if ram is None or ram // 1024 < least:
        yield f"{_mb(ram)} of RAM: at least {least} MB are needed, a VM of {size}"
    free, where = _number(answers, "disk"), _one(answers, "disk").partition(" ")[2] or "/var"
    ours = any(line.endswith(f"|{PROJECT}") for line in answers.get("container", []))
    # what a deployed memory takes isn't free, and an upgrade needs room for the images' changes alone
    wanted = MIN_DISK_MB // 4 if ours else MIN_DISK_MB
    if free is None or free // 1024 < wanted:
        yield f"{_mb(free)} free on {where}: at least {wanted} MB are needed"
    total, left = _number(answers, "inodes"), _number(answers, "inodes", 1)
    # some file systems don't count theirs: 0 of 0
    if total and left is not None and left < MIN_INODES:
        yield f"{left} inodes free on {where}: at least {MIN_INODES} are needed"


def _mb(kb: int | None) -> str:
    return "an unknown amount" if kb is None else f"{kb // 1024} MB"


def _clock(answers: Answers, asked: float, answered: float) -> Iterator[str]:
    clock = _number(answers, "clock")
    if clock is None:
        return
    # whole seconds, read at some moment between question and answer
    skew = round(max(asked - clock - 1, clock - answered, 0))
    if skew > MAX_SKEW_S:
        word = "behind" if clock < asked else "ahead of"
        yield (
            f"its clock is {skew} s {word} this machine's: certificates and the order of memories go wrong. "
            "Set it (`timedatectl set-ntp true`), or set this machine's"
        )


def _ports(answers: Answers, target: Target) -> Iterator[str]:
    """80 and 443 are free, or held by the stack's own proxy."""
    for port in (target.http_port, target.https_port):
        holders = []
        for line in answers.get("container", []):
            ports, name, project = line.rsplit("|", 2)
            if f":{port}->" in ports and project != PROJECT:
                holders.append(f"the container {name}")
        for line in answers.get("listener", []):
            words = line.split()
            # docker's own proxies stand for the containers above
            if len(words) > 3 and words[3].rpartition(":")[2] == str(port) and "docker-proxy" not in line:
                program = line.partition('users:(("')[2].partition('"')[0]
                holders.append(program or "a program that could not be named")
        if holders:
            names = " and ".join(dict.fromkeys(holders))
            yield f"port {port} is held by {names}: stop and disable it, the memory's proxy needs the port"


def _others(answers: Answers) -> Iterator[str]:
    """What would fight with the deploy over the same thing."""
    ways = {"ufw": "`ufw disable`", "firewalld": "`systemctl disable --now firewalld`"}
    for name in answers.get("firewall", []):
        yield f"{name} is active, and the deploy sets up a firewall of its own: turn one off, {ways[name]}"
    foreign = _one(answers, "docker_package").split() + (["docker (snap)"] if _one(answers, "snap_docker") else [])
    if foreign:
        yield (
            f"{', '.join(foreign)} is installed, and the deploy uses the distribution's docker.io: take a VM without "
            "it, or remove it with its containers"
        )


def _dns(deploy: Deploy, answers: Answers) -> list[str]:
    """Every address of the domain is one of the VM's, and served: a certificate authority may ask any of them."""
    domain, host = deploy.target.domain, deploy.target.host
    found = _resolve(domain)
    own = _resolve(host) | set(_one(answers, "addresses").split())
    if not found:
        hint = next((address for address in sorted(own) if _public(address)), "the VM's address")
        return [f"{domain} has no address: add an A record that leads to {hint} (it may take minutes until it is seen)"]
    if newer := sorted(address for address in found if ":" in address):
        return [f"{domain} has an AAAA record ({', '.join(newer)}), and only IPv4 is served: remove that record"]
    if strange := sorted(found - own):
        if not any(_public(address) for address in own):
            deploy.notes.append(NAT.format(domain=domain, found=", ".join(sorted(found))))
            return []
        return [
            f"{domain} leads to {', '.join(strange)}, which is not this VM ({', '.join(sorted(own))}): correct its A "
            "record; a proxy in between would keep caddy from getting a certificate"
        ]
    return []


def _resolve(name: str) -> set[str]:
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError:
        return set()


def _public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False
