"""What one step verifies: which query rows hold which request's draft tree.

Index spaces: a *batch row* is a request's place in vLLM's persistent batch; a
*query row* is a token's place in the flattened input of the step; a *position*
is a token's place in its sequence; a *slot* is ``physical block * block size +
offset`` in the paged KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.tree import EMPTY_TREE, DraftTree


@dataclass(frozen=True)
class RequestTree:
    """One request's tree in the step.

    query_start: the request's first query row; it stands before ``root_row``
        where the step also computes tokens that were accepted earlier (a
        resumed request).
    root_row: the query row of node 0, the bonus token; node ``i`` is row
        ``root_row + i``.
    root_position: sequence position of the bonus token; node ``i`` has position
        ``root_position + depth(i)`` and KV slot of position ``root_position + i``.
    """

    req_id: str
    batch_row: int
    query_start: int
    root_row: int
    root_position: int
    tree: DraftTree

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """int64 ``[n + 1]``: the position of every node, by depth."""
        return self.root_position + self.tree.depths.astype(np.int64)


@dataclass(frozen=True)
class StepTrees:
    """The trees of one step, in batch-row order; requests without drafts are absent."""

    trees: tuple[RequestTree, ...] = ()

    @cached_property
    def parents(self) -> npt.NDArray[np.int32]:
        """int32 ``[drafts]``: the trees' parents, one after another."""
        return np.concatenate([EMPTY_TREE.parents, *(rows.tree.parents for rows in self.trees)])

    @property
    def branching(self) -> tuple[RequestTree, ...]:
        """The trees that are not chains: only these need more than causal attention."""
        return tuple(t for t in self.trees if not t.tree.is_chain)


NO_TREES = StepTrees()
