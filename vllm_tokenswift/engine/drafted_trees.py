"""Trees that were drafted, until the scheduler asks for them or for something else."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.engine.step_trees import NO_TREES, RequestTree, StepTrees
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree


class DraftedTrees:
    """By request, the tree that a coming step may bring.

    Args:
        known: the requests that there are; trees of others are not taken.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = known
        self._trees: dict[str, DraftTree] = {}

    def expect(self, trees: Mapping[str, DraftTree]) -> None:
        """Keeps trees, by request, until a step brings them."""
        self._trees.update(
            (req_id, tree) for req_id, tree in trees.items() if req_id in self._known
        )

    def forget(self, req_id: str) -> None:
        """Drops a request's tree, if there is one."""
        self._trees.pop(req_id, None)

    def take_scheduled(
        self,
        drafts: Mapping[str, list[int]],
        req_ids: list[str],
        num_scheduled_tokens: npt.NDArray[np.int32],
        computed: npt.NDArray[np.int32],
    ) -> StepTrees:
        """The trees of a step, which are not expected any longer.

        Args:
            drafts: what the scheduler asks for: token ids by request.
            req_ids: the batch, by batch row.
            num_scheduled_tokens: int32 ``[requests]``, query rows of each; its drafts are the
                last ones.
            computed: int32 ``[requests]``, tokens whose KV is there before the step.
        """
        if not drafts:
            return NO_TREES
        trees = []
        stop = 0
        for batch_row, req_id in enumerate(req_ids):
            start, stop = stop, stop + int(num_scheduled_tokens[batch_row])
            tokens = drafts.get(req_id)
            if not tokens:
                continue
            # A tree is applied only to the very tokens it was drafted with: vLLM may have cut the
            # list, and drafts that are not ours (padding) are a chain.
            drafted = self._trees.pop(req_id, EMPTY_TREE).truncate(len(tokens))
            tree = drafted if drafted.tokens.tolist() == tokens else DraftTree.chain(tokens)
            root_row = stop - len(tokens) - 1
            position = int(computed[batch_row]) + root_row - start
            trees.append(RequestTree(req_id, batch_row, start, root_row, position, tree))
        return StepTrees(tuple(trees))
