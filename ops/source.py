"""The committed tree that is deployed: its commit, and its files. A tree with changes is refused."""

from __future__ import annotations

import getpass
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
GIT_TIMEOUT_S: Final = 60
SHOWN_FILES: Final = 10


class SourceError(Exception):
    """The tree can't be deployed as it is."""


@dataclass(frozen=True)
class Source:
    """A commit of the tree at `root`, and who deploys it."""

    root: Path
    commit: str
    who: str

    @property
    def short(self) -> str:
        return self.commit[:7]

    def archive(self, *paths: str) -> bytes:
        """A tar of these files and folders as they were committed."""
        return _git(self.root, "archive", "--format=tar", self.commit, "--", *paths)


def committed(root: Path = ROOT) -> Source:
    """Raises SourceError where there is no commit, or files that differ from it."""
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    if changed := _git(root, "status", "--porcelain").decode().splitlines():
        more = f"\n  and {len(changed) - SHOWN_FILES} more" if len(changed) > SHOWN_FILES else ""
        files = "\n".join(f"  {line}" for line in changed[:SHOWN_FILES])
        raise SourceError(
            "What runs on the VM has to be in a commit, and these files are not as committed:\n"
            f"{files}{more}\nCommit them, or `git stash --include-untracked`, then deploy again."
        )
    return Source(root, commit, f"{getpass.getuser()}@{socket.gethostname()}")


def _git(root: Path, *words: str) -> bytes:
    try:
        done = subprocess.run(("git", "-C", root, *words), capture_output=True, timeout=GIT_TIMEOUT_S)
    except FileNotFoundError:
        raise SourceError("git is not installed on this machine, and a deploy starts from a commit") from None
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise SourceError(f"`git {' '.join(words)[:80]}` failed in {root}: {' '.join(last)}")
    return done.stdout
