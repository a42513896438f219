"""Secrets are made once, kept for later operators, and nowhere to be read but in their file."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops.vm import __main__ as program
from ops.vm import rotate, secrets
from ops.vm.stack import Refused, Release, Stack, VmError

Run = Callable[..., int]


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stack:
    monkeypatch.setenv("WARMSTART_VM_ROOT", str(tmp_path))
    return Stack(tmp_path)


@pytest.fixture
def run(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Run:
    def run_(*words: str, **wanted: Any) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(wanted) if wanted else ""))
        return program.main(["secrets", *words])

    return run_


def values(stack: Stack) -> dict[str, str]:
    return secrets.read(stack.etc / secrets.FILE)


def test_all_are_made_and_are_roots_alone(run: Run, stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    found = values(stack)
    assert set(found) == {*secrets.MADE, "DATABASE_URL"}
    assert all(re.fullmatch("[0-9a-f]{48}", found[name]) for name in secrets.MADE)
    assert len(set(found.values())) == len(found)
    assert found["DATABASE_URL"] == f"postgresql://warmstart:{found['POSTGRES_PASSWORD']}@postgres:5432/warmstart"
    assert (stack.etc / secrets.FILE).stat().st_mode & 0o777 == 0o600
    assert stack.etc.stat().st_mode & 0o777 == 0o700
    said = capsys.readouterr()
    assert not any(value in said.out + said.err for value in found.values())


def test_a_second_time_nothing_is_made(run: Run, stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    run()
    before, written = values(stack), (stack.etc / secrets.FILE).stat().st_ino
    run("--pending")
    assert capsys.readouterr().out.splitlines()[-1] == ""
    run()
    assert values(stack) == before
    assert (stack.etc / secrets.FILE).stat().st_ino == written


def test_one_that_is_lost_is_made_again_and_the_others_stay(run: Run, stack: Stack) -> None:
    run()
    before = values(stack)
    (stack.etc / secrets.FILE).write_text(secrets.render({n: v for n, v in before.items() if n != "REDIS_PASSWORD"}))
    run()
    after = values(stack)
    assert [name for name in after if after[name] != before[name]] == ["REDIS_PASSWORD"]


def test_given_ones_are_kept_for_an_operator_who_has_none(run: Run, stack: Stack) -> None:
    dsn = "postgresql://ann:p%40ss@db.example.com/x?sslmode=require"
    run(given={"DATABASE_URL": dsn}, must_be_given=["DATABASE_URL"])
    run(must_be_given=["DATABASE_URL"])
    assert values(stack)["DATABASE_URL"] == dsn
    run()  # also of one whose inventory forgot it
    assert values(stack)["DATABASE_URL"] == dsn


def test_pending_names_what_would_be_written_and_writes_nothing(
    run: Run, stack: Stack, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--pending", given={"DATABASE_URL": "postgresql://secret@db/x"})
    assert capsys.readouterr().out.split() == sorted(["DATABASE_URL", *secrets.MADE])
    assert not (stack.etc / secrets.FILE).exists()


def test_one_that_cant_be_made_is_asked_for(run: Run, stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(must_be_given=["OPENAI_API_KEY"]) == 2
    assert "OPENAI_API_KEY: of another service" in capsys.readouterr().err
    assert not (stack.etc / secrets.FILE).exists()


@pytest.mark.parametrize("text", ["{", '["a"]', '{"given": "hush-hush"}'])
def test_what_is_no_json_is_not_said_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert program.main(["secrets"]) == 2
    assert "hush" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "value", ["a b", "a#b", "$HOME", 'say "x"', "back\\slash", "postgresql://a:b@c/d?e=f", "ünïcode"]
)
def test_the_file_reads_back_as_it_was_written(value: str, tmp_path: Path) -> None:
    secrets.write(tmp_path / "x.env", secrets.render({"A": value, "B": "2"}))
    assert secrets.read(tmp_path / "x.env") == {"A": value, "B": "2"}


@pytest.mark.parametrize("value", ["it's", "two\nlines", "end\\"])
def test_what_the_file_cant_hold_is_refused_unsaid(value: str) -> None:
    with pytest.raises(Refused) as refused:
        secrets.render({"A": value})
    assert value not in str(refused.value)


class TestRotate:
    @pytest.fixture
    def known(self, run: Run, stack: Stack) -> dict[str, str]:
        run()
        return values(stack)

    @pytest.mark.parametrize(
        ("words", "reason"), [(["PATH"], "can't be made here"), (["OPENAI_API_KEY"], "came from an operator")]
    )
    def test_what_is_not_its_own_is_refused(
        self, run: Run, stack: Stack, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(given={"OPENAI_API_KEY": "sk-theirs"})
        assert run("rotate", *words) == 2
        assert reason in capsys.readouterr().err
        assert values(stack)["OPENAI_API_KEY"] == "sk-theirs"

    def test_nothing_runs_yet(self, run: Run, known: dict[str, str], stack: Stack) -> None:
        assert run("rotate") == 2
        assert values(stack) == known

    @pytest.mark.parametrize("passes", [True, False])
    def test_the_file_and_the_database_agree_whether_or_not_it_passes(
        self, stack: Stack, known: dict[str, str], passes: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The roll-out itself has tests of its own; here it passes or fails."""
        told: list[str] = []
        release = Release("r1", stack.opt)
        monkeypatch.setattr(Stack, "current", lambda self: release)
        monkeypatch.setattr(Stack, "exec", lambda self, *words, stdin: told.append(stdin))
        monkeypatch.setattr(Stack, "run", lambda self, *words: "")
        monkeypatch.setattr(rotate.Apps, "own_postgres", True)
        roll_outs: list[dict[str, str]] = []

        class RollOut:
            def __init__(self, *given: Any) -> None: ...

            def services(self) -> None: ...

            def rollout(self) -> None:
                roll_outs.append(values(stack))
                if not passes and len(roll_outs) == 1:
                    raise VmError("undone: r1 serves")

        monkeypatch.setattr(rotate, "RollOut", RollOut)
        if passes:
            rotate.rotate(stack, known, ["POSTGRES_PASSWORD", "REDIS_PASSWORD"])
        else:
            with pytest.raises(VmError, match="the old secrets are in use"):
                rotate.rotate(stack, known, ["POSTGRES_PASSWORD", "REDIS_PASSWORD"])
        after = values(stack)
        changed = {name for name in known if known[name] != roll_outs[0][name]}
        assert changed == {"POSTGRES_PASSWORD", "REDIS_PASSWORD", "DATABASE_URL"}
        assert (after == known) is not passes
        assert told[-1] == f"ALTER USER warmstart PASSWORD '{after['POSTGRES_PASSWORD']}';\n"
        assert after["POSTGRES_PASSWORD"] in after["DATABASE_URL"]
