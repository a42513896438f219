"""The space that the service writes to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from .stack import Stack

DOCKER_DATA: Final = Path("var/lib/docker")
#: As of the alert `DiskFull`: with less, saves are refused soon.
FULL_SHARE: Final = 0.05


class Disk(NamedTuple):
    #: What it is of: root, docker or memories.
    mount: str
    size: int
    #: What programs that aren't root's can still write.
    free: int

    @property
    def is_full(self) -> bool:
        return self.free < self.size * FULL_SHARE


def disks(stack: Stack) -> Iterator[Disk]:
    """Of the system, of Docker's folder, and of the memories where these are on one of their own."""
    docker = stack.root / DOCKER_DATA
    volume = docker / "volumes" / f"{stack.project}_data" / "_data"
    places = {"root": stack.root, "docker": docker, "memories": volume}
    if not volume.exists() or volume.stat().st_dev == docker.stat().st_dev:
        del places["memories"]
    for mount, path in places.items():
        if path.exists():
            usage = shutil.disk_usage(path)
            yield Disk(mount, usage.total, usage.free)


def fullest(stack: Stack) -> Disk:
    return min(disks(stack), key=lambda disk: disk.free / max(1, disk.size))
