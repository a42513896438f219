"""What tells one image from another, and what of an archive has to go over the line."""

from __future__ import annotations

import io
import json
import tarfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from ops import carry, images
from ops.images import Engine, ImageError, fingerprint
from ops.inventory import Alerts, Target
from ops.source import ROOT
from tests.unit.ops import tree

CONFIG = {"Env": ["PATH=/bin"], "Cmd": ["serve"], "User": "10001:10001", "Labels": {"a": "b"}}


def image(layers: Sequence[str], name: str = "x:1", **other: Any) -> dict[str, Any]:
    """What `docker image inspect` says."""
    return {
        "Id": f"sha256:{name}", "RepoTags": [name], "RepoDigests": [], "Os": "linux", "Architecture": "amd64",
        "Config": {"Hostname": "", "Image": "sha256:1", "OnBuild": None, **CONFIG}, "RootFS": {"Layers": list(layers)},
        **other,
    }  # fmt: skip


def save(layers_of: dict[str, list[str]], *, oci: bool, linked: str = "") -> io.BytesIO:
    """What `docker save` writes: engines before 25 a folder a layer, later ones blobs."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:

        def add(path: str, text: bytes) -> None:
            info = tarfile.TarInfo(path)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))

        manifest, there = [], set[str]()
        for name, diff_ids in layers_of.items():
            config = {
                "os": "linux", "architecture": "amd64", "created": "2026-01-01", "history": [],
                "config": CONFIG, "rootfs": {"type": "layers", "diff_ids": diff_ids},
            }  # fmt: skip
            paths = []
            for diff_id in diff_ids:
                path = f"blobs/sha256/{diff_id}" if oci else f"{name}-{diff_id}/layer.tar"
                paths.append(path)
                if diff_id == linked:
                    info = tarfile.TarInfo(path)
                    info.type, info.linkname = tarfile.SYMTYPE, "../original/layer.tar"
                    tar.addfile(info)
                    add("original/layer.tar", b"linked")
                elif path not in there:
                    add(path, f"content of {diff_id}".encode() * 100)
                there.add(path)
            path = f"blobs/sha256/config-{name}" if oci else f"{name}.json"
            add(path, json.dumps(config).encode())
            manifest.append({"Config": path, "RepoTags": [f"here/{name}:1"], "Layers": paths})
        add("index.json" if oci else "repositories", b"{}")
        add("manifest.json", json.dumps(manifest).encode())
    return out


def loaded(archive: carry.Archive) -> dict[str, bytes]:
    out = io.BytesIO()
    carry.write(archive, out, lambda done: None)
    out.seek(0)
    with tarfile.open(fileobj=out) as tar:
        return {m.name: tar.extractfile(m).read() if m.isfile() else b"" for m in tar}  # type: ignore[union-attr]


@pytest.mark.parametrize("oci", [False, True])
class TestArchive:
    def test_layers_that_are_there_are_left_out_and_the_name_is_the_new_one(self, oci: bool) -> None:
        wanted = {fingerprint(image(["a", "b", "c"])): ["warmstart/app:123"]}
        packed = carry.pack(save({"app": ["a", "b", "c"]}, oci=oci), wanted, Engine([image(["a", "b"])]).has())
        files = loaded(packed)
        layers = [path for path in files if "layer.tar" in path or (oci and "config" not in path and "blobs" in path)]
        assert len(layers) == 1
        assert files[layers[0]] == b"content of c" * 100
        [entry] = json.loads(files["manifest.json"])
        assert entry["RepoTags"] == ["warmstart/app:123"]
        assert len(entry["Layers"]) == 3
        assert entry["Config"] in files
        # what else an archive has would bring the old name back
        assert not {"repositories", "index.json"} & set(files)

    def test_a_layer_on_another_one_is_another_layer(self, oci: bool) -> None:
        wanted = {fingerprint(image(["a", "b"])): ["warmstart/app:123"]}
        packed = carry.pack(save({"app": ["a", "b"]}, oci=oci), wanted, Engine([image(["x", "b"]), image(["b"])]).has())
        assert sum(b"content of" in text for text in loaded(packed).values()) == 2

    def test_two_images_in_one_archive(self, oci: bool) -> None:
        wanted = {
            fingerprint(image(["a", "b"])): ["warmstart/app:1"],
            fingerprint(image(["a", "c"])): ["warmstart/redis:1", "warmstart/caddy:1"],
        }
        packed = carry.pack(save({"app": ["a", "b"], "redis": ["a", "c"]}, oci=oci), wanted, set())
        names = [entry["RepoTags"] for entry in json.loads(loaded(packed)["manifest.json"])]
        assert names == [["warmstart/app:1"], ["warmstart/redis:1", "warmstart/caddy:1"]]

    def test_an_image_that_nobody_asked_for_is_refused(self, oci: bool) -> None:
        wanted = {fingerprint(image(["a"])): ["warmstart/app:1"]}
        with pytest.raises(ImageError, match="not the one inspected"):
            carry.pack(save({"app": ["a", "evil"]}, oci=oci), wanted, set())

    def test_one_that_is_not_in_it_is_missed(self, oci: bool) -> None:
        wanted = {fingerprint(image(["a"])): ["warmstart/app:1"], fingerprint(image(["b"])): ["warmstart/redis:1"]}
        with pytest.raises(ImageError, match="warmstart/redis:1"):
            carry.pack(save({"app": ["a"]}, oci=oci), wanted, set())


def test_a_layer_that_is_a_link_brings_what_it_points_to() -> None:
    wanted = {fingerprint(image(["a", "b"])): ["warmstart/app:1"]}
    files = loaded(carry.pack(save({"app": ["a", "b"]}, oci=False, linked="b"), wanted, {("a",)}))
    assert files["original/layer.tar"] == b"linked"
    assert "app-a/layer.tar" not in files


class TestFingerprint:
    def test_engines_differ_in_what_makes_no_difference(self) -> None:
        other = image(["a"], "y:2", DockerVersion="28", Config={**CONFIG, "Domainname": "", "ArgsEscaped": True})
        assert fingerprint(image(["a"])) == fingerprint(other)

    @pytest.mark.parametrize(
        "other",
        [
            {"RootFS": {"Layers": ["b"]}},
            {"Config": {**CONFIG, "Cmd": ["worker"]}},
            {"Config": {**CONFIG, "User": ""}},
            {"Config": {**CONFIG, "Env": ["PATH=/evil"]}},
            {"Config": {**CONFIG, "Healthcheck": {"Test": ["CMD", "true"]}}},
            {"Architecture": "arm64"},
        ],
    )
    def test_what_makes_one_is_in_it(self, other: dict[str, Any]) -> None:
        assert fingerprint(image(["a"])) != fingerprint(image(["a"], **other))


class TestEngine:
    def test_found_by_its_tag(self) -> None:
        assert Engine([image(["a"], "warmstart/app:1")]).find("warmstart/app:1")
        assert not Engine([image(["a"], "warmstart/app:1")]).find("warmstart/app:2")

    @pytest.mark.parametrize(
        "name", ["redis:8.1-alpine@sha256:1", "host:5000/a/redis:8@sha256:1", "host:5000/redis@sha256:1"]
    )
    def test_found_by_its_digest(self, name: str) -> None:
        plain = name.replace(":8.1-alpine", "").replace("redis:8@", "redis@")
        assert Engine([image(["a"], RepoTags=[], RepoDigests=[plain])]).find(name)
        assert not Engine([image(["a"], RepoTags=[], RepoDigests=[plain.replace("sha256:1", "sha256:2")])]).find(name)

    def test_the_store_that_takes_half_an_image_for_whole_gets_all_of_it(self) -> None:
        assert Engine([image(["a"])], containerd=True).has() == set()
        assert Engine([image(["a", "b"])]).has() == {("a",), ("a", "b")}


class TestWhatIsWanted:
    def test_every_service_of_the_compose_files_has_its_image(self) -> None:
        target = Target(host="h", domain="memory.example.com", alerts=Alerts(webhook="https://hooks.example.com/x"))
        found = {s: c for c in images.components(target) for s in images.services(c, target)}
        pins = {
            f"{p['image']}:{p['tag']}@{p['digest']}": n
            for n, p in tomllib.loads((ROOT / "compose/pins.toml").read_text()).items()
        }
        wanted = {}
        for file in ("compose.yml", "compose.monitoring.yml"):
            for service, what in yaml.safe_load((ROOT / "compose" / file).read_text())["services"].items():
                wanted[service] = pins.get(what["image"], "app")
        assert found == wanted

    def test_only_what_runs_there(self) -> None:
        target = Target(host="h", domain="memory.example.com", postgres=False, secrets={"DATABASE_URL": "env:DSN"})
        assert images.components(target) == ["app", "caddy", "embeddings", "redis"]

    def test_what_stands_for_a_pinned_image(self, tmp_path: Path) -> None:
        source = tree.make(tmp_path)
        target = Target(host="h", address="192.0.2.1", images="carry", image_overrides={"redis": "my/redis:1"})
        found = images.sources(target, source)
        assert found["redis"] == "my/redis:1"
        assert found["caddy"] == images.pins(source.root)["caddy"]
        assert found["app"] == images.app_name(source)

    def test_our_own_image_is_named_by_what_it_is_built_of(self, tmp_path: Path) -> None:
        before = images.app_name(tree.make(tmp_path))
        assert images.app_name(tree.commit(tmp_path, docs__page_dot_md="text")) == before
        assert images.app_name(tree.commit(tmp_path, app__warmstart__errors_dot_py="x = 1\n")) != before
