"""Brings the embedding model's folder into its place: whole and verified, or not at all.

    python3 - missing|fetch|place FOLDER BASE_URL "CHECKSUM  PATH"…

It needs nothing beside it, since a deploy runs it, by standard input, before there is a release.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Final

ATTEMPTS: Final = 3
PAUSE_S: Final = 2.0
#: Without a byte for so long, a download has failed.
SILENCE_S: Final = 60.0
CHUNK: Final = 1 << 20


def part(folder: Path) -> Path:
    """What there is of it so far; a later try goes on from there."""
    return folder.with_name(f".{folder.name}.part")


def checksum(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def missing(folder: Path, wanted: Mapping[str, str]) -> list[str]:
    """Paths that are not there yet, or not as they should be."""
    part(folder).mkdir(parents=True, exist_ok=True)
    return [
        name
        for name, expected in sorted(wanted.items())
        if not (path := part(folder) / name).is_file() or checksum(path) != expected
    ]


def fetch(folder: Path, base: str, wanted: Mapping[str, str]) -> None:
    """From the model hub. Exits with what went wrong."""
    for name in missing(folder, wanted):
        path = part(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        _download(f"{base}/{name}", path)
        if (found := checksum(path)) != wanted[name]:
            path.unlink()
            sys.exit(f"{base}/{name} has the checksum {found}, and {wanted[name]} is wanted: it was not taken")
        print(f"{name}: {path.stat().st_size / 1e6:.1f} MB", flush=True)


def _download(url: str, path: Path) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with urllib.request.urlopen(url, timeout=SILENCE_S) as answer, path.open("wb") as file:  # noqa: S310
                shutil.copyfileobj(answer, file, CHUNK)
                return
        except OSError as error:
            if attempt == ATTEMPTS:
                sys.exit(
                    f"{url} can't be fetched: {error}. Where the VM has no way there, "
                    "`model` of the inventory takes a folder on your machine."
                )
            time.sleep(PAUSE_S)


def place(folder: Path, wanted: Mapping[str, str]) -> None:
    """From now on it is there. Exits where it is not whole."""
    if wrong := missing(folder, wanted):
        sys.exit(f"not as it should be on the VM: {', '.join(wrong)}: deploy again")
    source = part(folder)
    for path in sorted(source.rglob("*"), reverse=True):
        if path.is_file() and str(path.relative_to(source)) not in wanted:
            path.unlink()
    for path in [source, *source.rglob("*")]:
        # for everybody to read: its container's user is one of its own
        path.chmod(0o755 if path.is_dir() else 0o644)
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    source.rename(folder)


def main(mode: str, folder_name: str, base: str, *lines: str) -> None:
    folder = Path(folder_name)
    wanted = {path: digest for digest, _, path in (line.partition("  ") for line in lines)}
    if mode == "missing":
        print("\n".join(missing(folder, wanted)))
        return
    if mode == "fetch":
        fetch(folder, base, wanted)
    place(folder, wanted)


if __name__ == "__main__":
    main(*sys.argv[1:])
