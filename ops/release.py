"""A release: what is laid down on the VM for a roll-out. Compose files, the images to the letter, the VM's program."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Any, Final

from ops.images import WATCHERS, WATCHING_APP_SERVICES, ImageRef, content, pins, services
from ops.inventory import Target
from ops.source import Source

FOLDER: Final = "/opt/warmstart/releases"
OVERLAY: Final = "compose.images.yml"
MANIFEST: Final = "manifest.json"
#: Of the tree, by its folder in the release.
TREES: Final = {"compose": "compose", "vm": "ops/vm"}
#: Compose files beside the folders that containers mount; the rest of compose/ is for people.
COMPOSE_FILES: Final = ("compose.yml", "compose.monitoring.yml")
#: Services that compose.yml would build.
BUILT: Final = frozenset({"api", "api-b"})
PROFILES: Final = dict.fromkeys((*WATCHERS, *WATCHING_APP_SERVICES), "monitoring")


@dataclass
class Release:
    #: by component, see ops.images; the id may be unknown until the image is on the VM
    images: dict[str, ImageRef] = field(default_factory=dict)
    #: of the settings that it was made with
    config_hash: str = ""
    #: empty until it is known
    id: str = ""
    #: whether its folder is on the VM
    laid_down: bool = False

    @property
    def known(self) -> bool:
        """Whether all of its images are on the VM."""
        return bool(self.images) and all(ref.id for ref in self.images.values())


def new_id(source: Source) -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{source.short}"


def by_service(images: Mapping[str, ImageRef], target: Target) -> dict[str, ImageRef]:
    return {service: ref for component, ref in sorted(images.items()) for service in services(component, target)}


def files(source: Source, images: Mapping[str, ImageRef], target: Target) -> dict[str, bytes]:
    """Path → content, all but the manifest."""
    found = {}
    for folder, tree in TREES.items():
        with tarfile.open(fileobj=io.BytesIO(source.archive(tree))) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                inner = path.relative_to(tree) if path.is_relative_to(tree) else None
                if inner is None or not member.isfile():
                    continue
                if folder == "compose" and len(inner.parts) == 1 and inner.name not in COMPOSE_FILES:
                    continue
                found[f"{folder}/{inner}"] = content(tar, member).read()
    return {**found, OVERLAY: overlay(by_service(images, target)).encode()}


def overlay(images: Mapping[str, ImageRef]) -> str:
    """On top of the compose files: each service's image to the letter, and none other than one that is there."""
    lines = ["# Written by make deploy.", "services:"]
    for service, ref in sorted(images.items()):
        lines += [f"  {service}:", f"    image: {json.dumps(ref.name)}", "    pull_policy: never"]
        if service in BUILT:
            lines.append("    build: !reset null")
        if service in PROFILES:
            lines.append(f"    profiles: [{PROFILES[service]}]")
    return "\n".join(lines) + "\n"


def content_hash(found: Mapping[str, bytes], images: Mapping[str, ImageRef]) -> str:
    """The same for two commits that differ in nothing that runs."""
    digest = hashlib.sha256()
    for path, text in sorted(found.items()):
        digest.update(f"{path}\0{len(text)}\0".encode() + text)
    digest.update(json.dumps({name: ref.id for name, ref in sorted(images.items())}).encode())
    return digest.hexdigest()


def manifest(release: Release, source: Source, target: Target, found: Mapping[str, bytes]) -> dict[str, Any]:
    pinned = pins(source.root)
    digests = {name: pinned[name].partition("@")[2] for name in pinned if name not in target.image_overrides}
    component = {s: c for c in release.images for s in services(c, target)}
    return {
        "release": release.id,
        "commit": source.commit,
        "images": {
            service: {"name": ref.name, "id": ref.id, "digest": digests.get(component[service], "")}
            for service, ref in by_service(release.images, target).items()
        },
        "config_hash": release.config_hash,
        "content_hash": content_hash(found, release.images),
        "who": source.who,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def archive(found: Mapping[str, bytes], about: Mapping[str, Any]) -> bytes:
    """The release's folder as a tar; the manifest last, as a folder without it is none."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        everything = {**dict(sorted(found.items())), MANIFEST: (json.dumps(about, indent=1) + "\n").encode()}
        for path, text in everything.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(text), 0o644
            tar.addfile(info, io.BytesIO(text))
    return out.getvalue()
