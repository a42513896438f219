"""Becomes Postgres: run as `python -I postgres_launcher.py OWNER_PID UID GID TRAVERSE binary arguments…`.

Gives up root for UID and GID (negative: stays who it is), asks the kernel to
shut Postgres down when its owner dies, and executes the binary. It stands alone
(standard library only) and is its own process, since a `preexec_fn` is not safe
in an owner that has threads. TRAVERSE 1 keeps one capability: to pass through
parent directories that only root may enter, instead of opening them to all users.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 8, 47, 2
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
CAPABILITY_VERSION_3 = 0x20080522


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inheritable", ctypes.c_uint32),
    )


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), what)


def _traversal_capability(libc: ctypes.CDLL) -> int:
    """The narrowest one we have; containers often leave root only the wider."""
    header, sets = _Header(CAPABILITY_VERSION_3, 0), (_Sets * 2)()
    _check(libc.capget(ctypes.byref(header), sets), "capget")
    for capability in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE):
        if sets[0].permitted & (1 << capability):
            return capability
    raise PermissionError("no capability to pass through private directories")


def _keep(libc: ctypes.CDLL, capability: int) -> None:
    header, sets = _Header(CAPABILITY_VERSION_3, 0), (_Sets * 2)()
    sets[0].effective = sets[0].permitted = sets[0].inheritable = 1 << capability
    _check(libc.capset(ctypes.byref(header), sets), "capset")
    _check(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, capability, 0, 0), "PR_CAP_AMBIENT")


def main(owner: int, uid: int, gid: int, traverse: bool, command: list[str]) -> None:
    linux = sys.platform == "linux"
    libc = ctypes.CDLL(None, use_errno=True)
    if uid >= 0:
        capability = _traversal_capability(libc) if traverse else None
        if capability is not None:
            _check(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "PR_SET_KEEPCAPS")
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        if capability is not None:
            _keep(libc, capability)
    if linux:
        # after setuid, which clears it; SIGINT is Postgres's fast, clean shutdown
        _check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0), "PR_SET_PDEATHSIG")
        if os.getppid() != owner:
            raise SystemExit("the owner is gone")
    os.umask(0o077)
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1", sys.argv[5:])
    except OSError as error:
        raise SystemExit(f"Postgres can't be started: {error}") from None
