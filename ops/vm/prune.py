"""`warmstart-vm prune`: old releases, the images and models that only they used, and build caches past their bound.

What is in use, and what a rollback needs, stays. Images of others on this machine are never looked at.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .secrets import read
from .stack import Release, Stack, VmError

#: Beside the current and the previous one.
KEPT: Final = 3
#: Images that deploys name; others come into it by the manifest of a release that is removed.
OURS: Final = "warmstart/"
BUILD_CACHE_BYTES: Final = 2_000_000_000
REMOVE_TIMEOUT_S: Final = 300.0


@dataclass
class Old:
    releases: list[Release] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    models: list[Path] = field(default_factory=list)

    @property
    def lines(self) -> list[str]:
        return [
            *(f"release {release.id}" for release in self.releases),
            *(f"image {name}" for name in self.images),
            *(f"model {path.name}" for path in self.models),
        ]


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser("prune", help="remove old releases and their images")
    parser.add_argument("--pending", action="store_true", help="only name what would be removed")
    parser.set_defaults(run=_prune)


def _prune(args: argparse.Namespace) -> int:
    stack = Stack.from_environment()
    if args.pending:
        print("\n".join(find(stack).lines))
        return 0
    with stack.lock("prune"):
        remove(stack, find(stack), lambda line: print(line, flush=True))
    return 0


def find(stack: Stack) -> Old:
    """Nothing at all before a first roll-out: what is there is on its way."""
    current, previous = stack.current(), stack.previous()
    if current is None:
        return Old()
    # by their ids, which begin with the time
    releases = sorted(stack.releases(), key=lambda r: r.id, reverse=True)
    fixed = {r.id for r in (current, previous) if r}
    # one that is newer than the current was laid down by a deploy that is to go on
    others = [r for r in releases if r.id not in fixed]
    old = others[KEPT:]
    kept = [r for r in releases if r not in old]
    return Old(old, _images(stack, kept, old), _models(stack))


def _images(stack: Stack, kept: list[Release], old: list[Release]) -> list[str]:
    """Ours that no kept release names and no container has, and what came from outside for releases that go."""
    used = {image.id for release in kept for image in release.images.values()}
    used |= {container.image_id for container in stack.containers()}
    names = {image.name for release in kept for image in release.images.values()}
    listed = stack.run(
        [
            "docker",
            "image",
            "ls",
            "--no-trunc",
            "--filter",
            f"reference={OURS}*",
            "--format",
            "{{.Repository}}:{{.Tag}}",
        ]
    ).split()
    theirs = {image.name for release in old for image in release.images.values()}
    found = {name: _id(stack, name) for name in {*listed, *theirs} - names}
    return sorted(_removable(name) for name, image_id in found.items() if image_id and image_id not in used)


def _id(stack: Stack, name: str) -> str:
    """Empty where there is none."""
    try:
        return stack.run(["docker", "image", "inspect", "--format", "{{.Id}}", name]).strip()
    except VmError:
        return ""


def _removable(name: str) -> str:
    """Docker keeps what was pulled by tag and digest under its digest alone."""
    return re.sub(r":[^:/@]+@", "@", name)


def _models(stack: Stack) -> list[Path]:
    folder = stack.state / "model"
    used = Path(read(stack.etc / "settings.env").get("MODEL_DIR", "")).name
    mounted = {mount for container in stack.containers() for mount in _mounts(stack, container.id)}
    return sorted(
        path for path in (folder.iterdir() if folder.is_dir() else ())
        if path.is_dir() and path.name not in (used, f".{used}.part") and str(path) not in mounted
    )  # fmt: skip


def _mounts(stack: Stack, container_id: str) -> list[str]:
    said = stack.run(["docker", "inspect", "--format", "{{range .Mounts}}{{println .Source}}{{end}}", container_id])
    return said.split()


def remove(stack: Stack, old: Old, say: Callable[[str], None]) -> None:
    """An image that can't go is told of, and the rest goes."""
    for release in old.releases:
        # without its manifest it is no release, so a removal that is cut short leaves none that is half there
        (release.folder / "manifest.json").unlink()
        shutil.rmtree(release.folder)
        say(f"release {release.id} removed")
    for name in old.images:
        try:
            stack.run(["docker", "image", "rm", name], timeout_s=REMOVE_TIMEOUT_S)
            say(f"image {name} removed")
        except VmError as error:
            say(f"image {name} stays: {str(error).splitlines()[-1]}")
    for path in old.models:
        shutil.rmtree(path)
        say(f"model {path.name} removed")
    if old.lines:
        _bound_build_cache(stack, say)


def _bound_build_cache(stack: Stack, say: Callable[[str], None]) -> None:
    try:
        stack.run(
            ["docker", "builder", "prune", "--force", "--keep-storage", str(BUILD_CACHE_BYTES)],
            timeout_s=REMOVE_TIMEOUT_S,
        )
    except VmError as error:
        say(f"the build cache stays as it is: {str(error).splitlines()[-1]}")
