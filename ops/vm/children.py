"""Programs that a backup, drill or restore starts: they end with it, and hear of secrets by their environment alone."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from .stack import ERROR_LINES, Refused, VmError

_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None, use_errno=True)


def run_child(
    command: Sequence[str], name: str, environment: Mapping[str, str] | None = None, *,
    cwd: Path | None = None, text: str = "", stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None,
    timeout_s: float,
) -> str:  # fmt: skip
    """Standard output (empty where it goes to `stdout`). Raises VmError with its last words.

    The child ends with this process, however that ends: a backup that is killed leaves no restic at work on files
    that the next one removes.
    """
    kept = {n: os.environ[n] for n in ("PATH", "HOME", "DOCKER_HOST") if n in os.environ}
    given: dict[str, object] = {"input": text.encode()} if text else {"stdin": stdin or subprocess.DEVNULL}
    try:
        done = subprocess.run(  # type: ignore[call-overload]
            command, cwd=cwd, env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **kept, **(environment or {})}, **given,
            stdout=stdout or subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout_s, preexec_fn=_die_with_parent,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise VmError(f"{name} took over {timeout_s:.0f} s") from None
    except FileNotFoundError:
        raise Refused(f"{command[0]} is not installed on this machine: deploy to it") from None
    out = str((done.stdout or b"").decode(errors="replace"))
    if done.returncode:
        # what it says as JSON is for programs
        said = ("" if "--json" in command else out) + str(done.stderr.decode(errors="replace"))
        lines = [line for line in said.splitlines() if line.strip()]
        raise VmError(f"{name} ended with {done.returncode}:\n" + "\n".join(lines[-ERROR_LINES:]))
    return out


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
