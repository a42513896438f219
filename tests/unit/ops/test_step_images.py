"""Which images go to the VM, against what its engine and this machine's answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops import images
from ops.release import Release
from ops.runner import Deploy
from ops.steps import images as step
from tests.unit.ops import tree
from tests.unit.ops.steptest import Answers, Ran, run_step
from tests.unit.ops.test_images import image

NAMES = ("app", "caddy", "embeddings", "postgres", "redis")
OVERRIDES = {name: f"here/{name}:1" for name in NAMES}
BARE: Answers = {": images on the machine": ""}


def engine(*there: dict[str, Any], status: str = '[["Backing Filesystem","extfs"]]', arch: str = "amd64") -> Answers:
    return {": images on the machine": [arch, status, *(json.dumps(each) for each in there)]}


@pytest.fixture
def source(tmp_path: Path) -> Any:
    return tree.make(tmp_path)


@pytest.fixture
def run(source: Any) -> Callable[..., tuple[Ran, Release]]:
    def run_(answers: Answers, **fields: Any) -> tuple[Ran, Release]:
        made: list[Release] = []

        def apply(deploy: Deploy) -> None:
            deploy.source = source
            step.apply(deploy)
            made.append(deploy.release)

        return run_step(apply, answers, **fields), (made or [Release()])[0]

    return run_


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """The images of this machine."""
    found = {name: image(["base", name], tag) for name, tag in OVERRIDES.items()}
    by_tag = {OVERRIDES[name]: each for name, each in found.items()}
    monkeypatch.setattr(images, "inspect", by_tag.get)
    return found


def on_vm(component: str, found: dict[str, Any], **other: Any) -> dict[str, Any]:
    name = f"warmstart/{component}:{images.fingerprint(found)[:12]}"
    return {**found, "Id": f"sha256:vm-{component}", "RepoTags": [name], **other}


CARRY = {"images": "carry", "image_overrides": OVERRIDES}


class TestCarry:
    def test_a_bare_machine_gets_all(self, run: Callable[..., Any], here: Any) -> None:
        ran, release = run(BARE, **CARRY)
        [name] = ran.operations
        assert name.startswith("Carry images: app, caddy, embeddings, postgres, redis (")
        assert not release.known

    def test_a_machine_that_has_them_gets_none(self, run: Callable[..., Any], here: Any) -> None:
        ran, release = run(engine(*(on_vm(name, each) for name, each in here.items())), **CARRY)
        assert ran.operations == {}
        assert release.known
        assert release.images["redis"].id == "sha256:vm-redis", "the id is the VM's own"

    def test_only_the_one_that_is_another(self, run: Callable[..., Any], here: Any) -> None:
        there = [on_vm(name, each) for name, each in here.items() if name != "app"]
        ran, release = run(engine(*there), **CARRY)
        assert [name.split(" (")[0] for name in ran.operations] == ["Carry images: app"]
        assert [name for name, ref in release.images.items() if not ref.id] == ["app"]

    def test_one_of_the_right_name_with_another_content_is_carried_again(
        self, run: Callable[..., Any], here: Any
    ) -> None:
        there = [
            on_vm(name, each, **({"RootFS": {"Layers": ["evil"]}} if name == "app" else {}))
            for name, each in here.items()
        ]
        ran, _ = run(engine(*there), **CARRY)
        assert [name.split(" (")[0] for name in ran.operations] == ["Carry images: app"]

    def test_an_image_that_is_not_here(self, run: Callable[..., Any], here: Any) -> None:
        ran, _ = run(BARE, dry=False, **{**CARRY, "image_overrides": {**OVERRIDES, "redis": "gone/redis:1"}})
        assert ran.refused == ["image_overrides: redis is to be gone/redis:1, and this machine has no such image"]

    def test_an_image_for_another_processor(self, run: Callable[..., Any], here: Any) -> None:
        ran, _ = run(engine(arch="arm64"), **CARRY)
        assert ran.refused == ["here/app:1 is for amd64, the VM is arm64"]

    def test_a_plan_pulls_nothing(self, run: Callable[..., Any], here: Any) -> None:
        ran, release = run(BARE, images="carry", image_overrides={n: t for n, t in OVERRIDES.items() if n != "redis"})
        assert "redis" in next(iter(ran.operations))
        assert not release.known


class TestPull:
    def test_a_bare_machine_pulls_by_digest_and_builds_ours(self, run: Callable[..., Any], source: Any) -> None:
        ran, release = run(BARE)
        pins = images.pins(source.root)
        assert set(ran.operations) == {
            f"Build {images.app_name(source)}", *(f"Pull {pins[name]}" for name in NAMES if name != "app")
        }  # fmt: skip
        assert not release.known

    def test_a_machine_that_has_them_does_nothing(self, run: Callable[..., Any], source: Any) -> None:
        pins = images.pins(source.root)
        there = [image(["a"], images.app_name(source))]
        for name in NAMES[1:]:
            repository, _, digest = pins[name].partition("@")
            there.append(image([name], RepoTags=[], RepoDigests=[f"{repository.rpartition(':')[0]}@{digest}"]))
        ran, release = run(engine(*there))
        assert ran.operations == {}
        assert release.known
        assert release.images["caddy"].name == pins["caddy"]


def test_an_engine_that_does_not_answer_is_no_empty_one(run: Callable[..., Any]) -> None:
    ran, _ = run({": images on the machine": {"success": False, "stderr": "Cannot connect to the Docker daemon"}})
    assert ran.refused == ["Docker on the VM does not answer: Cannot connect to the Docker daemon"]


def test_containerds_store_is_seen() -> None:
    seen: list[images.Engine] = []

    def apply(deploy: Deploy) -> None:
        seen.append(step.there())

    run_step(apply, engine(image(["a"]), status='[["driver-type","io.containerd.snapshotter.v1"]]'))
    assert seen[0].containerd
    assert seen[0].has() == set()
