"""The system under it: security upgrades by themselves, the time, a reserve of memory, bounded logs."""

from __future__ import annotations

from collections.abc import Generator
from io import StringIO
from typing import Final

from pyinfra import host
from pyinfra.api import FactBase, operation
from pyinfra.facts.deb import DebPackages
from pyinfra.operations import files, systemd

from ops import packages
from ops.facts import InContainer
from ops.files import written
from ops.runner import Deploy

PACKAGES: Final = ("python3", "ca-certificates", "openssl", "procps", "zstd", "unattended-upgrades")
TIME_SERVERS: Final = ("chrony", "ntpsec", "ntp", "openntpd")
SWAP_FILE: Final = "/swapfile"
SWAP_MB: Final = 2048
DISK_BESIDE_SWAP_MB: Final = 6000
#: With this much, the containers' limits leave enough.
RAM_WITHOUT_SWAP_MB: Final = 6000

UPGRADES: Final = """// Written by make deploy.
APT::Periodic::Update-Package-Lists "1";
APT::Periodic::Unattended-Upgrade "1";
APT::Periodic::AutocleanInterval "7";
#clear Unattended-Upgrade::Origins-Pattern;
#clear Unattended-Upgrade::Allowed-Origins;
Unattended-Upgrade::Origins-Pattern {
  "origin=Debian,codename=${distro_codename},label=Debian-Security";
  "origin=Debian,codename=${distro_codename}-security,label=Debian-Security";
  "origin=Ubuntu,archive=${distro_codename}-security,label=Ubuntu";
};
Unattended-Upgrade::Remove-Unused-Kernel-Packages "true";
Unattended-Upgrade::Automatic-Reboot "false";
"""
JOURNAL: Final = """# Written by make deploy.
[Journal]
SystemMaxUse=300M
SystemKeepFree=1G
MaxRetentionSec=1month
"""
SYSCTL: Final = {
    # Redis forks to write its file: without it the fork is refused when half of the memory is taken
    "vm.overcommit_memory": 1,
    # the swap file is a reserve, not a place for what is in use
    "vm.swappiness": 10,
    # nobody sits before it
    "kernel.panic": 10,
}
SYSCTL_FILE: Final = "/etc/sysctl.d/60-warmstart.conf"


class Memory(FactBase[dict[str, int]]):
    """RAM and swap in MB, and what free space the root has."""

    default = dict

    def command(self) -> str:
        return (
            r"""awk '/^MemTotal/ {print "ram", int($2/1024)} /^SwapTotal/ {print "swap", int($2/1024)}' """
            r"""/proc/meminfo; df -Pm / | awk 'NR==2 {print "free", $4}'"""
        )

    def process(self, output: list[str]) -> dict[str, int]:
        return {name: int(value) for name, value in (line.split() for line in output)}


class Sysctl(FactBase[dict[str, int]]):
    default = dict

    def command(self, names: list[str]) -> str:
        return f"sysctl {' '.join(names)} 2>/dev/null || true"

    def process(self, output: list[str]) -> dict[str, int]:
        return {name: int(value) for name, _, value in (line.partition(" = ") for line in output)}


class RebootWanted(FactBase[bool]):
    default = staticmethod(lambda: False)

    def command(self) -> str:
        return "test -e /run/reboot-required && echo yes || echo no"

    def process(self, output: list[str]) -> bool:
        return output == ["yes"]


@operation()
def swap_file(path: str, size_mb: int) -> Generator[str, None, None]:
    """A swap file, in use now and after a reboot."""
    fstab = f"grep -q '^{path} ' /etc/fstab || echo '{path} none swap sw 0 0' >> /etc/fstab"
    # chattr: on btrfs, a file that is copied on write can't be swapped to
    make = (
        f"rm -f {path} && touch {path} && chmod 600 {path} && {{ chattr +C {path} 2>/dev/null || true; }} && "
        f"fallocate -l {size_mb}M {path} && mkswap -q {path} && swapon {path}"
    )
    yield f"{make} && {{ {fstab}; }} || {{ rm -f {path}; exit 1; }}"


@operation()
def sysctl(path: str, values: dict[str, int]) -> Generator[str, None, None]:
    """Kernel settings, now and after a reboot."""
    text = "# Written by make deploy.\n" + "".join(f"{name} = {value}\n" for name, value in values.items())
    yield from files.put._inner(StringIO(text), path, mode="644")
    have = host.get_fact(Sysctl, names=list(values))
    if any(have.get(name) != value for name, value in values.items()):
        yield f"sysctl -q -p {path}"


def apply(deploy: Deploy) -> None:
    in_container = host.get_fact(InContainer)
    synced = next((name for name in TIME_SERVERS if name in host.get_fact(DebPackages)), "")
    wanted = PACKAGES if synced else (*PACKAGES, "systemd-timesyncd")
    packages.installed(name="Install base packages", packages=wanted)

    written(name="Security upgrades by themselves", path="/etc/apt/apt.conf.d/52warmstart-upgrades", text=UPGRADES)
    for timer in ("apt-daily.timer", "apt-daily-upgrade.timer"):
        systemd.service(name=f"Enable {timer}", service=timer, enabled=True)
    written(
        name="Bound the journal", path="/etc/systemd/journald.conf.d/60-warmstart.conf", text=JOURNAL,
        then=["systemctl restart systemd-journald"],
    )  # fmt: skip
    if in_container:
        deploy.notes.append(
            "The machine is a container: its clock, swap and kernel settings are its host's, and were left alone."
        )
    else:
        _kernel(deploy, synced)
    if host.get_fact(RebootWanted):
        deploy.notes.append(
            "An upgrade of the system wants a reboot of the VM: at a quiet time, `make exec CMD='systemctl reboot'`."
        )


def _kernel(deploy: Deploy, synced: str) -> None:
    if not synced:
        systemd.service(name="Keep the time", service="systemd-timesyncd.service", running=True, enabled=True)
    memory = host.get_fact(Memory)
    if memory["ram"] >= RAM_WITHOUT_SWAP_MB or memory["swap"]:
        pass
    elif memory["free"] < SWAP_MB + DISK_BESIDE_SWAP_MB:
        deploy.notes.append(f"No swap was made: {memory['free']} MB free on / are too few for {SWAP_MB} MB of it.")
    else:
        swap_file(name=f"Add {SWAP_MB} MB of swap", path=SWAP_FILE, size_mb=SWAP_MB)
    sysctl(name="Kernel settings", path=SYSCTL_FILE, values=SYSCTL)
