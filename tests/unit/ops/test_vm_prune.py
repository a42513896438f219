"""What goes, and above all what does not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ops.vm import prune
from ops.vm.stack import Container, Stack, VmError

REDIS = "redis:8.1-alpine@sha256:aaa"


@dataclass(frozen=True)
class Recorded(Stack):
    """Answers for Docker: images by name, and the containers' mounts."""

    there: dict[str, str] = field(default_factory=dict)
    used: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    ran: list[list[str]] = field(default_factory=list)
    stubborn: str = ""

    def run(self, command: Sequence[str], **options: Any) -> str:
        words = list(command)
        self.ran.append(words)
        match words[1:3]:
            case ["image", "ls"]:
                return "\n".join(name for name in self.there if name.startswith(prune.OURS))
            case ["image", "inspect"]:
                if words[-1] not in self.there:
                    raise VmError("No such image")
                return self.there[words[-1]] + "\n"
            case ["image", "rm"] if words[-1] == self.stubborn:
                raise VmError("`docker image rm` ended with 1:\nimage is being used")
            case ["inspect", _]:
                return "\n".join(self.mounts)
        return ""

    def containers(self, service: str = "") -> list[Container]:
        return [
            Container(f"c{i}", f"c{i}", "api", "running", "", 0, 0, "", image, "", "", {})
            for i, image in enumerate(self.used)
        ]


def lay(stack: Stack, release: str, *images: str) -> None:
    folder = stack.opt / "releases" / release
    folder.mkdir(parents=True)
    found = {f"s{i}": {"name": name, "id": f"id-{name}"} for i, name in enumerate(images)}
    (folder / "manifest.json").write_text(json.dumps({"release": release, "images": found}))


def app(number: int) -> str:
    return f"warmstart/app:{number}"


@pytest.fixture
def stack(tmp_path: Path) -> Recorded:
    """Seven releases, the sixth current, the second previous; all but the first have the same Redis."""
    there = {app(i): f"id-{app(i)}" for i in range(1, 8)} | {
        "warmstart/caddy:1": "id-warmstart/caddy:1",
        REDIS: f"id-{REDIS}",
    }
    made = Recorded(tmp_path, there={**there, "someone/else:1": "id-else"})
    lay(made, "2026-1", app(1), REDIS, "warmstart/caddy:1")
    for i in range(2, 8):
        lay(made, f"2026-{i}", app(i), "warmstart/caddy:1")
    (made.opt / "current").symlink_to("releases/2026-6")
    (made.opt / "previous").symlink_to("releases/2026-2")
    return made


def test_the_current_the_previous_and_three_more_stay(stack: Recorded) -> None:
    found = prune.find(stack)
    assert [release.id for release in found.releases] == ["2026-3", "2026-1"][::1]
    assert found.images == [*sorted(["redis@sha256:aaa", app(1), app(3)])]


def test_an_image_that_a_container_has_stays(stack: Recorded) -> None:
    in_use = Recorded(stack.root, there=stack.there, used=(f"id-{app(3)}",))
    assert app(3) not in prune.find(in_use).images


def test_one_id_under_two_names_stays_while_one_is_used(stack: Recorded) -> None:
    same = Recorded(stack.root, there={**stack.there, "warmstart/app:twin": f"id-{app(6)}"})
    assert "warmstart/app:twin" not in prune.find(same).images


def test_ours_that_no_release_names_any_more_go(stack: Recorded) -> None:
    more = Recorded(stack.root, there={**stack.there, "warmstart/app:left": "id-left"})
    assert "warmstart/app:left" in prune.find(more).images
    assert "someone/else:1" not in prune.find(more).images


def test_before_the_first_roll_out_nothing_goes(stack: Recorded) -> None:
    (stack.opt / "current").unlink()
    assert prune.find(stack).lines == []


def test_models_that_nobody_uses(stack: Recorded) -> None:
    stack.etc.mkdir(parents=True)
    (stack.etc / "settings.env").write_text("MODEL_DIR=/var/lib/warmstart/model/new\n")
    for name in ("new", ".new.part", "old", "mounted", ".gone.part"):
        (stack.state / "model" / name).mkdir(parents=True)
    mounted = Recorded(stack.root, there=stack.there, used=("x",), mounts=(str(stack.state / "model" / "mounted"),))
    assert [path.name for path in prune.find(mounted).models] == [".gone.part", "old"]


def test_what_is_removed_is_gone_and_the_rest_is_there(stack: Recorded) -> None:
    said: list[str] = []
    prune.remove(stack, prune.find(stack), said.append)
    assert {release.id for release in stack.releases()} == {"2026-2", "2026-4", "2026-5", "2026-6", "2026-7"}
    removed = [words[-1] for words in stack.ran if words[1:3] == ["image", "rm"]]
    assert removed == sorted(["redis@sha256:aaa", app(1), app(3)])
    assert not [
        words
        for words in stack.ran
        if words[:3] == ["docker", "system", "prune"] or (words[2:3] == ["prune"] and words[1] != "builder")
    ]
    assert [words for words in stack.ran if words[1:3] == ["builder", "prune"]]


def test_one_that_cant_go_keeps_nobody_else(stack: Recorded) -> None:
    stubborn = Recorded(stack.root, there=stack.there, stubborn=app(1))
    said: list[str] = []
    prune.remove(stubborn, prune.find(stubborn), said.append)
    assert f"image {app(1)} stays: image is being used" in said
    assert f"image {app(3)} removed" in said
