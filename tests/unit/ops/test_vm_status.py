"""What an operator reads of a machine, also of one that is not well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ops.vm import __main__ as program
from ops.vm import disks, status
from ops.vm.disks import Disk
from ops.vm.stack import Container, Stack, VmError

NOW = 1_800_000_000.0
AT = "2027-01-15T07:00:00+00:00"  # an hour before NOW


def container(service: str, **other: Any) -> dict[str, Any]:
    return {
        "service": service, "state": "running", "health": "healthy", "restarts": 0, "exit_code": 0,
        "started_at": "2027-01-15T07:00:00.123456789Z", "release": "2027-a",
        "memory_bytes": 100 * 2**20, "memory_limit_bytes": 512 * 2**20, "detached": False, **other,
    }  # fmt: skip


GOOD: dict[str, Any] = {
    "ok": True,
    "faults": [],
    "release": {"id": "2027-a", "commit": "c0ffee", "who": "ann@laptop", "made": AT, "since": AT, "previous": "2026-z"},
    "deploy": {"at": AT, "who": "ann@laptop", "commit": "c0ffee", "changes": 3},
    "containers": [container("api"), container("worker")],
    "ready": {"status": "ok", "degraded": {}, "slot": "api-b"},
    "queue": {"waiting": 0.0, "failed": 0.0, "age_seconds": 0.0, "compaction_lag_seconds": 100.0},
    "backup": {"ok": True, "at": AT, "seconds": 4.2},
    "drill": None,
    "certificate": {"name": "memory.example.com", "until": "2027-03-15T08:00:00+00:00"},
    "disk": {"mount": "root", "size_bytes": 20e9, "free_bytes": 8e9, "full": False},
    "lock": None,
}


def test_a_machine_that_is_well() -> None:
    text = "\n".join(status.render(GOOD, NOW))
    for words in (
        "service      ok", "2027-a, for 60 min, by ann@laptop; before it 2026-z",
        "ok, by api-b",
        "queue        empty",
        "backup       ok, 60 min ago, in 4 s", "drill        none yet",
        "memory.example.com, good for 59 d",
        "memory       no container is near its limit", "8.0 GB free of 20.0 GB (root)", "nobody deploys",
        "api      running  healthy  60 min  0         100 of 512 MB  2027-a",
    ):  # fmt: skip
        assert words in text


def test_a_machine_that_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    bad = {
        **GOOD, "ok": False, "faults": ["api is exited (137)", "the api does not answer"],
        "containers": [
            container("api", state="exited", health="", exit_code=137, memory_bytes=None, memory_limit_bytes=None)
        ],
        "ready": {"error": "no api runs"},
        "queue": {"waiting": 1200.0, "failed": 3.0, "age_seconds": 7300.0, "compaction_lag_seconds": 720.0},
        "backup": {"ok": False, "at": AT, "seconds": 1, "part": "disk", "reason": "it is full"},
        "certificate": {"name": "memory.example.com", "until": "2027-01-13T08:00:00+00:00"},
        "lock": {"who": "bob@desk", "step": "rollout", "since": NOW - 100, "beat": NOW - 30, "commit": "c0ffee"},
    }  # fmt: skip
    text = "\n".join(status.render(bad, NOW))
    for words in (
        "NOT OK: api is exited (137); the api does not answer", "exited (137) ", "can't be told: no api runs",
        "1200 memories wait for their vector, for up to 2 h, 3 given up, not compacted for 12 min",
        "FAILED 60 min ago, in 1 s: disk: it is full", "RAN OUT 2 d ago",
        "held by bob@desk, at the step rollout, last heard of 30 s ago",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"release": None}, "nothing was rolled out"),
        (
            {"ready": {"status": "degraded", "degraded": {"redis": "down", "postgres": "down"}, "slot": "api"}},
            "the api goes without redis, postgres",
        ),
        ({"ready": {"error": "no api runs"}}, "the api does not answer"),
        ({"containers": {"error": "docker does not answer"}}, "docker does not answer"),
        ({"containers": [container("api", state="restarting")]}, "api is restarting"),
        ({"containers": [container("api", state="exited", exit_code=137)]}, "api is exited (137)"),
        ({"containers": [container("api", health="unhealthy")]}, "api is unhealthy"),
        ({"containers": [container("api", detached=True)]}, "api is on no network"),
        (
            {"certificate": {"error": "timed out"}, "containers": [*GOOD["containers"], container("caddy")]},
            "https does not answer",
        ),
        (
            {"certificate": {"error": "refused"}, "containers": [container("caddy", state="exited", exit_code=1)]},
            "caddy is exited (1)",
        ),
        ({"disk": {**GOOD["disk"], "mount": "memories", "full": True}}, "the disk is full (memories)"),
    ],
)
def test_what_is_wrong_is_said_first(change: dict[str, Any], fault: str) -> None:
    assert status.faults(GOOD) == []
    assert status.faults({**GOOD, **change}) == [fault]


def test_the_disk_that_is_told_of_is_the_fullest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    some = [Disk("root", 1000, 400), Disk("docker", 1000, 49), Disk("memories", 100, 90)]
    monkeypatch.setattr(disks, "disks", lambda stack: iter(some))
    told = {"mount": "docker", "size_bytes": 1000, "free_bytes": 49, "full": True}
    assert status.disk(Stack(tmp_path)) == told


def test_it_can_wait_for_a_machine_that_is_well_and_has_no_queue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = {**GOOD, "queue": {**GOOD["queue"], "waiting": 5.0}}
    seen = [{**GOOD, "ok": False, "faults": ["api is restarting"]}, waiting, GOOD, waiting]
    monkeypatch.setattr(status, "POLL_S", 0.0)
    monkeypatch.setattr(status, "collect", lambda stack: seen.pop(0))
    assert program.main(["status", "--wait", "60"]) == 0
    assert "queue        empty" in capsys.readouterr().out
    assert len(seen) == 1


def test_it_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "POLL_S", 0.0)
    monkeypatch.setattr(status, "collect", lambda stack: {**GOOD, "ok": False, "faults": ["api is restarting"]})
    assert program.main(["status", "--wait", "0.05"]) == 1


def test_what_is_degraded_is_said() -> None:
    ready = {"status": "degraded", "degraded": {"embeddings": "timeout"}, "slot": "api"}
    assert "degraded, by api: degraded (embeddings timeout)" in "\n".join(status.render({**GOOD, "ready": ready}, NOW))


def test_a_bare_machine_says_what_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMSTART_VM_ROOT", str(tmp_path))

    def refuse(self: Stack, *words: Any, **options: Any) -> str:
        raise VmError("Cannot connect to the Docker daemon")

    monkeypatch.setattr(Stack, "run", refuse)
    assert program.main(["status"]) == 1
    text = capsys.readouterr().out
    assert "none was rolled out yet" in text
    assert "containers   can't be told: Cannot connect to the Docker daemon" in text
    assert program.main(["status", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_parts_are_read_from_where_others_write_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(tmp_path)
    release = stack.opt / "releases" / "2027-a"
    release.mkdir(parents=True)
    (release / "manifest.json").write_text(
        json.dumps({"images": {}, "who": "ann@laptop", "when": AT, "commit": "c0ffee"})
    )
    (stack.opt / "current").symlink_to("releases/2027-a")
    stack.state.mkdir(parents=True)
    history = [{"at": AT, "who": who, "commit": "c0ffee", "changes": [{}, {}]} for who in ("ann", "bob")]
    (stack.state / "deploys.jsonl").write_text("".join(json.dumps(line) + "\n" for line in history))
    (stack.state / "backup.json").write_text(json.dumps({"ok": True, "at": AT, "seconds": 3}))
    stack.run_dir.mkdir(parents=True)
    (stack.run_dir / "deploy.lock").write_text(json.dumps({"who": "ann", "token": "hush", "step": "base", "beat": NOW}))
    monkeypatch.setattr(Stack, "run", lambda self, *words, **options: "")
    found = status.collect(stack)
    assert (found["release"]["id"], found["release"]["who"], found["release"]["previous"]) == (
        "2027-a",
        "ann@laptop",
        "",
    )
    assert found["deploy"] == {"at": AT, "who": "bob", "commit": "c0ffee", "changes": 2}
    assert found["backup"]["ok"] is True
    assert found["drill"] is None
    assert "hush" not in json.dumps(found)


def test_the_queue_is_the_workers_word(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Container("c", "c", "worker", "running", "", 0, 0, "", "", "", "", {"backend": "192.0.2.1"})
    monkeypatch.setattr(Stack, "container", lambda self, service: worker)
    from warmstart.metrics import Metrics

    metrics = Metrics()
    metrics.set_queue(7, 1, 12.5)
    metrics.set_compaction_lag(400.0)
    monkeypatch.setattr(status, "_ask", lambda container, port, path: metrics.render().decode())
    assert status.queue(Stack()) == {
        "waiting": 7.0, "failed": 1.0, "age_seconds": 12.5, "compaction_lag_seconds": 400.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"), [(-5, "0 s"), (90, "90 s"), (120, "2 min"), (7200, "2 h"), (200000, "2 d")]
)
def test_spans(seconds: float, text: str) -> None:
    assert status.span(seconds) == text
