"""One deploy at a time: who holds the machine, since when, and at which step."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from paramiko import SSHException
from pyinfra.api.exceptions import PyinfraError

from ops.facts import remote
from ops.runner import Deploy, Refused

LOCK: Final = "/run/warmstart/deploy.lock"
#: A deploy says at each step that it is alive. The longest, carrying images over a slow line, may take this long.
STALE_AFTER_S: Final = 30 * 60
WAY_OUT: Final = "make deploy BREAK_LOCK=yes"
#: Which lock is this process's.
TOKEN: Final = uuid.uuid4().hex

#: Since when: a process is one deploy.
BEGAN: Final = time.time()

#: Writes stdin as the lock where it is free, is ours, or is as it was when it was looked at; tells what it finds
#: otherwise. `flock` makes the look and the write one step.
TAKE: Final = """: take the deploy lock
mkdir -p -m 700 "$(dirname {lock})" && exec 9>{lock}.guard && flock -w 20 9 || exit 1
held=$(cat {lock} 2>/dev/null)
case "$held" in
  '' | *'"token": "{token}"'*) ;;
  *) [ "$(printf '%s' "$held" | sha256sum | cut -c 1-64)" = "{seen}" ] || {{ printf '%s' "$held"; exit 0; }} ;;
esac
cat > {lock}.new && mv {lock}.new {lock}
"""
RELEASE: Final = """: release the deploy lock
exec 9>{lock}.guard && flock -w 20 9 && if grep -q '"token": "{token}"' {lock} 2>/dev/null; then rm -f {lock}; fi
"""
READ: Final = f"cat {LOCK} 2>/dev/null || true"


def apply(deploy: Deploy) -> None:
    if deploy.dry:
        if found := remote(READ).out:
            deploy.notes.append(f"A deploy is under way: {describe(_parse(found))}.")
        return
    acquire(deploy)


def acquire(deploy: Deploy) -> None:
    """Raises Refused where another deploy holds the machine."""
    found = _take(deploy, "lock")
    if not found:
        return
    held = _parse(found)
    if _dead_here(held):
        deploy.say(f"    a deploy of this machine was killed, its lock is taken over: {describe(held)}")
    elif deploy.break_lock:
        deploy.say(f"    the lock is broken: {describe(held)}")
    else:
        raise Refused([_refusal(held)])
    if other := _take(deploy, "lock", seen=hashlib.sha256(found.encode()).hexdigest()):
        raise Refused([_refusal(_parse(other))])


def beat(deploy: Deploy, step: str) -> None:
    """Says that this deploy is alive. Raises Refused where somebody broke its lock meanwhile."""
    if step == "lock":  # about to be taken
        return
    if found := _take(deploy, step):
        raise Refused([f"the lock of this deploy was broken; the machine is held by {describe(_parse(found))}"])


def release(deploy: Deploy) -> None:
    """Gives the lock back, if it is this process's."""
    with suppress(PyinfraError, SSHException, OSError, EOFError):
        # without a connection it stays, and the next deploy of this machine takes it over
        remote(RELEASE.format(lock=LOCK, token=TOKEN))


def _take(deploy: Deploy, step: str, seen: str = "") -> str:
    """Empty where this process has the lock now, else the other's."""
    mine = {
        "who": deploy.source.who, "machine": machine(), "pid": os.getpid(), "since": BEGAN, "beat": time.time(),
        "step": step, "commit": deploy.source.commit, "token": TOKEN,
    }  # fmt: skip
    done = remote(TAKE.format(lock=LOCK, token=TOKEN, seen=seen), stdin=json.dumps(mine))
    if not done.ok:
        raise Refused([f"the lock {LOCK} can't be written: {done.last_error}"])
    return done.out


def machine() -> str:
    """The same for every deploy of this machine, and telling nobody which it is."""
    parts = [socket.gethostname(), str(uuid.getnode())]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with suppress(OSError):
            parts.append(Path(path).read_text().strip())
    with suppress(OSError):  # in containers, process ids are of a space of their own
        parts.append(os.readlink("/proc/self/ns/pid"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _parse(text: str) -> dict[str, Any]:
    with suppress(ValueError):
        held = json.loads(text)
        if isinstance(held, dict):
            return held
    return {}


def _dead_here(held: dict[str, Any]) -> bool:
    if held.get("machine") != machine() or not isinstance(held.get("pid"), int):
        return False
    try:
        os.kill(held["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def describe(held: dict[str, Any]) -> str:
    if not held:
        return "nobody knows who: the lock is not readable"
    return (
        f"{held.get('who', 'unknown')}, since {_moment(held.get('since'))}, at the step {held.get('step', 'unknown')}, "
        f"last heard of {_ago(held.get('beat'))} ago"
    )


def _refusal(held: dict[str, Any]) -> str:
    beat_ = held.get("beat")
    if not isinstance(beat_, int | float):
        advice = f"If nobody works on it, {WAY_OUT}"
    elif time.time() - beat_ > STALE_AFTER_S:
        advice = f"Silent for so long, it was probably killed: if nobody works on it, {WAY_OUT}"
    else:
        advice = f"Wait until it is done; if it was killed on its machine, {WAY_OUT}"
    return f"another deploy holds this machine: {describe(held)}. {advice}"


def _moment(at: Any) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC") if isinstance(at, int | float) else "unknown"


def _ago(at: Any) -> str:
    if not isinstance(at, int | float):
        return "an unknown time"
    seconds = max(0, round(time.time() - at))
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60} min"
