"""When a release is laid down, and what its roll-out is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ops import program, release
from ops.images import ImageRef, components
from ops.inventory import Target
from ops.runner import Change, Deploy, DeployError
from ops.steps import database, prune, rollout, smoke
from ops.steps import release as step
from tests.unit.ops import tree
from tests.unit.ops.steptest import Answers, Ran, run_step

TARGET = Target(host="203.0.113.10", domain="memory.example.com")
REFS = {name: ImageRef(f"warmstart/{name}:1", f"sha256:{name}") for name in components(TARGET)}


@pytest.fixture
def source(tmp_path: Path) -> Any:
    return tree.make(tmp_path)


@pytest.fixture
def run(source: Any) -> Callable[..., tuple[Ran, release.Release]]:
    def run_(answers: Answers, refs: dict[str, ImageRef] = REFS, **fields: Any) -> tuple[Ran, release.Release]:
        made = release.Release(dict(refs))

        def apply(deploy: Deploy) -> None:
            deploy.source, deploy.release = source, made
            step.apply(deploy)

        return run_step(apply, answers, **fields), made

    return run_


def there(source: Any, *ids: str, current: str = "", tool: str = "") -> list[str]:
    """The VM's answer: releases of the same content."""
    same = release.content_hash(release.files(source, REFS, TARGET), REFS)
    return [
        f"releases/{current}",
        f"releases/{tool}/vm",
        *(json.dumps({"release": i, "content_hash": same}) for i in ids),
    ]


DONE = {"secrets --pending": "\n"}


class TestRelease:
    def test_a_bare_machine(self, run: Callable[..., Any], source: Any) -> None:
        ran, made = run({": releases on": "", "secrets --pending": {"success": False, "stderr": "not found"}})
        assert list(ran.operations) == [
            f"Lay down release {made.id}", "The VM's program is this release's",
            "Secrets on the VM: those that are missing",
        ]  # fmt: skip
        assert made.id.endswith(source.short)
        assert not made.laid_down

    def test_the_same_content_is_the_release_that_is_there(self, run: Callable[..., Any], source: Any) -> None:
        ran, made = run({": releases on": there(source, "2026-a", "2026-b", current="2026-a", tool="2026-a"), **DONE})
        assert ran.operations == {}
        assert (made.id, made.laid_down) == ("2026-a", True)

    def test_one_that_a_killed_deploy_laid_down_is_gone_on_with(self, run: Callable[..., Any], source: Any) -> None:
        ran, made = run({": releases on": there(source, "2026-a", "2026-b", current="2025-x", tool="2025-x"), **DONE})
        assert made.id == "2026-b"
        assert list(ran.operations) == ["The VM's program is this release's"]

    def test_images_that_are_not_there_yet_make_a_new_one(self, run: Callable[..., Any], source: Any) -> None:
        refs = {**REFS, "app": ImageRef("warmstart/app:2", "")}
        ran, made = run({": releases on": there(source, "2026-a", current="2026-a", tool="2026-a"), **DONE}, refs)
        assert f"Lay down release {made.id}" in ran.operations

    def test_given_secrets_go_by_standard_input_and_are_never_shown(
        self, run: Callable[..., Any], source: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MY_DSN", "postgresql://u:very-secret@db.example.com/x")
        fields = {"postgres": False, "secrets": {"DATABASE_URL": "env:MY_DSN"}}
        refs = {name: ref for name, ref in REFS.items() if name != "postgres"}
        ran, _ = run({": releases on": "", "secrets --pending": "DATABASE_URL\n"}, refs, **fields)
        assert "Secrets on the VM: DATABASE_URL" in ran.operations
        assert "very-secret" not in repr(ran)


def rolling(apply: Callable[[Deploy], None], answers: Answers, *, laid_down: bool = True, **options: Any) -> Ran:
    def with_release(deploy: Deploy) -> None:
        deploy.release = release.Release(dict(REFS), id="2026-b", laid_down=laid_down)
        apply(deploy)

    return run_step(with_release, answers, **options)


def pending(**other: Any) -> Answers:
    found = {
        "release": "2026-b",
        "services": {},
        "files": [],
        "app": {},
        "migrations": "none",
        "rolled_out": True,
        **other,
    }
    return {"pending 2026-b --json": json.dumps(found)}


class TestRolling:
    def test_nothing_to_do(self) -> None:
        assert rolling(database.apply, pending()).operations == {}
        assert rolling(rollout.apply, pending()).operations == {}

    def test_a_plan_of_a_release_that_is_not_there_asks_nobody(self) -> None:
        assert len(rolling(database.apply, {}, laid_down=False).operations) == 2
        assert list(rolling(rollout.apply, {}, laid_down=False).operations) == ["Roll out 2026-b"]

    def test_what_is_to_be_done_is_named(self) -> None:
        answers = pending(
            services={"redis": "another image"},
            files=["caddy/Caddyfile"],
            app={"api": "missing"},
            migrations="unknown",
            rolled_out=False,
        )
        assert list(rolling(database.apply, answers).operations) == [
            "Bring up services: redis (another image), caddy/Caddyfile", "Bring the database to the release's schema",
        ]  # fmt: skip
        assert list(rolling(rollout.apply, answers).operations) == ["Roll out 2026-b: api (missing)"]

    def test_a_release_that_runs_but_is_not_current_is_rolled_out(self) -> None:
        assert list(rolling(rollout.apply, pending(rolled_out=False)).operations) == ["Roll out 2026-b"]

    def test_a_refusal_of_the_program_is_the_deploys(self) -> None:
        ran = rolling(database.apply, {"pending": {"success": False, "stderr": "Refused: redis: no image"}})
        assert ran.refused == ["Refused: redis: no image"]


class TestSmoke:
    def calls(self, monkeypatch: pytest.MonkeyPatch, ok: bool, **options: Any) -> list[tuple[str, ...]]:
        seen: list[tuple[str, ...]] = []

        def stream(deploy: Deploy, *words: str, **other: Any) -> tuple[bool, list[str]]:
            seen.append(words)
            return ok, ["failed search: got keyword"]

        monkeypatch.setattr(program, "stream", stream)
        changes = options.pop("changes", [])

        def apply(deploy: Deploy) -> None:
            deploy.changes = changes
            smoke.apply(deploy)

        run_step(apply, {}, **options)
        return seen

    def test_only_where_something_was_changed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        change = [Change("rollout", "x", 1.0)]
        assert self.calls(monkeypatch, True, dry=False) == []
        assert self.calls(monkeypatch, True, dry=True, changes=change) == []
        assert self.calls(monkeypatch, True, dry=False, changes=change) == [(program.VM_PROGRAM, "smoke")]

    def test_what_fails_fails_the_deploy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(DeployError, match="got keyword"):
            self.calls(monkeypatch, False, dry=False, changes=[Change("rollout", "x", 1.0)])


class TestPrune:
    def test_what_goes_is_named(self) -> None:
        assert rolling(prune.apply, {"prune --pending": "\n"}).operations == {}
        ran = rolling(prune.apply, {"prune --pending": ["release 2026-a", "image warmstart/app:1"]})
        assert list(ran.operations) == ["Remove what is old: release 2026-a, image warmstart/app:1"]

    def test_a_machine_without_the_program(self) -> None:
        assert rolling(prune.apply, {"prune --pending": {"success": False, "stderr": "not found"}}).operations == {}
