"""Debian packages: one operation that does nothing, and asks no mirror, where all are installed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Final

from pyinfra import host
from pyinfra.api import operation
from pyinfra.facts.deb import DebPackages

#: A new VM often upgrades itself at its first boot: that may hold the lock for minutes.
LOCK_WAIT_S: Final = 600
LISTS_FRESH_MIN: Final = 24 * 60
APT: Final = (
    f"DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout={LOCK_WAIT_S} -o Acquire::Retries=3 "
    "-o Dpkg::Options::=--force-confdef -o Dpkg::Options::=--force-confold"
)
#: apt's folder for what it is just fetching tells when it last did; the lists have their dates from the mirror.
FRESH_LISTS: Final = (
    f'test -n "$(find /var/lib/apt/lists/partial -maxdepth 0 -mmin -{LISTS_FRESH_MIN})" && '
    "ls /var/lib/apt/lists/*Packages* >/dev/null 2>&1"
)


@operation()
def installed(packages: Sequence[str]) -> Generator[str, None, None]:
    """Installs those that are missing, without what they only recommend."""
    have = host.get_fact(DebPackages)
    missing = [name for name in packages if name not in have]
    if not missing:
        host.noop(f"installed: {' '.join(packages)}")
        return
    names = " ".join(missing)
    yield f"{{ {FRESH_LISTS}; }} || {APT} update"
    # lists of yesterday may name a version that the mirror has no more
    install = f"{APT} install -y --no-install-recommends {names}"
    yield f"{install} || {{ {APT} update && {install}; }}"
