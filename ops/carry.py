"""How images come to a VM without a registry: `docker save` here, less the layers that are there, `docker load` there.

A classic engine looks each layer up before it opens its file in the archive, so those that it has can be left out (seen
with 20.10, 26.1, 28.5; with one missing that it lacks, it fails). One with containerd's store takes such an archive and
has a broken image then: it gets the whole.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import IO, Any, Final, cast

from ops import ssh
from ops.images import ImageError, Local, chains, content, fingerprint, layers
from ops.inventory import Target

SAVE_TIMEOUT_S: Final = 900
#: A transfer over a slow line, and what the engine needs afterwards.
CARRY_TIMEOUT_S: Final = 4 * 3600
CHUNK: Final = 1 << 20
PROGRESS_STEP: Final = 0.2
MB: Final = 1_000_000

Chain = tuple[str, ...]


# -- the archive


@dataclass(frozen=True)
class Archive:
    """What `docker save` wrote, and what of it goes over the line."""

    file: IO[bytes]
    manifest: list[dict[str, Any]]
    #: names in the archive
    members: list[str]
    size: int


def pack(file: IO[bytes], wanted: Mapping[str, Sequence[str]], has: set[Chain]) -> Archive:
    """Of `docker save`'s archive: the images of `wanted` (fingerprint → new names), less the layers of `has`.

    Raises ImageError where it has another image than was asked for.
    """
    file.seek(0)
    with tarfile.open(fileobj=file) as tar:
        members = {m.name: m for m in tar}
        manifest, keep = [], set[str]()
        for entry in json.load(content(tar, members["manifest.json"])):
            config = json.load(content(tar, members[entry["Config"]]))
            if not (names := wanted.get(fingerprint(config))):
                raise ImageError(f"docker save wrote an image that is not the one inspected: {entry['Config']}")
            manifest.append({**entry, "RepoTags": list(names)})
            keep.add(entry["Config"])
            for chain, path in zip(chains(layers(config["rootfs"])), entry["Layers"], strict=True):
                if chain not in has:
                    keep |= _with_target(members, path)
    if missing := {n for names in wanted.values() for n in names} - {n for e in manifest for n in e["RepoTags"]}:
        raise ImageError(f"docker save left out {', '.join(sorted(missing))}")
    ordered = [name for name in members if name in keep]
    return Archive(file, manifest, ordered, sum(members[name].size for name in ordered))


def _with_target(members: Mapping[str, tarfile.TarInfo], path: str) -> set[str]:
    """Older engines write a layer that occurs twice as a link."""
    member = members[path]
    if not member.issym():
        return {path}
    return {path, *_with_target(members, os.path.normpath(os.path.join(os.path.dirname(path), member.linkname)))}


def write(archive: Archive, out: IO[bytes], progress: Callable[[int], None]) -> None:
    """The tar for `docker load`; `progress` is told the bytes so far."""
    archive.file.seek(0)
    with (
        tarfile.open(fileobj=archive.file) as source,
        tarfile.open(fileobj=_Told(out, progress), mode="w|", bufsize=CHUNK) as target,
    ):
        members = {m.name: m for m in source}
        for name in archive.members:
            member = members[name]
            target.addfile(member, source.extractfile(member) if member.isreg() else None)
        text = json.dumps(archive.manifest).encode()
        info = tarfile.TarInfo("manifest.json")
        info.size = len(text)
        target.addfile(info, io.BytesIO(text))


class _Told(io.RawIOBase):
    """A file that tells how much was written to it."""

    def __init__(self, out: IO[bytes], progress: Callable[[int], None]) -> None:
        self._out, self._progress, self._done = out, progress, 0

    def write(self, data: Any) -> int:
        self._out.write(data)
        self._done += len(data)
        self._progress(self._done)
        return len(data)


# -- over the line


def carry(target: Target, images: Sequence[Local], has: set[Chain], scratch: Path, say: Callable[[str], None]) -> None:
    """Loads them on the VM under their new names; with all layers where it fails without some. Raises ImageError."""
    scratch.mkdir(parents=True, exist_ok=True)
    wanted: dict[str, list[str]] = {}
    for image in images:
        wanted.setdefault(image.fingerprint, []).append(image.name)
    # beside the repository: a machine's folder for temporary files may be in its memory
    with tempfile.TemporaryFile(dir=scratch) as file:
        _save([image.source for image in images], file)
        archive = pack(file, wanted, has)
        try:
            _send(target, archive, say)
        except ImageError as error:
            if not has:
                raise
            say(f"    {error}; once more with all layers")
            _send(target, pack(file, wanted, set()), say)


def _save(names: Sequence[str], file: IO[bytes]) -> None:
    done = subprocess.run(
        ("docker", "save", *names),
        stdout=file,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        timeout=SAVE_TIMEOUT_S,
    )
    if done.returncode:
        raise ImageError(f"`docker save` failed on this machine: {done.stderr.decode(errors='replace').strip()[-300:]}")


def _send(target: Target, archive: Archive, say: Callable[[str], None]) -> None:
    unpack = ["docker", "load", "--quiet"]
    if shutil.which("zstd"):
        # an engine may know gzip alone; and what serves meanwhile goes first
        unpack = ["sh", "-c", "nice zstd --decompress --stdout --quiet | docker load --quiet"]
    told = 0.0

    def progress(done: int) -> None:
        nonlocal told
        share = done / (archive.size or 1)
        if share >= told + PROGRESS_STEP:
            told = share - share % PROGRESS_STEP
            say(f"    {min(share, 1):.0%} of {archive.size / MB:.1f} MB")

    with tempfile.TemporaryFile() as said:
        remote = subprocess.Popen(ssh.command(target, *unpack), stdin=subprocess.PIPE, stdout=said, stderr=said)
        line = cast(IO[bytes], remote.stdin)
        stop = Timer(CARRY_TIMEOUT_S, remote.kill)
        stop.start()
        try:
            broken = False
            try:
                with _compressed(line) as out:
                    write(archive, out, progress)
            except (BrokenPipeError, ConnectionError):
                broken = True  # the other side's words say why
            with suppress(OSError):
                line.close()
            code = remote.wait()
        finally:
            stop.cancel()
            remote.kill()
            remote.wait()
        said.seek(0)
        words = said.read().decode(errors="replace").strip().splitlines()[-3:]
    if code or broken:
        raise ImageError(f"docker load on the VM failed: {' '.join(words) or f'it ended with {code}'}")


@contextmanager
def _compressed(out: IO[bytes]) -> Iterator[IO[bytes]]:
    """By zstd, which halves it faster than a network is; as it is where this machine has none."""
    if not shutil.which("zstd"):
        yield out
        return
    zstd = subprocess.Popen(("nice", "zstd", "-1", "-T0", "--quiet", "--stdout"), stdin=subprocess.PIPE, stdout=out)
    feed = cast(IO[bytes], zstd.stdin)
    try:
        yield feed
        feed.close()
        if zstd.wait():
            raise BrokenPipeError
    finally:
        with suppress(OSError):
            feed.close()
        zstd.kill()
        zstd.wait()
