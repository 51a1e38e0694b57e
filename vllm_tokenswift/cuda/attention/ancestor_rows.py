"""Which rows of its request each query row attends to, packed by compiled code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.common.compiled import entry

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@entry
def pack_rows(starts: Ints, num_drafts: Ints, parents: Ints, ancestors: Longs) -> None:
    """Fills ``ancestors[: starts[-1]]``, int64 ``[rows, 2]``, see :func:`pack_ancestors`.

    Args:
        starts: int32 ``[requests + 1]``, first query row of each request.
        num_drafts: int32 ``[requests]``, nodes of its tree, which are its last rows; the rows
            before them follow each other.
        parents: int32, of the requests' trees one after another (see
            :class:`~vllm_tokenswift.tree.DraftTree`).
    """
    one = np.int64(1)
    node = 0
    for request in range(len(num_drafts)):
        start = starts[request]
        num_rows = starts[request + 1] - start
        root = num_rows - num_drafts[request] - 1
        for row in range(num_rows):
            if row == 0:
                ancestors[start, 0] = ancestors[start, 1] = 0
                continue
            above = row - 1
            if row > root:
                above = root + parents[node]
                node += 1
            for word in range(2):
                ancestors[start + row, word] = ancestors[start + above, word]
            bit = row - 1
            ancestors[start + row, bit // 64] |= one << np.int64(bit % 64)
