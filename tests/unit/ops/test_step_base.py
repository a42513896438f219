"""Base against recorded facts; what a container can't show (memory, kernel) is answered as a VM of 4 GB would."""

from __future__ import annotations

from ops.steps import base
from tests.unit.ops.steptest import Answers, recorded, run_step

VM: Answers = {
    "systemd-detect-virt": "no",
    "/proc/meminfo": "ram 3911\nswap 0\nfree 15000",
    "sysctl vm.": "vm.overcommit_memory = 0\nvm.swappiness = 60\nkernel.panic = 0",
    "/etc/sysctl.d": "",
    "SubState systemd-timesyncd": "Id=systemd-timesyncd.service\nSubState=dead",
    "UnitFileState systemd-timesyncd": "Id=systemd-timesyncd.service\nUnitFileState=disabled",
}
DONE: Answers = {
    **VM,
    "/proc/meminfo": "ram 3911\nswap 2047\nfree 13000",
    "sysctl vm.": "vm.overcommit_memory = 1\nvm.swappiness = 10\nkernel.panic = 10",
    "SubState systemd-timesyncd": "Id=systemd-timesyncd.service\nSubState=running",
    "UnitFileState systemd-timesyncd": "Id=systemd-timesyncd.service\nUnitFileState=enabled",
}


def test_a_bare_machine() -> None:
    ran = run_step(base.apply, recorded("debian13-bare"))
    install = ran.operations["Install base packages"][1]
    for package in ("unattended-upgrades", "zstd", "systemd-timesyncd"):
        assert f" {package}" in install
    assert " python3 " not in install  # it is there
    upgrades = ran.files["/etc/apt/apt.conf.d/52warmstart-upgrades"]
    assert "label=Debian-Security" in upgrades
    assert "origin=Ubuntu,archive=${distro_codename}-security" in upgrades
    assert "SystemMaxUse=300M" in ran.files["/etc/systemd/journald.conf.d/60-warmstart.conf"]
    assert ran.operations["Bound the journal"][-1] == "systemctl restart systemd-journald"


def test_nothing_to_do_and_no_mirror_asked() -> None:
    ran = run_step(base.apply, recorded("debian13-done"))
    assert ran.operations == {}
    assert not any("apt-get" in command for command in ran.sent)


def test_a_container_keeps_its_hosts_kernel() -> None:
    ran = run_step(base.apply, recorded("debian13-bare"))
    assert not any("sysctl" in command or "swap" in command for command in ran.commands)
    assert "is a container" in ran.notes[0]


def test_a_vm_of_4_gb_gets_swap_and_kernel_settings_and_the_time() -> None:
    ran = run_step(base.apply, {**VM, **recorded("debian13-bare")})
    (swap,) = ran.operations["Add 2048 MB of swap"]
    assert "fallocate -l 2048M /swapfile" in swap
    assert "/etc/fstab" in swap
    assert "vm.overcommit_memory = 1" in ran.files["/etc/sysctl.d/60-warmstart.conf"]
    assert ran.operations["Kernel settings"][-1] == "sysctl -q -p /etc/sysctl.d/60-warmstart.conf"
    assert "systemctl enable systemd-timesyncd.service" in ran.operations["Keep the time"]
    assert ran.notes == []


def test_a_vm_that_has_it_all() -> None:
    ran = run_step(base.apply, {**DONE, **recorded("debian13-done")})
    assert set(ran.operations) <= {"Kernel settings"}  # whose file was not recorded
    assert not any("sysctl -q" in command for command in ran.commands)


def test_no_swap_where_memory_is_plenty() -> None:
    plenty: Answers = {"/proc/meminfo": "ram 7900\nswap 0\nfree 50000"}
    assert "Add 2048 MB of swap" not in run_step(base.apply, {**VM, **plenty, **recorded("debian13-bare")}).operations


def test_no_swap_where_the_disk_is_needed() -> None:
    tight: Answers = {"/proc/meminfo": "ram 3900\nswap 0\nfree 7000"}
    ran = run_step(base.apply, {**VM, **tight, **recorded("debian13-bare")})
    assert "Add 2048 MB of swap" not in ran.operations
    assert "7000 MB free on / are too few" in ran.notes[0]


def test_another_time_server_is_left_alone() -> None:
    chrony: Answers = {"dpkg -l": "ii  chrony  4.6.1-3  amd64  Versatile implementation of NTP"}
    ran = run_step(base.apply, {**chrony, **VM, **recorded("debian13-bare")})
    assert "systemd-timesyncd" not in ran.operations["Install base packages"][1]
    assert "Keep the time" not in ran.operations


def test_a_reboot_that_is_wanted_is_told() -> None:
    ran = run_step(base.apply, {"reboot-required": "yes", **recorded("debian13-done")})
    assert "wants a reboot" in ran.notes[-1]
