from __future__ import annotations

import importlib.util
import json
import os
import stat
import sys
import time
from pathlib import Path

import pytest

from warmstart import home as home_module
from warmstart.errors import ConfigError, ServerUnreachable
from warmstart.home import FORMAT, Holder, Home, ServerInfo, StartRefused, connect, refuse_root

KEY = "ws_sk_" + "k" * 43


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def info(pid: int) -> ServerInfo:
    return ServerInfo("http://127.0.0.1:1", pid, "0.1.0", "2026-01-01T00:00:00+00:00", KEY)


def fake_python(path: Path, script: str) -> str:
    """An interpreter that runs `script` instead of the server."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


def test_a_home_of_a_newer_version_is_refused_and_not_touched(home: Home) -> None:
    home.path.mkdir()
    (home.path / "version").write_text(json.dumps({"format": FORMAT + 1, "written_by": "9.0.0"}))
    for refused in (lambda: home.lock(Holder(1)).__enter__(), home.attach, home.check_version):
        with pytest.raises(StartRefused, match=r"newer Warmstart \(9\.0\.0.*upgrade, or start with another"):
            refused()
    assert [p.name for p in home.path.iterdir()] == ["version"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "1"}', "9.0.0"])
def test_a_version_that_cannot_be_read_is_refused(home: Home, content: str) -> None:
    home.path.mkdir()
    (home.path / "version").write_text(content)
    with pytest.raises(StartRefused, match="can't be read"):
        home.check_version()


def test_one_process_holds_a_home(home: Home) -> None:
    assert home.holder() is None
    assert not home.path.exists()  # looking creates nothing
    mine = Holder(4711, "http://127.0.0.1:8484")
    with home.lock(mine):
        assert home.holder() == mine
        home.check_version()
        with pytest.raises(StartRefused, match=r"in use.*pid 4711, http://127\.0\.0\.1:8484"):
            home.lock(Holder(1), patience_s=0.1).__enter__()
    assert home.holder() is None
    with home.lock(Holder(2)):
        assert home.holder() == Holder(2)


def test_looking_does_not_keep_a_server_from_its_home(home: Home) -> None:
    """Clients look at the lock by taking it for a moment."""
    with home.lock(Holder(1)):
        pass
    fd = os.open(home.path / "server.lock", os.O_RDONLY)
    home_module.fcntl.flock(fd, home_module.fcntl.LOCK_SH)
    home_module.threading.Timer(0.2, os.close, [fd]).start()
    with home.lock(Holder(3)):
        assert home.holder() == Holder(3)


def test_the_server_of_a_home_is_the_one_that_holds_it(home: Home) -> None:
    with home.lock(Holder(7, "http://127.0.0.1:1")):
        assert home.server() is None
        home.publish(info(7))
        assert home.server() == info(7)
        home.publish(info(8))
        assert home.server() is None
        home.publish(info(7))
    assert home.server() is None  # killed: the file is there, the lock is free
    with home.lock(Holder(7)):
        assert home.server() is None  # the killed one's file is gone, though the pid is the same


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"url": 1}', "\0"])
def test_a_broken_server_file_counts_as_none(home: Home, content: str) -> None:
    with home.lock(Holder(7)):
        (home.path / "server.json").write_text(content)
        assert home.server() is None


def test_the_key_in_the_home_is_for_this_account_only(home: Home) -> None:
    with home.lock(Holder(7)):
        home.publish(info(7))
        assert stat.S_IMODE((home.path / "server.json").stat().st_mode) == 0o600
        assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
        assert KEY not in repr(info(7))
        home.withdraw()
        assert not (home.path / "server.json").exists()


def test_a_named_server_wins_and_needs_its_key(home: Home) -> None:
    url = {"WARMSTART_URL": "https://memory.example.com", "WARMSTART_HOME": str(home.path)}
    assert connect(url | {"WARMSTART_API_KEY": KEY}) == (url["WARMSTART_URL"], KEY, False)
    with pytest.raises(ConfigError, match="WARMSTART_API_KEY is not"):
        connect(url)
    assert not home.path.exists()


def test_a_running_server_is_attached_to(home: Home) -> None:
    environ = {"WARMSTART_HOME": str(home.path)}
    with home.lock(Holder(7)):
        home.publish(info(7))
        assert connect(environ) == ("http://127.0.0.1:1", KEY, True)
        own = "ws_sk_" + "o" * 43
        assert connect(environ | {"WARMSTART_API_KEY": own}).api_key == own


def test_a_server_that_does_not_start_is_told_in_its_own_words(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "executable", fake_python(tmp_path / "python", "env > env.txt; echo 'Error: no room' >&2; exit 1")
    )
    monkeypatch.setenv("DATABASE_URL", "postgresql://somebody:secret@elsewhere/theirs")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere/v1")
    monkeypatch.setenv("WARMSTART_ALLOW_ROOT", "True")
    with pytest.raises(ServerUnreachable, match="did not start: no room"):
        home.attach()
    passed_on = dict(line.split("=", 1) for line in (home.path / "env.txt").read_text().splitlines() if "=" in line)
    assert passed_on["WARMSTART_HOME"] == str(home.path)
    assert passed_on["WARMSTART_ALLOW_ROOT"] == "True"
    assert not {"DATABASE_URL", "OPENAI_BASE_URL"} & passed_on.keys()


def test_waiting_for_a_server_ends(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path / "python", "exec sleep 1"))
    began = time.monotonic()
    with pytest.raises(ServerUnreachable, match="did not get ready in time"):
        home.attach(timeout_s=0.3)
    assert time.monotonic() - began < 1


def test_a_client_without_the_server_package_says_what_it_needs(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="WARMSTART_URL"):
        home.attach()


def test_root_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(StartRefused, match="--allow-root"):
        refuse_root(False)
    refuse_root(True)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    refuse_root(False)
