"""What the target found likeliest at the nodes that it verified: more than the drawn tokens say.

A row of int32 for each node: the ids of the ``NUM_LIKELIEST`` likeliest tokens, the likeliest
first, and behind them their probabilities (the bits of float32), under all that the request
asks for (penalty, temperature, min-p, ...). Ids are -1 where no further token has a probability of
``LEAST_PROBABILITY``; in a row that begins with -1 nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.tree import DraftTree

Likeliest = npt.NDArray[np.int32]  # [nodes, COLUMNS]

NUM_LIKELIEST = 8
COLUMNS = 2 * NUM_LIKELIEST
LEAST_PROBABILITY = 0.01
NOTHING = -1


@dataclass(frozen=True)
class VerifyTopK:
    """What a verify pass said.

    tree: what was verified; node 0 is the bonus token that stood before it.
    said: ``[len(tree) + 1, COLUMNS]``, by node, those that were not accepted too.
    """

    tree: DraftTree
    said: Likeliest
