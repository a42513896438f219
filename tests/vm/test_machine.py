"""The test machine is what a provider hands out, and the operator's side is a clean clone."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from containers.stack import wait_until
from ops import inventory, source
from vm import image
from vm.deploys import IMAGES, MakeInventory, Tree, git, working_tree
from vm.machine import Machine, RunMachine


@pytest.fixture(scope="module")
def bare(run_machine: RunMachine) -> Iterator[Machine]:
    with run_machine("bare") as made:
        yield made


def test_it_is_bare(bare: Machine) -> None:
    programs = "sh docker containerd restic nft iptables ufw pip3 git"
    assert bare.ssh(f"for name in {programs}; do command -v $name; done; true").out == "/usr/bin/sh\n"
    assert bare.ssh("python3 -c 'import importlib.metadata as m; print(*m.distributions())'").out.strip() == ""
    assert bare.ssh("apt-config dump APT::Install-Recommends").out.strip() in ("", 'APT::Install-Recommends "1";')
    listening = {line.split()[3] for line in bare.ssh("ss --tcp --listening --numeric --no-header").out.splitlines()}
    # systemd-resolved, which an emulated machine has, answers its neighbours
    assert {where.rpartition(":")[2] for where in listening if not where.startswith("127.")} - {"5355"} == {"22"}
    assert bare.ssh("systemctl --failed --no-legend; systemctl is-system-running").out == "running\n"


@pytest.mark.parametrize("operator", image.OPERATORS)
def test_both_operators_come_in_as_root_and_as_a_user_who_may_sudo(operator: str, bare: Machine) -> None:
    assert bare.ssh("id --user", operator=operator).out == "0\n"
    assert bare.ssh("id --user; sudo -n id --user", user=image.USER, operator=operator).out == "1000\n0\n"


def test_nobody_else_comes_in(bare: Machine, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", stranger], check=True, timeout=30)
    options = [str(stranger) if word == str(image.key("operator")) else word for word in bare.ssh_options()]
    done = subprocess.run(
        ["ssh", *options, "root@127.0.0.1", "true"], capture_output=True, text=True, timeout=30 * bare.patience
    )
    assert done.returncode == 255
    assert "Permission denied" in done.stderr


def test_a_service_is_reached_from_outside_where_it_listens_for_others(bare: Machine) -> None:
    assert bare.answers(22)
    assert not bare.answers(80)
    unit = "systemd-run --quiet --collect --unit=probe-{port} python3 -m http.server {port} --directory /etc/apt {bind}"
    bare.ssh(unit.format(port=80, bind=""))
    bare.ssh(unit.format(port=8081, bind=""))
    bare.ssh(unit.format(port=8082, bind="--bind 127.0.0.1"))
    for port in (80, 8081, 8082):
        bare.ssh(f"until curl -sf http://127.0.0.1:{port}/ >/dev/null; do sleep 0.1; done", timeout_s=20)
    assert "sources.list" in httpx.get(f"http://127.0.0.1:{bare.ports[80]}/", trust_env=False, timeout=20).text
    assert [bare.answers(port) for port in (80, 8081, 8082)] == [True, True, False]
    bare.ssh("systemctl stop probe-80 probe-8081 probe-8082")
    wait_until("it is gone", lambda: not bare.answers(80))


@pytest.mark.slow
def test_what_is_on_it_stays_over_reboot_power_cut_and_shutdown(bare: Machine) -> None:
    bare.ssh(
        "echo kept > /etc/kept; echo lost > /run/lost; ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub > /root/host"
    )
    boots = {bare.boot}
    bare.reboot()
    boots.add(bare.boot)
    bare.ssh("sync")
    bare.cut_power()
    bare.start()
    boots.add(bare.boot)
    bare.stop()
    bare.start()
    boots.add(bare.boot)
    assert len(boots) == 4
    assert bare.ssh("cat /etc/kept").out == "kept\n"
    assert bare.ssh("test -e /run/lost", check=False).code == 1
    assert bare.ssh("ssh-keygen -lf /etc/ssh/ssh_host_ed25519_key.pub | diff - /root/host").code == 0


def test_a_copy_arrives_whole(bare: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a file").write_bytes(bytes(range(256)))
    bare.copy(folder, "/root/")
    assert bare.ssh("cat '/root/folder/a file' | od -An -tu1 | tr -s ' \\n' ' '").out.split() == [
        str(n) for n in range(256)
    ]


def test_another_machine_is_another_host(bare: Machine, fresh_machine: Callable[[str], Machine]) -> None:
    other = fresh_machine("other")
    question = "cat /etc/machine-id /etc/ssh/ssh_host_ed25519_key.pub"
    ours, theirs = (set(m.ssh(question).out.split()) for m in (bare, other))
    assert ours & theirs <= {"ssh-ed25519", "root@warmstart-vm"}


# -- the operator's side


def test_a_tree_has_what_is_not_committed_and_nothing_that_is_ignored(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    for name in ("changed", "deleted", "kept"):
        (project / name).write_text("before")
    (project / ".gitignore").write_text("ignored\n")
    git(project, "init", "--quiet", "--initial-branch", "main")
    Tree(project).commit()
    (project / "changed").write_text("after")
    (project / "deleted").unlink()
    (project / "ignored").touch()
    (project / "a new folder").mkdir()
    (project / "a new folder" / "ü").write_text("new")
    (project / "run").symlink_to("kept")

    one, other = (working_tree(tmp_path / name, project) for name in ("one", "other"))
    files = sorted(git(one.path, "ls-files", "-z").strip("\0").split("\0"))
    assert files == [".gitignore", "a new folder/ü", "changed", "kept", "run"]
    assert (one.path / "changed").read_text() == "after"
    assert one.commit_id == other.commit_id == one.clone(tmp_path / "clone").commit_id
    assert git(one.path, "status", "--porcelain") == ""
    assert git(project, "status", "--porcelain") != ""


def test_ops_takes_the_clone_and_the_inventory(
    bare: Machine, tree: Tree, clone: Callable[[], Tree], make_inventory: MakeInventory
) -> None:
    cloned = clone()
    assert source.committed(cloned.path).commit == tree.commit_id
    (cloned.path / "README.md").write_text("changed")
    with pytest.raises(source.SourceError):
        source.committed(cloned.path)

    target = inventory.load(make_inventory(bare, operator="second", settings={"RATE_LIMIT_PER_MINUTE": "6000"}))
    assert (target.host, target.ssh_port, target.image_overrides) == ("127.0.0.1", bare.ports[22], IMAGES)
    assert target.settings == {"RATE_LIMIT_PER_MINUTE": "6000"}
