"""The embedded server: what it leaves behind, and what it does when its owner is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from warmstart import postgres as module
from warmstart.errors import ConfigError
from warmstart.postgres import EmbeddedPostgres, running_dsn

OWNER = """
import asyncio, sys
from pathlib import Path
from warmstart.postgres import EmbeddedPostgres
async def main():
    server = EmbeddedPostgres(Path(sys.argv[1]))
    await server.start()
    print("up", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def run(dsn: str, statement: str) -> list[tuple[object, ...]]:
    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as conn:
        cursor = await conn.execute(statement.encode())
        return await cursor.fetchall() if cursor.description else []


async def test_data_survives_and_everything_is_private(scratch: Path) -> None:
    server = EmbeddedPostgres(scratch / "private" / "pg")
    (scratch / "private").mkdir(mode=0o700)
    first = await server.start()
    try:
        assert await run(first, "SELECT current_setting('server_encoding'), datcollate FROM pg_database LIMIT 1") == [
            ("UTF8", "C")
        ]
        assert await run(first, "SHOW fsync") == [("on",)]
        await run(first, "CREATE TABLE kept AS SELECT 1 AS n")
        assert running_dsn(server.data_dir) == first
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in server.data_dir.iterdir()}
        assert {modes[n] for n in ("data", "s")} == {0o700}
        assert {modes[n] for n in ("password", "dsn", "lock")} == {0o600}
        assert stat.S_IMODE(server.data_dir.parent.stat().st_mode) == 0o700  # not opened for anybody
        with pytest.raises(psycopg.OperationalError, match="password"):
            await run(first.replace(":" + (server.data_dir / "password").read_text(), ":wrong"), "SELECT 1")
    finally:
        await server.stop()
    assert server.processes() == []
    assert running_dsn(server.data_dir) is None
    second = await server.start()
    try:
        assert second == first
        assert await run(second, "SELECT n FROM kept") == [(1,)]
    finally:
        await server.stop()


async def test_a_second_owner_is_refused_in_one_line(scratch: Path) -> None:
    server = EmbeddedPostgres(scratch / "pg")
    dsn = await server.start()
    try:
        with pytest.raises(ConfigError, match="in use by another running process"):
            await EmbeddedPostgres(scratch / "pg").start()
        assert await run(dsn, "SELECT 1") == [(1,)]
    finally:
        await server.stop()


@pytest.fixture
def owner(scratch: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs the server of scratch/pg."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(scratch / "pg")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    yield process
    process.kill()
    process.communicate()


async def test_it_ends_cleanly_with_a_killed_owner(scratch: Path, owner: subprocess.Popen[str]) -> None:
    server = EmbeddedPostgres(scratch / "pg")
    dsn = running_dsn(server.data_dir)
    assert dsn is not None
    await run(dsn, "CREATE TABLE kept AS SELECT 1 AS n")
    assert len(server.processes()) > 1
    owner.kill()
    if sys.platform == "linux":
        deadline = time.monotonic() + 10
        for _ in iter(server.processes, []):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
    try:
        assert await run(await server.start(), "SELECT n FROM kept") == [(1,)]
    finally:
        await server.stop()
    assert "database system was not properly shut down" not in (scratch / "pg" / "postgres.log").read_text()


async def test_a_start_ends_what_a_killed_owner_and_postmaster_left(
    scratch: Path, owner: subprocess.Popen[str]
) -> None:
    server = EmbeddedPostgres(scratch / "pg")
    processes = server.processes()
    postmaster = int((server.data_dir / "data" / "postmaster.pid").read_text().split()[0])
    frozen = next(pid for pid in processes if pid != postmaster)
    os.kill(frozen, signal.SIGSTOP)  # it can't notice that it should end, and keeps the shared memory
    os.kill(postmaster, signal.SIGKILL)
    owner.kill()
    owner.wait()
    try:
        dsn = await server.start()
        assert frozen not in server.processes()
        assert await run(dsn, "SELECT 1") == [(1,)]
    finally:
        await server.stop()


async def test_a_stale_pid_file_of_a_process_that_is_another_by_now(scratch: Path) -> None:
    server = EmbeddedPostgres(scratch / "pg")
    await server.start()
    for pid in server.processes():
        os.kill(pid, signal.SIGKILL)
    pid_file = server.data_dir / "data" / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    await server.stop()
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]) + "\n")
    await server.start()
    await server.stop()


async def test_an_interrupted_setup_is_done_again(scratch: Path) -> None:
    half = scratch / "pg" / "data.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    server = EmbeddedPostgres(scratch / "pg")
    try:
        assert await run(await server.start(), "SELECT 1") == [(1,)]
    finally:
        await server.stop()


async def test_a_cluster_of_another_version_is_refused_untouched(scratch: Path) -> None:
    data = scratch / "pg" / "data"
    data.mkdir(parents=True)
    (data / "PG_VERSION").write_text("12\n")
    with pytest.raises(ConfigError, match="was made by Postgres 12"):
        await EmbeddedPostgres(scratch / "pg").start()
    assert [p.name for p in data.iterdir()] == ["PG_VERSION"]


async def test_a_fault_of_the_configuration_is_told_in_the_servers_words(scratch: Path) -> None:
    server = EmbeddedPostgres(scratch / "pg")
    await server.start()
    await server.stop()
    (server.data_dir / "data" / "postgresql.auto.conf").write_text("no_such_setting = 1\n")
    with pytest.raises(ConfigError, match=r"did not start in .*: .*FATAL"):
        await server.start()
    assert server.processes() == []


async def test_a_long_path_gets_its_socket_elsewhere(scratch: Path) -> None:
    server = EmbeddedPostgres(scratch / ("long" * 20) / ("path" * 10))
    try:
        dsn = await server.start()
        assert await run(dsn, "SELECT 1") == [(1,)]
        elsewhere = server._socket_dir
        assert elsewhere is not None
        assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700
    finally:
        await server.stop()
    assert not elsewhere.exists()


def test_the_log_is_bounded(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOG_BYTES", 10_000)
    log = scratch / "postgres.log"
    read, write = os.pipe()
    pump = module.threading.Thread(target=module._pump_log, args=(os.fdopen(read, "rb"), log))
    pump.start()
    for i in range(2_000):
        os.write(write, f"line {i} {'x' * 40}\n".encode())
    os.close(write)
    pump.join()
    kept = sum(p.stat().st_size for p in scratch.iterdir())
    assert kept <= 2 * 10_000 + 65_536
    assert log.read_text().endswith(f"line 1999 {'x' * 40}\n")
