"""What a release is made of."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import yaml

from ops import release
from ops.images import ImageRef, components
from ops.inventory import Alerts, Target
from ops.source import ROOT
from tests.unit.ops import tree

TARGET = Target(host="h", domain="memory.example.com")
WATCHED = Target(host="h", domain="memory.example.com", alerts=Alerts(webhook="https://hooks.example.com/x"))


def refs(target: Target = TARGET) -> dict[str, ImageRef]:
    return {name: ImageRef(f"warmstart/{name}:1", f"sha256:{name}") for name in components(target)}


class _Loader(yaml.SafeLoader):
    """Knows Compose's word for a field that is taken away."""


_Loader.add_constructor("!reset", lambda loader, node: "RESET")


def test_commits_that_differ_in_nothing_that_runs_are_one_release(tmp_path: Path) -> None:
    first = tree.make(tmp_path)
    before = release.content_hash(release.files(first, refs(), TARGET), refs())
    second = tree.commit(
        tmp_path, docs__page_dot_md="text", compose__DEGRADATION_dot_md="text", compose__targets_dot_mk="x:"
    )
    assert release.content_hash(release.files(second, refs(), TARGET), refs()) == before


@pytest.mark.parametrize("path", ["compose__caddy__Caddyfile", "compose__compose_dot_yml", "ops__vm__stack_dot_py"])
def test_what_runs_is_in_it(tmp_path: Path, path: str) -> None:
    source = tree.make(tmp_path)
    before = release.content_hash(release.files(source, refs(), TARGET), refs())
    changed = release.files(tree.commit(tmp_path, **{path: "another"}), refs(), TARGET)
    assert release.content_hash(changed, refs()) != before


def test_another_image_is_another_release(tmp_path: Path) -> None:
    found = release.files(tree.make(tmp_path), refs(), TARGET)
    assert release.content_hash(
        found, {**refs(), "app": ImageRef("warmstart/app:1", "sha256:2")}
    ) != release.content_hash(found, refs())


def test_the_overlay_names_an_image_for_every_service_and_builds_none() -> None:
    services = yaml.safe_load((ROOT / "compose/compose.yml").read_text())["services"]
    watchers = yaml.safe_load((ROOT / "compose/compose.monitoring.yml").read_text())["services"]
    overlay = yaml.load(release.overlay(release.by_service(refs(WATCHED), WATCHED)), _Loader)["services"]  # noqa: S506
    assert set(overlay) == {*services, *watchers}
    assert all(each["image"].startswith("warmstart/") and each["pull_policy"] == "never" for each in overlay.values())
    assert {name for name, each in overlay.items() if each.get("build") == "RESET"} == {
        n for n, s in services.items() if "build" in s
    }
    # with the base file alone they would run where nobody wants them
    assert {n for n, each in overlay.items() if each.get("profiles") == ["monitoring"]} == set(watchers)


def test_the_manifest_says_what_it_is_and_comes_last(tmp_path: Path) -> None:
    source = tree.make(tmp_path)
    target = Target(host="h", address="192.0.2.1", images="carry", image_overrides={"redis": "my/redis:1"})
    made = release.Release(refs(target), "c0ffee", "20261130T010203-abcdef0")
    found = release.files(source, made.images, target)
    about = release.manifest(made, source, target, found)
    assert about["images"]["worker"] == {"name": "warmstart/app:1", "id": "sha256:app", "digest": ""}
    assert about["images"]["caddy"]["digest"].startswith("sha256:")
    assert about["images"]["redis"]["digest"] == "", "it is not the pinned one"
    assert (about["commit"], about["who"], about["config_hash"]) == (source.commit, "ann@laptop", "c0ffee")
    with tarfile.open(fileobj=io.BytesIO(release.archive(found, about))) as tar:
        names = tar.getnames()
        assert names[-1] == "manifest.json"
        assert {"compose/compose.yml", "compose/caddy/Caddyfile", "compose.images.yml", "vm/__main__.py"} <= set(names)
        assert not [name for name in names if ".env" in name]
        assert json.load(tar.extractfile("manifest.json") or io.BytesIO()) == about
