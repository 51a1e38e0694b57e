"""The verify top-k: what the target found likeliest at the nodes that it verified.

It tells more than the drawn tokens do, at nodes too that were not accepted. A row of int32 for
each node: the ids of the ``TOP_K`` likeliest tokens, the likeliest first, and behind them their
probabilities (the bits of float32), under all that the request asks for (penalty, temperature,
min-p, ...). Ids are -1 where no further token has a probability of ``LEAST_PROBABILITY``; a row
that begins with -1 tells nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tokenswift.common.arrays import Ints
from vllm_tokenswift.tree import DraftTree

TopKRows = Ints  # [nodes, TOP_K_COLUMNS]

TOP_K = 8
TOP_K_COLUMNS = 2 * TOP_K
LEAST_PROBABILITY = 0.01
NO_TOKEN = -1


@dataclass(frozen=True)
class VerifyTopK:
    """The verify top-k of one request's step.

    Attributes:
        tree: what was verified; node 0 is the bonus token that stood before it.
        top_k: int32 ``[len(tree) + 1, TOP_K_COLUMNS]``, by node.
    """

    tree: DraftTree
    top_k: TopKRows
