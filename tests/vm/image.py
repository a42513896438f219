"""The image of the test machine: a Debian server as a provider hands it out, with systemd, sshd and nothing else.

    cd tests && python3 -m vm.image

Builds it, and what else the deploy tests need: the engine and the images that are deployed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from containers import build

ROOT: Final = build.ROOT
#: What is kept between runs: keys, and the disk of the emulated machine.
CACHE: Final = ROOT / ".cache" / "vm"
PREFIX: Final = "warmstart-vm"
IMAGE: Final = f"{PREFIX}/machine:{build.SUITE}"
#: Who may sudo without a password, beside root.
USER: Final = "deploy"
USER_ID: Final = 1000
#: Where each of them is at home, and who owns that.
HOMES: Final = {"root": 0, f"home/{USER}": USER_ID}
#: Two people who deploy, each with a key of their own.
OPERATORS: Final = ("operator", "second")
PID1: Final = Path(__file__).with_name("pid1")

PACKAGES: Final = (
    "ca-certificates", "curl", "dbus", "iproute2", "kmod", "openssh-server", "procps", "python3", "sudo", "systemd",
    "systemd-sysv",
)  # fmt: skip
#: No machine has the settings of apt and dpkg that made it, or the host keys of another: the first start makes its own.
SERVER: Final = (
    "-q", "--mode=root", "--variant=minbase", '--aptopt=APT::Install-Recommends "false"',
    # systemd sees no first boot in a container, and would make none
    '--customize-hook=rm "$1"/etc/ssh/ssh_host_*; mkdir "$1/etc/systemd/system/sshd-keygen.service.d";'
    ' printf "[Unit]\\nConditionFirstBoot=\\n" >"$1/etc/systemd/system/sshd-keygen.service.d/always.conf"',
    f'--customize-hook=chroot "$1" useradd --uid {USER_ID} --create-home --shell /bin/bash {USER}',
    f'--customize-hook=echo "{USER} ALL=(ALL) NOPASSWD: ALL" >"$1/etc/sudoers.d/{USER}"',
    '--customize-hook=rm -f "$1"/etc/apt/apt.conf.d/99mmdebstrap "$1"/etc/dpkg/dpkg.cfg.d/99mmdebstrap',
)  # fmt: skip
#: A container has no devices, seats or terminals of its own to look after.
CONTAINER: Final = (
    '--customize-hook=chroot "$1" systemctl set-default multi-user.target',
    '--customize-hook=chroot "$1" systemctl mask systemd-udevd.service systemd-logind.service'
    " getty.target console-getty.service",
    f"--customize-hook=upload {PID1} /pid1",
    '--customize-hook=chmod 755 "$1/pid1"',
)
CHANGES: Final = ("ENV container=docker", 'CMD ["/pid1"]')


def sources() -> tuple[str, ...]:
    """Lines of sources.list, with security updates as every server has them; the archive is the one of this machine."""
    archive = build.mirror()
    if not archive:
        raise build.BuildError("apt on this machine knows no archive of Debian's, which the test machine is made from")
    return (
        f"deb {archive} {build.SUITE} main",
        f"deb {archive} {build.SUITE}-updates main",
        f"deb {archive}-security {build.SUITE}-security main",
    )


def build_machine() -> None:
    """The image of the machine, where there is none of this content."""
    options = (*SERVER, *CONTAINER, f"--include={','.join(PACKAGES)}")
    # where the folder of this tree lies is no matter
    wanted = build.content_hash(*(word.replace(str(ROOT), "") for word in options), *CHANGES, *sources(), PID1)
    build.import_debian(IMAGE, wanted, options, sources(), CHANGES)


def key(operator: str) -> Path:
    """The private key of one of OPERATORS; the public one is beside it."""
    path = CACHE / "keys" / operator
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        build.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", operator, "-f", path)
    return path


def authorized_keys() -> str:
    return "".join(key(operator).with_suffix(".pub").read_text() for operator in OPERATORS)


def main() -> int:
    if status := build.main([]):
        return status
    try:
        with build.step("in all"):
            build_machine()
    except build.BuildError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
