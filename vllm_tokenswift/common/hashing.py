"""Open addressing in numpy arrays: where the entry of a key lies in a table.

A table's length is a power of two; an entry lies at its hash's place or, where that is taken,
as soon after it as there was room. Tables are at most half full.
"""

from __future__ import annotations

import numpy as np

from vllm_tokenswift.common.compiled import inner

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_HIGH = np.uint64(32)
_SIGN = np.uint64(1)


@inner
def hashed(first: int, second: int) -> int:
    """A number >= 0 that depends on every bit of both."""
    state = np.uint64(first) * _GOLDEN + np.uint64(second)
    state = (state ^ (state >> _HIGH)) * _MIX
    state = (state ^ (state >> _HIGH)) * _GOLDEN
    return int(np.int64((state ^ (state >> _HIGH)) >> _SIGN))
