"""A whole machine under emulation: a kernel of its own, cgroups v2, AppArmor, its own firewall and clock.

    cd tests && python3 -m vm.full      builds it, boots it and shuts it down

Everything takes some ten times as long as in a container, so it is for `make test-vm-full`. KVM isn't asked for: not
every machine that has the device can use it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from containers import build
from containers.stack import free_port
from vm import image
from vm.machine import COMMAND_TIMEOUT_S, STOP_TIMEOUT_S, Machine

DISK: Final = image.CACHE / "disk"
#: The smallest machine that the deploy accepts.
CPUS: Final = 2
MEMORY_MB: Final = 4096
DISK_SIZE: Final = "20G"
HOST_PROGRAMS: Final = {
    "qemu-system-x86_64": "qemu-system-x86", "mke2fs": "e2fsprogs", "mmdebstrap": "mmdebstrap",
    "ssh": "openssh-client",
}  # fmt: skip
#: AppArmor's programs are not among them: the kernel has it switched on all the same.
PACKAGES: Final = (*image.PACKAGES, "initramfs-tools", "linux-image-cloud-amd64", "systemd-resolved", "udev", "zstd")
MACHINE: Final = (
    '--essential-hook=mkdir -p "$1/etc/initramfs-tools/conf.d";'
    ' printf "MODULES=most\\nCOMPRESS=zstd\\n" >"$1/etc/initramfs-tools/conf.d/emulated"',
    '--customize-hook=echo warmstart-vm >"$1/etc/hostname"; echo "127.0.0.1 localhost warmstart-vm" >"$1/etc/hosts"',
    '--customize-hook=echo "/dev/vda / ext4 defaults,noatime 0 1" >"$1/etc/fstab"',
    '--customize-hook=printf "[Match]\\nName=en*\\n[Network]\\nDHCP=ipv4\\n" >"$1/etc/systemd/network/dhcp.network"',
    '--customize-hook=chroot "$1" systemctl enable systemd-networkd systemd-resolved ssh',
)
KERNEL_OPTIONS: Final = "root=/dev/vda rw console=ttyS0 panic=-1 mitigations=off audit=0"
BOOT_TIMEOUT_S: Final = 40.0
INSTALL_TIMEOUT_S: Final = 600


def prepare() -> None:
    """What an emulated machine is made of. Raises build.BuildError where that can't be had."""
    if missing := [package for program, package in HOST_PROGRAMS.items() if not shutil.which(program)]:
        if os.geteuid() != 0 or not shutil.which("apt-get"):
            raise build.BuildError(f"{', '.join(missing)}: install them, then try again")
        with build.step("host packages: " + " ".join(missing)):
            build.run("apt-get", "update", "-q")
            build.run(
                "apt-get", "install", "-y", "-q", "--no-install-recommends", *missing, timeout_s=INSTALL_TIMEOUT_S,
                DEBIAN_FRONTEND="noninteractive",
            )  # fmt: skip
    build_disk()
    sweep()


def build_disk() -> None:
    """A disk, a kernel and an initrd in DISK, where there are none of this content."""
    options = (*image.SERVER, *MACHINE, f"--include={','.join(PACKAGES)}")
    keys = image.authorized_keys()
    wanted = build.content_hash(*options, *image.sources(), keys, DISK_SIZE)
    marker = DISK / "content"
    if marker.exists() and marker.read_text() == wanted:
        return
    with build.step("disk of the emulated machine"):
        shutil.rmtree(DISK, ignore_errors=True)
        DISK.mkdir(parents=True)
        root = DISK / "root"
        build.run("mmdebstrap", *options, "--format=directory", build.SUITE, root, *image.sources())
        for home, owner in image.HOMES.items():
            folder = root / home / ".ssh"
            folder.mkdir(exist_ok=True)
            (folder / "authorized_keys").write_text(keys)
            for path, mode in ((folder, 0o700), (folder / "authorized_keys", 0o600)):
                os.chown(path, owner, owner)
                path.chmod(mode)
        for name in ("vmlinuz", "initrd.img"):
            # links that are right inside of the new root alone
            shutil.copyfile(next((root / "boot").glob(f"{name}-*")), DISK / name)
        build.run("mke2fs", "-q", "-t", "ext4", "-d", root, "-L", "root", DISK / "disk.img", DISK_SIZE)
        shutil.rmtree(root)
        marker.write_text(wanted)


class Emulated(Machine):
    patience = 20.0
    _process: subprocess.Popen[bytes]

    def start(self) -> None:
        if not self.folder.exists():
            self.folder.mkdir(parents=True)
            build.run("cp", "--sparse=always", DISK / "disk.img", self._disk)
        forwards = "".join(f",hostfwd=tcp:127.0.0.1:{here}-:{port}" for port, here in self.ports.items())
        with (self.folder / "qemu.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "qemu-system-x86_64", "-name", self.name, "-machine", "q35",
                    "-accel", "tcg,thread=multi,tb-size=512", "-cpu", "max", "-smp", str(CPUS), "-m", str(MEMORY_MB),
                    "-display", "none",
                    "-kernel", str(DISK / "vmlinuz"), "-initrd", str(DISK / "initrd.img"), "-append", KERNEL_OPTIONS,
                    "-drive", f"file={self._disk},if=virtio,format=raw,cache=unsafe,discard=unmap",
                    "-netdev", f"user,id=net{forwards}", "-device", "virtio-net-pci,netdev=net",
                    "-device", "virtio-rng-pci", "-serial", f"file:{self.folder / 'console.log'}",
                    "-monitor", f"unix:{self._monitor},server,nowait",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        (self.folder / "qemu.pid").write_text(str(self._process.pid))
        try:
            self.wait(timeout_s=BOOT_TIMEOUT_S)
        except AssertionError as error:
            said = [(self.folder / name).read_text(errors="replace") for name in ("qemu.log", "console.log")]
            raise AssertionError(f"{error}\n" + "\n".join(text[-2000:] for text in said)) from None
        self.ssh(f"echo WARMSTART_VM_PATIENCE={self.patience:.0f} >/etc/environment")

    @property
    def _disk(self) -> Path:
        return self.folder / "disk.img"

    @property
    def _monitor(self) -> Path:
        # not in the folder: a socket's path may have some hundred characters
        return Path("/tmp", f"{self.name}.monitor")

    def stop(self) -> None:
        self.ssh("systemctl poweroff", check=False)
        self._process.wait(STOP_TIMEOUT_S * self.patience)

    def cut_power(self) -> None:
        self._process.kill()
        self._process.wait(COMMAND_TIMEOUT_S)

    def remove(self) -> None:
        # a start that failed may have begun no process
        if hasattr(self, "_process"):
            self.cut_power()
        self._monitor.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def outside(self, port: int) -> tuple[str, int]:
        if port not in self.ports:
            self.ports[port] = free_port()
            self._tell(f"hostfwd_add net tcp:127.0.0.1:{self.ports[port]}-:{port}")
        return "127.0.0.1", self.ports[port]

    def _tell(self, command: str) -> None:
        with socket.socket(socket.AF_UNIX) as monitor:
            monitor.settimeout(COMMAND_TIMEOUT_S)
            monitor.connect(str(self._monitor))
            said = _until_prompt(monitor)
            monitor.sendall(command.encode() + b"\n")
            said = _until_prompt(monitor)
        # it repeats the command, character by character, and has no word for success
        assert not re.search(rb"(?i)invalid|could not", said), said.decode(errors="replace")


def _until_prompt(monitor: socket.socket) -> bytes:
    said = b""
    while not said.endswith(b"(qemu) "):
        more = monitor.recv(4096)
        assert more, f"the monitor hung up: {said!r}"
        said += more
    return said


def sweep() -> None:
    """Ends machines whose tests were killed."""
    for folder in (image.CACHE / "machines").glob(f"{image.PREFIX}-*"):
        pid_file = folder / "qemu.pid"
        if Path("/proc", folder.name.rpartition("-")[2]).exists() or not pid_file.exists():
            continue
        pid = int(pid_file.read_text())
        with contextlib.suppress(OSError):
            if folder.name.encode() in Path("/proc", str(pid), "cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    try:
        prepare()
        machine = Emulated("try")
        try:
            began = time.monotonic()
            machine.start()
            print(f"{time.monotonic() - began:7.1f} s  boot")
            print(
                machine.ssh("uname -a; cat /sys/kernel/security/lsm; stat -fc %T /sys/fs/cgroup; free -m; df -h /").out
            )
            print(f"{machine.reboot():7.1f} s  reboot")
            began = time.monotonic()
            machine.stop()
            print(f"{time.monotonic() - began:7.1f} s  shutdown")
        finally:
            machine.remove()
    except (build.BuildError, AssertionError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
