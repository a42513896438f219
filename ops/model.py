"""The embedding model: which files it is made of, and their checksums. Its folder on the VM is named by them."""

from __future__ import annotations

import hashlib
import shlex
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from ops.facts import remote
from ops.program import stream
from ops.runner import Deploy

#: The one that the app is made for. compose/model.sha256 has the checksums of its files at this revision.
NAME: Final = "intfloat/multilingual-e5-small"
REVISION: Final = "614241f622f53c4eeff9890bdc4f31cfecc418b3"
HUB: Final = "https://huggingface.co"
FOLDER: Final = "/var/lib/warmstart/model"
NAME_CHARS: Final = 12
#: Folders that downloaders leave beside the files.
LEFT_OUT: Final = frozenset({".cache", ".git", "__pycache__"})
MAX_FILES: Final = 200
CHUNK: Final = 1 << 20
TRANSFER_TIMEOUT_S: Final = 2 * 3600
CHECK_TIMEOUT_S: Final = 300
#: What of it runs on the VM.
PROGRAM: Final = Path(__file__).parent / "vm" / "model.py"


class ModelError(Exception):
    """The model can't be had; with the way out."""


@dataclass(frozen=True)
class Model:
    #: path → SHA-256
    checksums: dict[str, str]
    #: on this machine; None: the VM fetches it
    source: Path | None = None

    @property
    def lines(self) -> str:
        """As `sha256sum --check` takes them."""
        return "".join(f"{checksum}  {path}\n" for path, checksum in sorted(self.checksums.items()))

    @property
    def folder(self) -> str:
        """On the VM. Another model is another folder, so its container is made anew."""
        return f"{FOLDER}/{hashlib.sha256(self.lines.encode()).hexdigest()[:NAME_CHARS]}"

    def write(self, names: Sequence[str], out: IO[bytes]) -> None:
        """A tar of these files of this machine."""
        with tarfile.open(fileobj=out, mode="w|", bufsize=CHUNK, dereference=True) as tar:
            for name in names:
                tar.add(Path(self.source or "") / name, name)


def pinned(root: Path) -> Model:
    lines = (root / "compose" / "model.sha256").read_text().splitlines()
    return Model({path: checksum for checksum, _, path in (line.partition("  ") for line in lines)})


def of_folder(folder: Path) -> Model:
    """Raises ModelError."""
    files = sorted(
        path for path in folder.rglob("*") if path.is_file() and not LEFT_OUT & set(path.relative_to(folder).parts)
    )
    if len(files) > MAX_FILES:
        raise ModelError(
            f"model: {folder} has {len(files)} files, a model has fewer than {MAX_FILES}: give its own folder"
        )
    checksums = {}
    for path in files:
        with path.open("rb") as file:
            checksums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return Model(checksums, folder)


def fetch(deploy: Deploy, model: Model) -> tuple[bool, list[str]]:
    """By the VM itself."""
    return _on_vm(deploy, model, "fetch", timeout_s=TRANSFER_TIMEOUT_S)


def carry(deploy: Deploy, model: Model) -> tuple[bool, list[str]]:
    """From this machine, what the VM doesn't have of it."""
    lacking = remote(_command(model, "missing"), stdin=PROGRAM.read_text())
    if not lacking.ok:
        return False, [lacking.last_error]
    if names := lacking.out.split("\n") if lacking.out.strip() else []:
        folder, part = model.folder.rsplit("/", 1)
        unpack = ("tar", "--extract", "--no-same-owner", "--directory", f"{folder}/.{part}.part")
        ok, last = stream(deploy, *unpack, stdin=lambda out: model.write(names, out), timeout_s=TRANSFER_TIMEOUT_S)
        if not ok:
            return ok, last
    return _on_vm(deploy, model, "place", timeout_s=CHECK_TIMEOUT_S)


def _on_vm(deploy: Deploy, model: Model, mode: str, *, timeout_s: float) -> tuple[bool, list[str]]:
    return stream(deploy, *_words(model, mode), stdin=PROGRAM.read_bytes(), timeout_s=timeout_s)


def _command(model: Model, mode: str) -> str:
    return shlex.join(_words(model, mode))


def _words(model: Model, mode: str) -> list[str]:
    return ["python3", "-", mode, model.folder, f"{HUB}/{NAME}/resolve/{REVISION}", *model.lines.splitlines()]
