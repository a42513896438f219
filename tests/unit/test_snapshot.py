"""What a held tenant is made of, without a table."""

from __future__ import annotations

import numpy as np

from warmstart.store.snapshot import _HALVES_SCALE, _widened


def test_every_half_is_widened_exactly() -> None:
    halves = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    finite = halves[np.isfinite(halves)]
    assert len(finite) == 62 * 1024
    assert (_widened(finite) * _HALVES_SCALE).tobytes() == finite.astype(np.float32).tobytes()
