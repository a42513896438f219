"""Which repository this is: its root, its remote, and the namespace of its memories."""

from __future__ import annotations

import hashlib
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from warmstart.errors import ConfigError

PREFIX: Final = "code-"
MAX_NAMESPACE: Final = 64
DIGITS: Final = 6
_MAX_CONFIG_BYTES: Final = 1 << 20
_MAX_POINTER_BYTES: Final = 4_096
_SECTION: Final = re.compile(r'^\s*\[\s*remote\s+"(.*)"\s*\]')
_URL: Final = re.compile(r"^\s*url\s*=\s*(.*?)\s*$", re.IGNORECASE)
_SCP: Final = re.compile(r"^(?:[^@/]+@)?([^:/]+):(?!//)(.+)$")
_SCHEME: Final = re.compile(r"^[a-z+]+://(?:[^@/]*@)?(.+)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Repository:
    root: Path
    namespace: str
    #: Six hex digits of its remote, or of where it lies: two of one name must not mistake each other's memories.
    identity: str


def find(path: Path | None) -> Repository:
    """`path` itself, or the repository around the current directory. Raises ConfigError."""
    root = (path or _around(Path.cwd())).resolve()
    if not root.is_dir():
        raise ConfigError([f"{root} is no directory: name the directory of a repository"])
    if not root.name:
        raise ConfigError([f"{root} has no name to call its memories by: name the directory of a repository"])
    remote = _remote(root)
    origin = remote or f"{socket.gethostname()}:{root}"
    return Repository(root, namespace_of(root.name, remote), _digits(origin))


def namespace_of(name: str, remote: str) -> str:
    """`code-` and the name in lower case, other characters as `-`, cut to fit; digits mark what that changed."""
    plain = re.sub(r"[^a-z0-9._-]", "-", name.lower())
    if plain == name and len(PREFIX + plain) <= MAX_NAMESPACE:
        return PREFIX + plain
    ending = "-" + _digits(remote or name)
    return PREFIX + plain[: MAX_NAMESPACE - len(PREFIX) - len(ending)] + ending


def _digits(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:DIGITS]


def _around(start: Path) -> Path:
    for directory in (start, *start.parents):
        if (directory / ".git").exists():
            return directory
    return start


def _remote(root: Path) -> str:
    """The URL of `origin`, else of the first remote, as host and path: without user, secrets and way of access.

    Read from git's own file, since git itself may not be there, and would run what a hostile configuration says.
    """
    try:
        text = _head(_git_directory(root) / "config", _MAX_CONFIG_BYTES)
    except OSError:
        return ""
    urls: dict[str, str] = {}
    section = ""
    for line in text.splitlines():
        if line.lstrip().startswith("["):
            match = _SECTION.match(line)
            section = match.group(1) if match else ""
        elif section and (match := _URL.match(line)):
            urls.setdefault(section, match.group(1).strip('"'))
    return _canonical(urls.get("origin") or next(iter(urls.values()), ""))


def _canonical(url: str) -> str:
    if match := _SCHEME.match(url):
        plain = match.group(1)
    elif match := _SCP.match(url):
        plain = f"{match.group(1)}/{match.group(2)}"
    else:
        plain = url
    return plain.rstrip("/").removesuffix(".git").lower()


def _git_directory(root: Path) -> Path:
    """Of a worktree or a submodule, `.git` is a file that says where it is."""
    git = root / ".git"
    if git.is_dir():
        return git
    directory = root / _head(git, _MAX_POINTER_BYTES).strip().removeprefix("gitdir:").strip()
    try:
        return directory / _head(directory / "commondir", _MAX_POINTER_BYTES).strip()
    except OSError:
        return directory


def _head(file: Path, most: int) -> str:
    with file.open("rb") as opened:
        return opened.read(most).decode(errors="replace")
