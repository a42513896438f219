"""One service started anew, and a migration by settings that are not in use yet: what is asked of docker."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ops.vm import dimension, restart
from ops.vm.__main__ import main
from ops.vm.changes import Wanted, missing
from ops.vm.stack import Container, Release, Stack
from warmstart.config import load


@dataclass(frozen=True)
class Recorded(Stack):
    """With these containers, and what docker was told."""

    found: list[Container] = field(default_factory=list)
    told: list[str] = field(default_factory=list)

    def current(self) -> Release | None:
        return Release("2027-a", self.root)

    def containers(self, service: str = "") -> list[Container]:
        return [c for c in self.found if service in ("", c.service)]

    def inspect(self, container_id: str) -> Container | None:
        return next((c for c in self.found if c.id == container_id), None)

    def run(self, command: Sequence[str], *, stdin: str | None = None, timeout_s: float = 0) -> str:
        self.told.append(" ".join(command))
        if "--detach" in command:
            self.found.append(container(command[-1]))
        return "api\nworker\nredis\n" if command[-1] == "--services" else ""

    def log(self, container: Container, lines: int = 40) -> str:
        return "its last words\n"


def container(service: str, state: str = "running", restarts: int = 0, *, detached: bool = False) -> Container:
    addresses = {} if detached else {"backend": "172.30.84.3"}
    return Container(f"{service}-id", service, service, state, "", 1, restarts, "", "", "", "", addresses)


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    made = Recorded(tmp_path)
    monkeypatch.setattr(Stack, "from_environment", lambda: made)
    monkeypatch.setattr(
        restart, "wanted", lambda stack, release: dict.fromkeys(("api", "api-b", "worker"), Wanted("", ""))
    )
    return made


def test_a_deploy_sees_that_one_runs_on_no_network() -> None:
    assert Wanted("", "").difference(container("worker", detached=True)) == "on no network"
    assert not Wanted("", "").difference(container("worker"))


def test_one_that_runs_on_no_network_is_made_anew(stack: Recorded) -> None:
    """A start alone would leave it there, and Compose sees no difference."""
    stack.found.append(container("worker", detached=True))
    assert main(["restart", "worker"]) == 0
    assert [words for words in stack.told if " up " in words and words.endswith("--force-recreate worker")]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("exited", ["docker restart worker-id"]),
        ("running", ["docker restart worker-id"]),
        ("paused", ["docker unpause worker-id", "docker restart worker-id"]),
    ],
)
def test_a_container_starts_anew_also_one_that_hangs(
    stack: Recorded, state: str, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack.found.append(container("worker", state))
    monkeypatch.setattr(Recorded, "inspect", lambda self, container_id: container("worker"))
    assert main(["restart", "worker"]) == 0
    assert stack.told == told


def test_a_missing_one_is_made(stack: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restart", "worker"]) == 0
    assert stack.told[-1].endswith("up --detach --no-deps --no-build --pull never --force-recreate worker")
    assert "worker: made" in capsys.readouterr().out


def test_the_api_is_the_slot_that_has_the_traffic(stack: Recorded) -> None:
    stack.found.extend([container("api"), container("api-b")])
    stack.traffic_flag.parent.mkdir(parents=True)
    stack.traffic_flag.touch()
    assert main(["restart", "api"]) == 0
    assert stack.told == ["docker restart api-b-id"]


def test_one_that_does_not_stay_up_is_told_with_its_last_words(
    stack: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.found.append(container("worker", "restarting"))
    assert main(["restart", "worker"]) == 1
    out, error = capsys.readouterr()
    assert "  its last words" in out
    assert "does not stay up" in error


def test_an_unknown_service_is_refused(stack: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restart", "cellar"]) == 2
    assert "there are api, api-b, worker" in capsys.readouterr().err
    assert stack.told == []


def test_what_is_missing_is_found_by_the_slot_that_serves(stack: Recorded) -> None:
    stack.found.extend([container("api"), container("redis", "exited")])
    assert missing(stack, {c.service: c for c in stack.found}) == ["worker"]
    stack.traffic_flag.parent.mkdir(parents=True)
    stack.traffic_flag.touch()
    assert missing(stack, {c.service: c for c in stack.found}) == ["api-b", "worker"]


# -- a migration of vectors


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ("EMBEDDING_DIM=512\n", [], "--to 512"),
        ('EMBEDDING_DIM="256"\n', ["--plan"], "--to 256 --plan"),
        ("RESIDENT_MB=1\n", [], f"--to {load({}).embedding_dim}"),
        ("EMBEDDING_DIM=512\n", ["--rollback"], "--rollback"),
    ],
)
def test_vectors_are_migrated_by_the_settings_that_are_to_come(
    stack: Recorded, settings: str, arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def show(self: Stack, command: Sequence[str]) -> int:
        file = Path(command[command.index("--env-file") + 1])
        seen.append((" ".join(command), file.read_text(), file.stat().st_mode & 0o777))
        return 3

    monkeypatch.setattr(Stack, "show", show)
    monkeypatch.setattr(sys, "stdin", io.StringIO(settings))
    assert main(["migrate-dimension", *arguments]) == 3
    [(command, text, mode)] = seen
    assert command.endswith(f"run --rm --no-deps --no-TTY api migrate dimension {words}")
    assert (text, mode) == (settings, 0o600)
    assert not (stack.run_dir / "dimension.env").exists()
    assert str(load({}).embedding_dim) == dimension.DEFAULT_DIM
