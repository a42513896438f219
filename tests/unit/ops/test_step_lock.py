"""The deploy lock, whose scripts are run by a real shell on real files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from ops.facts import Remote
from ops.inventory import Target
from ops.runner import Deploy, Refused
from ops.source import Source
from ops.steps import lock

THE_OTHER = {"who": "bob@desk", "machine": "another", "pid": 1, "since": 1795999000, "step": "images", "token": "x"}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def here(command: str, *, stdin: str = "", timeout: int = 0) -> Remote:
        done = subprocess.run(["sh", "-c", command], input=stdin, capture_output=True, text=True, timeout=30)
        return Remote(done.returncode == 0, done.stdout.rstrip("\n"), done.stderr)

    file = tmp_path / "run" / "deploy.lock"
    monkeypatch.setattr(lock, "remote", here)
    monkeypatch.setattr(lock, "LOCK", str(file))
    return file


def deploy(*, break_lock: bool = False) -> Deploy:
    target = Target(host="203.0.113.10", address="203.0.113.10")
    return Deploy(target, Source(Path(), "c0ffee", "ann@laptop"), break_lock=break_lock, say=lambda line: None)


def held_by(path: Path, **changes: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(THE_OTHER | {"beat": time.time()} | changes))


def test_it_says_who_and_goes_on_saying_where(path: Path) -> None:
    mine = deploy()
    lock.apply(mine)
    assert json.loads(path.read_text())["who"] == "ann@laptop"
    lock.beat(mine, "docker")
    held = json.loads(path.read_text())
    assert held["step"] == "docker"
    assert held["beat"] > held["since"]
    lock.release(mine)
    assert not path.exists()


def test_a_second_deploy_is_refused_with_who_and_the_way_out(path: Path) -> None:
    held_by(path, beat=time.time() - 300)
    with pytest.raises(Refused) as refused:
        lock.apply(deploy())
    said = str(refused.value)
    assert "bob@desk, since 2026-11-30 00:36 UTC, at the step images, last heard of 5 min ago" in said
    assert "Wait until it is done" in said
    assert "make deploy BREAK_LOCK=yes" in said
    lock.release(deploy())
    assert json.loads(path.read_text())["who"] == "bob@desk"


def test_a_stale_lock_is_explained(path: Path) -> None:
    held_by(path, beat=time.time() - 7200)
    with pytest.raises(Refused, match=r"last heard of 120 min ago\. Silent for so long, it was probably killed"):
        lock.apply(deploy())


@pytest.mark.parametrize("content", ["", "garbage", "[1]", '{"who": 7'])
def test_a_lock_that_is_not_readable(path: Path, content: str) -> None:
    held_by(path)
    path.write_text(content)
    if content:
        with pytest.raises(Refused, match="nobody knows who"):
            lock.apply(deploy())
    lock.apply(deploy(break_lock=True))
    assert json.loads(path.read_text())["who"] == "ann@laptop"


def test_a_lock_is_broken_on_demand_and_its_deploy_stops(path: Path) -> None:
    mine = deploy()
    lock.apply(mine)
    held_by(path)
    with pytest.raises(Refused, match=r"was broken; the machine is held by bob@desk"):
        lock.beat(mine, "rollout")
    lock.apply(deploy(break_lock=True))
    lock.beat(mine, "rollout")


def test_a_killed_deploy_of_this_machine_is_no_obstacle(path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    held_by(path, machine=lock.machine(), pid=gone.pid)
    lock.apply(deploy())
    assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_living_deploy_of_this_machine_is_one(path: Path) -> None:
    held_by(path, machine=lock.machine(), pid=os.getppid())
    with pytest.raises(Refused):
        lock.apply(deploy())


def test_a_sign_of_life_between_the_look_and_the_takeover_keeps_the_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_by(path)

    def beat_meanwhile(held: dict[str, Any]) -> bool:
        held_by(path, step="smoke")
        return True

    monkeypatch.setattr(lock, "_dead_here", beat_meanwhile)
    with pytest.raises(Refused, match="at the step smoke"):
        lock.apply(deploy())


def test_of_many_at_once_one_gets_it(path: Path) -> None:
    tokens = [uuid.uuid4().hex for _ in range(8)]
    racers = []
    for token in tokens:
        command = ["sh", "-c", lock.TAKE.format(lock=path, token=token, seen="")]
        racer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        # at once: whichever is the first to hold the guard reads it to the end
        assert racer.stdin is not None
        racer.stdin.write(json.dumps({"token": token}))
        racer.stdin.close()
        racers.append(racer)
    said = []
    for racer in racers:
        assert racer.stdout is not None
        said.append(racer.stdout.read())
        racer.stdout.close()
        assert racer.wait(30) == 0
    (winner,) = [token for token, found in zip(tokens, said, strict=True) if not found]
    assert json.loads(path.read_text())["token"] == winner
    assert {json.loads(found)["token"] for found in said if found} == {winner}


def test_a_plan_takes_no_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held_by(path)
    monkeypatch.setattr(lock, "READ", f"cat {path}")
    looking = deploy()
    looking.dry = True
    lock.apply(looking)
    assert "A deploy is under way: bob@desk" in looking.notes[0]
    assert json.loads(path.read_text())["who"] == "bob@desk"
