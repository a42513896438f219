"""What images a release is made of, what tells one from another, and the engine of this machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from ops.inventory import Target
from ops.source import Source

#: Of the project's own image; with the watchers' where somebody is to be alerted.
APP: Final = "app"
APP_SERVICES: Final = ("api", "api-b", "redis-rest", "worker")
WATCHERS: Final = ("alertmanager", "prometheus")
WATCHING_APP_SERVICES: Final = ("host-metrics",)
#: What our own image is built of.
APP_SOURCES: Final = ("app/Dockerfile", "app/warmstart", "pyproject.toml", "requirements-server.lock")
REPOSITORY: Final = "warmstart"
ID_CHARS: Final = 12
#: Of an image's configuration, what makes it run as it does. Engines differ in the rest.
CONFIG_FIELDS: Final = (
    "Cmd", "Entrypoint", "Env", "ExposedPorts", "Healthcheck", "Labels", "OnBuild", "Shell", "StopSignal", "User",
    "Volumes", "WorkingDir",
)  # fmt: skip
INSPECT_TIMEOUT_S: Final = 60
PULL_TIMEOUT_S: Final = 1800
BUILD_TIMEOUT_S: Final = 1800

Inspected = Mapping[str, Any]


class ImageError(Exception):
    """An image can't be had, or is not what it should be; with the way out."""


@dataclass(frozen=True)
class ImageRef:
    """As a release names it; `id` is the VM's, empty where only the VM can tell it and doesn't have the image yet."""

    name: str
    id: str


# -- what is wanted


def components(target: Target) -> list[str]:
    """The images that this VM runs."""
    names = [APP, "caddy", "embeddings", "redis", *(["postgres"] if target.postgres else [])]
    return sorted([*names, *(WATCHERS if target.alerts.wanted else [])])


def services(component: str, target: Target) -> tuple[str, ...]:
    """Compose services of an image."""
    if component != APP:
        return (component,)
    return APP_SERVICES + (WATCHING_APP_SERVICES if target.alerts.wanted else ())


def pins(root: Path) -> dict[str, str]:
    """Component → name with tag and digest, of compose/pins.toml."""
    found = tomllib.loads((root / "compose" / "pins.toml").read_text())
    return {name: f"{pin['image']}:{pin['tag']}@{pin['digest']}" for name, pin in found.items()}


def app_name(source: Source) -> str:
    """Of our own image, by the content of what it is built of: a commit that changes none of it is no new image."""
    digest = hashlib.sha256()
    with tarfile.open(fileobj=io.BytesIO(source.archive(*APP_SOURCES))) as tar:
        for member in sorted((m for m in tar if m.isfile()), key=lambda m: m.name):
            digest.update(f"{member.name}\0{member.mode & 0o111:o}\0{member.size}\0".encode())
            digest.update(content(tar, member).read())
    return f"{REPOSITORY}/{APP}:{digest.hexdigest()[:ID_CHARS]}"


def content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    """Of a plain file in it."""
    file = tar.extractfile(member)
    if file is None:
        raise ImageError(f"{member.name} is no file")
    return file


# -- what an image is


def fingerprint(image: Inspected) -> str:
    """Of layers and configuration: the same for an image here and there, whatever its engine calls its id.

    Takes what `docker image inspect` says, or the image's own configuration as it lies in an archive.
    """
    config = image.get("Config") or image.get("config") or {}
    root = image.get("RootFS") or image.get("rootfs") or {}
    content = {
        "platform": [image.get("Os") or image.get("os"), image.get("Architecture") or image.get("architecture")],
        "layers": layers(root),
        "config": {name: config[name] for name in CONFIG_FIELDS if config.get(name)},
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def layers(root: Mapping[str, Any]) -> list[str]:
    return list(root.get("Layers") or root.get("diff_ids") or [])


def chains(diff_ids: Sequence[str]) -> list[tuple[str, ...]]:
    """Each layer with all that lie under it: only as such an engine knows it again."""
    return [tuple(diff_ids[: i + 1]) for i in range(len(diff_ids))]


@dataclass(frozen=True)
class Engine:
    """The images of one engine."""

    images: Sequence[Inspected]
    architecture: str = "amd64"
    #: It keeps images in containerd's store, which takes an archive without its layers for whole.
    containerd: bool = False

    def find(self, name: str) -> Inspected | None:
        """By a tag, or by a name with a digest."""
        repository, _, digest = name.partition("@")
        if digest:
            path, _, tag = repository.rpartition(":")
            plain = path if path and "/" not in tag else repository
            return next((i for i in self.images if f"{plain}@{digest}" in (i.get("RepoDigests") or [])), None)
        return next((i for i in self.images if name in (i.get("RepoTags") or [])), None)

    def has(self) -> set[tuple[str, ...]]:
        """Chains of layers that need not be carried to it."""
        return set() if self.containerd else {c for i in self.images for c in chains(layers(i.get("RootFS") or {}))}


# -- this machine's engine


def docker(*words: str, timeout_s: float = INSPECT_TIMEOUT_S, stdin: bytes | None = None) -> str:
    """Standard output; raises ImageError with the last line of what went wrong."""
    environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
    try:
        done = subprocess.run(
            ("docker", *words), input=stdin, stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True, timeout=timeout_s, env=environment,
        )  # fmt: skip
    except FileNotFoundError:
        raise ImageError(
            "images='carry' needs Docker on this machine: install it, or let the VM pull with images='pull'"
        ) from None
    except subprocess.TimeoutExpired:
        raise ImageError(f"`docker {' '.join(words)[:120]}` took over {timeout_s:.0f} s on this machine") from None
    if done.returncode:
        last = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()[-1:]
        raise ImageError(f"`docker {' '.join(words)[:120]}` failed on this machine: {' '.join(last)}")
    return done.stdout.decode()


def inspect(name: str) -> Inspected | None:
    """None where this machine doesn't have it."""
    try:
        [found] = json.loads(docker("image", "inspect", name))
    except ImageError as error:
        if "no such image" in str(error).lower():
            return None
        raise
    return dict(found)


@dataclass(frozen=True)
class Local:
    """An image on this machine that is to be on the VM."""

    component: str
    #: as this machine knows it
    source: str
    image: Inspected

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.image)

    @property
    def name(self) -> str:
        """On the VM. `docker save` loses digests, so its content is its tag."""
        return f"{REPOSITORY}/{self.component}:{self.fingerprint[:ID_CHARS]}"


def sources(target: Target, source: Source) -> dict[str, str]:
    """Component → what it is called on this machine, for images that are carried."""
    pinned = pins(source.root)
    names = {c: app_name(source) if c == APP else pinned[c] for c in components(target)}
    return {**names, **{c: name for c, name in target.image_overrides.items() if c in names}}


def here(
    target: Target, source: Source, engine: Engine, *, dry: bool, say: Callable[[str], None]
) -> tuple[list[Local], list[str]]:
    """The images on this machine; those that it lacks are pulled by digest or built, or only named where `dry`."""
    found, missing = [], []
    for component, name in sources(target, source).items():
        image = inspect(name)
        foreign = image is not None and image.get("Architecture") != engine.architecture
        if foreign and component in target.image_overrides:
            raise ImageError(f"{name} is for {image and image['Architecture']}, the VM is {engine.architecture}")
        if image is None or foreign:
            if dry:
                missing.append(component)
                continue
            image = _get(component, name, target, source, engine.architecture, say)
        found.append(Local(component, name, image))
    return found, missing


def _get(
    component: str, name: str, target: Target, source: Source, architecture: str, say: Callable[[str], None]
) -> Inspected:
    if component in target.image_overrides:
        raise ImageError(f"image_overrides: {component} is to be {name}, and this machine has no such image")
    if component == APP:
        say(f"    build {name}")
        build = [
            "build",
            "--quiet",
            "--platform",
            f"linux/{architecture}",
            "--file",
            "app/Dockerfile",
            "--tag",
            name,
            "-",
        ]
        docker(*build, timeout_s=BUILD_TIMEOUT_S, stdin=source.archive(*APP_SOURCES))
    else:
        say(f"    pull {name}")
        docker("pull", "--quiet", "--platform", f"linux/{architecture}", name, timeout_s=PULL_TIMEOUT_S)
    image = inspect(name)
    if image is None:
        raise ImageError(f"{name} is not there although it was {'built' if component == APP else 'pulled'}")
    return image
