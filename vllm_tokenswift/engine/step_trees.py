"""What one step verifies: which query rows hold which request's draft tree.

Index spaces: a *batch row* is a request's place in vLLM's persistent batch; a
*query row* is a token's place in the flattened input of the step; a *position*
is a token's place in its sequence; a *slot* is ``physical block * block size +
offset`` in the paged KV cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.tree import EMPTY_TREE, DraftTree


@dataclass(frozen=True)
class RequestTree:
    """One request's tree in the step.

    Attributes:
        req_id: the request.
        batch_row: its place in the batch.
        query_start: the request's first query row; it stands before ``root_row`` where the step
            also computes tokens that were accepted earlier (a resumed request).
        root_row: the query row of node 0, the bonus token; node ``i`` is row ``root_row + i``.
        root_position: sequence position of the bonus token; node ``i`` has position
            ``root_position + depth(i)`` and the KV slot of position ``root_position + i``.
        tree: its drafts.
    """

    req_id: str
    batch_row: int
    query_start: int
    root_row: int
    root_position: int
    tree: DraftTree

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """int64 ``[nodes + 1]``: the position of every node, by depth."""
        return self.root_position + self.tree.depths.astype(np.int64)


@dataclass(frozen=True)
class StepTrees:
    """The trees of one step, in batch-row order; requests without drafts are absent."""

    trees: tuple[RequestTree, ...] = ()

    @classmethod
    def of_decodes(
        cls,
        req_ids: Sequence[str],
        trees: Sequence[DraftTree],
        num_rows: npt.NDArray[np.int32],
        computed: npt.NDArray[np.int32],
    ) -> StepTrees:
        """Those of a step in which every request has the rows of its tree and no others.

        Args:
            req_ids: the requests, by batch row.
            trees: their trees, which may be empty.
            num_rows: int32 ``[requests]``, query rows of each: its drafts' and one.
            computed: int32 ``[requests]``, tokens whose KV is there before the step.
        """
        starts = np.cumsum(num_rows) - num_rows
        by_row = zip(req_ids, starts.tolist(), computed.tolist(), trees, strict=True)
        return cls(
            tuple(
                RequestTree(req_id, batch_row, start, start, position, tree)
                for batch_row, (req_id, start, position, tree) in enumerate(by_row)
                if len(tree)
            )
        )

    @cached_property
    def parents(self) -> npt.NDArray[np.int32]:
        """int32 ``[drafts]``: the trees' parents, one after another."""
        return np.concatenate([EMPTY_TREE.parents, *(rows.tree.parents for rows in self.trees)])

    @property
    def branching(self) -> tuple[RequestTree, ...]:
        """The trees that are not chains: only these need more than causal attention."""
        return tuple(rows for rows in self.trees if not rows.tree.is_chain)


NO_TREES = StepTrees()
