"""The machine's figures: what is in them, and that one broken part takes no other with it."""

from __future__ import annotations

import json
import math
import re
import socket
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import Encoding

from ops.vm import disks, metrics
from ops.vm.__main__ import main
from tests.unit.ops.machine import CONTAINERS, Machine, certificate, default_validity, machine, record


@pytest.fixture(name="made")
def made_(tmp_path: Path) -> Machine:
    return machine(tmp_path)


def figures(made: Machine) -> dict[str, float]:
    """By the text of the series."""
    found = {}
    for line in metrics.render(metrics.collect(made)).splitlines():
        if not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            assert series not in found, "Prometheus takes a series once"
            found[series] = float(value)
    return found


def test_containers_are_up_where_they_run_and_are_not_unhealthy(made: Machine) -> None:
    found = figures(made)
    assert found["warmstart_docker_up"] == 1
    assert found['warmstart_container_up{service="api"}'] == 1
    assert found['warmstart_container_up{service="worker"}'] == 0
    assert found['warmstart_container_up{service="embeddings"}'] == 0
    assert found['warmstart_container_restarts_total{service="api"}'] == 2
    # of two of a service, the one that runs
    assert found['warmstart_container_restarts_total{service="worker"}'] == 0


def test_memory_is_read_in_each_of_dockers_units(made: Machine) -> None:
    found = figures(made)
    assert found['warmstart_container_memory_bytes{service="api"}'] == 201.5 * 2**20
    assert found['warmstart_container_memory_limit_bytes{service="worker"}'] == 2 * 2**30
    sizes = "x 812B / 1.5kB\ny 3.25KiB / 2MB\nz 1GB / 1TiB\n"
    assert list(metrics.memory(sizes)) == [("x", 812, 1500), ("y", 3.25 * 1024, 2e6), ("z", 1e9, 2**40)]


def test_without_docker_the_rest_is_written(made: Machine) -> None:
    found = figures(replace(made, docker={}))
    assert found["warmstart_docker_up"] == 0
    assert not any(series.startswith("warmstart_container") for series in found)
    assert found["warmstart_https_up"] == 1
    assert found["warmstart_backup_ok"] == 1


def test_with_nothing_running_docker_is_not_asked_for_its_memory(made: Machine) -> None:
    stopped = [c for c in CONTAINERS if c["State"]["Status"] == "exited"]
    answers = {"ps": "\n".join(c["Id"] for c in stopped), "inspect": json.dumps(stopped)}
    assert figures(replace(made, docker=answers))["warmstart_docker_up"] == 1


def test_the_parts_have_the_names_that_alerts_and_runbooks_know(made: Machine) -> None:
    known = {"disks", "containers", "results", "certificate", "deploy_lock"}
    found = [re.search(r'^warmstart_host_metrics_ok\{part="(\w+)"\}$', series) for series in figures(made)]
    assert {match[1] for match in found if match} == known


def test_disks_are_those_of_the_system_and_of_dockers_folder(made: Machine) -> None:
    assert 'warmstart_host_disk_free_bytes{mount="docker"}' not in figures(made)
    (made.root / disks.DOCKER_DATA).mkdir(parents=True)
    found = figures(made)
    for mount in ("root", "docker"):
        free, size = (found[f'warmstart_host_disk_{kind}_bytes{{mount="{mount}"}}'] for kind in ("free", "size"))
        assert 0 < free < size


def test_the_last_backup_and_drill_and_the_last_good_ones(made: Machine) -> None:
    found = figures(made)
    good = datetime(2026, 11, 29, 3, 17, 30, tzinfo=UTC).timestamp()
    assert found["warmstart_backup_ok"] == 1
    assert found["warmstart_backup_duration_seconds"] == 12.5
    assert found["warmstart_drill_ok"] == 0
    assert found["warmstart_backup_success_timestamp_seconds"] == good
    assert found["warmstart_drill_success_timestamp_seconds"] == good


def test_where_none_was_made_the_time_counts_from_the_first_look(made: Machine) -> None:
    (made.state / "backup.json").unlink()
    before = figures(made)
    assert "warmstart_backup_ok" not in before
    assert before["warmstart_backup_success_timestamp_seconds"] == pytest.approx(time.time(), abs=5)
    since = made.state / metrics.FOLDER / metrics.SINCE_FILE
    since.write_text("1700000000\n")
    assert figures(made)["warmstart_backup_success_timestamp_seconds"] == 1_700_000_000
    record(made, "backup", ok=True)
    assert figures(made)["warmstart_backup_success_timestamp_seconds"] > 1_700_000_000


@pytest.mark.parametrize("text", ["", "{", "[]", '{"ok": true}', '{"ok": true, "last_success": {"at": "yesterday"}}'])
def test_a_record_that_can_not_be_read_is_said_and_takes_nothing_with_it(
    text: str, made: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    (made.state / "drill.json").write_text(text)
    found = figures(made)
    assert found['warmstart_host_metrics_ok{part="results"}'] == 0
    assert found['warmstart_host_metrics_ok{part="certificate"}'] == 1
    assert found["warmstart_docker_up"] == 1
    assert found["warmstart_host_metrics_timestamp_seconds"] == pytest.approx(time.time(), abs=5)
    assert capsys.readouterr().out.startswith("results: ")


# -- the certificate


def test_the_certificate_that_clients_are_shown(made: Machine) -> None:
    found = figures(made)
    not_before, not_after = (moment.timestamp() for moment in default_validity())
    assert found["warmstart_https_up"] == 1
    assert found["warmstart_certificate_not_before_timestamp_seconds"] == not_before
    assert found["warmstart_certificate_not_after_timestamp_seconds"] == not_after


def test_a_port_where_nobody_answers(made: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    (made.etc / "settings.env").write_text(f"DOMAIN=memory.example.com\nHTTPS_PORT={free}\n")
    found = figures(made)
    assert found["warmstart_https_up"] == 0
    assert not any(series.startswith("warmstart_certificate") for series in found)


@pytest.mark.parametrize("year", [1951, 1999, 2026, 2049, 2050, 2150])
def test_validity_is_read_in_both_notations(year: int) -> None:
    begin = datetime(year, 2, 28, 23, 59, 59, tzinfo=UTC)
    made, _ = certificate(begin, begin + timedelta(days=397))
    der = made.public_bytes(Encoding.DER)
    assert metrics.validity(der) == (begin.timestamp(), (begin + timedelta(days=397)).timestamp())


def test_what_is_no_certificate_is_a_value_error() -> None:
    made, _ = certificate(*default_validity())
    der = made.public_bytes(Encoding.DER)
    for bad in (b"", b"0", b"hello world", der[:40], bytes(len(der))):
        with pytest.raises(ValueError):  # noqa: PT011 - of many kinds
            metrics.validity(bad)


# -- the deploy lock


def test_the_deploy_locks_last_sign_of_life(made: Machine) -> None:
    series = "warmstart_deploy_lock_beat_timestamp_seconds"
    lock = made.run_dir / "deploy.lock"
    assert figures(made)[series] == 0
    lock.write_text(json.dumps({"who": "ann@laptop", "beat": 1_764_000_000.5}))
    assert figures(made)[series] == 1_764_000_000.5
    lock.write_text('{"who": "ann')
    assert figures(made)[series] == pytest.approx(lock.stat().st_mtime)


# -- the file


def test_the_text_is_prometheus_own(made: Machine) -> None:
    text = metrics.render([
        ("a_total", "Counted.", {"name": 'quote " backslash \\ line \n'}, 3),
        ("b_seconds", "Measured.", {}, 1_764_000_000.123456),
        ("a_total", "Counted.", {"name": "x"}, True),
    ])  # fmt: skip
    assert text.splitlines() == [
        "# HELP a_total Counted.", "# TYPE a_total counter",
        'a_total{name="quote \\" backslash \\\\ line \\n"} 3', 'a_total{name="x"} 1',
        "# HELP b_seconds Measured.", "# TYPE b_seconds gauge", "b_seconds 1764000000.123456",
    ]  # fmt: skip
    for series, value in figures(made).items():
        assert re.fullmatch(r'[a-z_]+(\{([a-z_]+="[^"]*",?)+\})?', series)
        assert math.isfinite(value)


def test_the_file_is_for_all_to_read_and_never_half_written(made: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARMSTART_VM_ROOT", str(made.root))
    path = made.state / metrics.FOLDER / metrics.FILE
    assert main(["metrics"]) == 0
    first = path.stat()
    assert first.st_mode & 0o777 == 0o644
    assert path.parent.stat().st_mode & 0o777 == 0o755
    with path.open() as reader:
        assert main(["metrics"]) == 0
        assert reader.read().endswith("\n"), "who reads the old file reads all of it"
    assert path.stat().st_ino != first.st_ino
    assert [each.name for each in path.parent.iterdir() if each.name.endswith(".new")] == []
    made_again = path.read_text()
    assert "warmstart_host_metrics_timestamp_seconds" in made_again


def test_printing_them_writes_no_file(
    made: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WARMSTART_VM_ROOT", str(made.root))
    assert main(["metrics", "--print"]) == 0
    assert "warmstart_https_up 1" in capsys.readouterr().out
    assert not (made.state / metrics.FOLDER / metrics.FILE).exists()
