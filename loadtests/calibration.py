"""How fast this machine is now, beside the one on which the gate's limits were set."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

TRIES: Final = 5
ROUNDS: Final = 12
BYTES: Final = 1 << 20
#: Two cores, as the limits have it, however many there are.
CORES: Final = 2
#: Seconds of `work` on two quiet cores of the machine in README.md.
REFERENCE_S: Final = 0.5
#: A machine that is slower than that says nothing about the service.
MOST: Final = 2.0


def work() -> float:
    """Seconds that the same work takes on two cores at once; what else runs on them makes it longer."""
    dice = random.Random(1)
    data = bytes(dice.choices(range(64), k=BYTES))
    began = time.perf_counter()
    with ThreadPoolExecutor(CORES) as pool:
        # compression lets go of the interpreter's lock
        list(pool.map(lambda _: [zlib.compress(data, 6) for _ in range(ROUNDS)], range(CORES)))
    return time.perf_counter() - began


def slowness(times: Sequence[float] | None = None) -> float:
    """By how much longer the work takes here: 1 to MOST, from the middle of some tries."""
    tried = sorted(work() for _ in range(TRIES)) if times is None else sorted(times)
    return min(max(tried[len(tried) // 2] / REFERENCE_S, 1.0), MOST)
