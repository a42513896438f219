"""compose.yml, the Dockerfile and pins.toml name the same images, each by its digest."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "compose"
PINS = tomllib.loads((COMPOSE / "pins.toml").read_text())
IMAGE = re.compile(r"^\s*image:\s*(\S+)", re.MULTILINE)
#: Our own, which is built from the tree.
OWN = "warmstart:${WARMSTART_VERSION:-dev}"


def reference(name: str) -> str:
    return "{image}:{tag}@{digest}".format(**PINS[name])


def images_from_outside() -> list[str]:
    """Of compose.yml and any overlay for production, and the base of the Dockerfile."""
    files = [f for f in sorted(COMPOSE.glob("compose*.yml")) if f.name != "compose.local.yml"]
    named = [image for file in files for image in IMAGE.findall(file.read_text()) if image != OWN]
    return named + re.findall(r"^ARG BASE=(\S+)", (ROOT / "app" / "Dockerfile").read_text(), re.MULTILINE)


def test_the_stack_and_the_pins_name_the_same_images() -> None:
    assert sorted(set(images_from_outside())) == sorted(reference(name) for name in PINS)


@pytest.mark.parametrize("image", images_from_outside())
def test_an_image_has_a_patch_tag_and_a_digest(image: str) -> None:
    tag, digest = re.fullmatch(r"[a-z0-9./-]+:([^@]+)@sha256:([0-9a-f]{64})", image).groups()  # type: ignore[union-attr]
    assert re.search(r"\d+\.\d+\.\d+", tag) or re.search(r"\d+\.\d+-", tag), f"{tag} is no patch tag"
    assert len(set(digest)) > 8


@pytest.mark.parametrize("name", PINS)
def test_a_pin_says_since_when_and_why(name: str) -> None:
    assert PINS[name].keys() == {"image", "tag", "digest", "date", "reason"}
    assert isinstance(PINS[name]["date"], date)
    assert len(PINS[name]["reason"]) > 20


def test_the_reason_for_the_embedding_servers_pin_stands_above_it() -> None:
    text = (COMPOSE / "compose.yml").read_text()
    before = text[: text.index(reference("embeddings"))].splitlines()[-2]
    assert before.lstrip().startswith("#")
    assert "relative URL without a base" in before


def test_nothing_is_taken_by_the_name_latest() -> None:
    files = [
        *COMPOSE.rglob("*.yml"),
        *ROOT.glob("app/*Dockerfile*"),
        *ROOT.glob("tests/containers/images/*/Dockerfile"),
    ]
    assert len(files) >= 7
    for file in files:
        assert ":latest" not in file.read_text(), file
        assert not re.search(r"^# *syntax=", file.read_text(), re.MULTILINE), (
            f"{file}: needs a registry for its own parser"
        )


def test_verifying_says_so_where_no_registry_is_reached(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'ERROR: dial tcp: lookup registry: no such host' >&2\nexit 1\n")
    docker.chmod(0o755)
    done = run_verify(tmp_path)
    assert done.returncode == 2
    assert f"{len(PINS)} not verified" in done.stderr
    assert "no such host" in done.stdout


def test_verifying_names_the_tag_that_moved(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    cases = "\n".join(
        f"{PINS[n]['image']}:{PINS[n]['tag']}) echo {PINS[n]['digest'] if n != 'caddy' else 'sha256:' + 'ab' * 32};;"
        for n in PINS
    )
    docker.write_text(f'#!/bin/sh\ncase "$4" in\n{cases}\nesac\n')
    docker.chmod(0o755)
    done = run_verify(tmp_path)
    assert done.returncode == 1
    moved = [line for line in done.stdout.splitlines() if line.startswith("moved")]
    assert len(moved) == 1
    assert "caddy" in moved[0]
    assert "abab" in moved[0]


def run_verify(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, COMPOSE / "pins_verify.py"], env={"PATH": f"{path}:/usr/bin:/bin"},
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
