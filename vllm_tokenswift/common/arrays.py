"""Types of the arrays that compiled functions take.

By convention one specialisation of each suffices (``compiled.py``): token ids, nodes and places
are :data:`Ints`, chances and rates :data:`Floats`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Weights = npt.NDArray[np.float32]
"""Counts that fade, and probabilities as a kernel writes them."""
Keys = npt.NDArray[np.uint64]
"""What the noise of positions is made from (``draft/gumbel_noise.py``)."""
