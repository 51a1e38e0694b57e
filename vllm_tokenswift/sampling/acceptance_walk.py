"""The walks through a batch of draft trees, and what they emit.

Index spaces: a *group* is a batch row; it owns ``len(tree) + 1`` consecutive
*logits rows*, one per tree node, node 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_tokenswift.draft.top_tokens import NO_TOKEN, TOP_K_COLUMNS, TopKRows
from vllm_tokenswift.sampling.logprobs import EmittedToken, wants_logprobs
from vllm_tokenswift.sampling.sampling_state import SamplingState
from vllm_tokenswift.tree import DraftTree


@dataclass(frozen=True)
class VerifyRows:
    """The logits rows of one batch row: ``len(tree) + 1`` in a row, node by node.

    Args:
        req_id: the request's id, as vLLM has it.
        tree: what was verified; ``EMPTY_TREE`` for a plain decode step or the last chunk of
            a prompt.
        discard: whether this is a partial prefill. It has its one logits row, but nothing is
            sampled and no noise is drawn.
        dead_nodes: nodes that were not verified; the walk never enters them.
        wants_top_k: whether to return the verify top-k of its nodes.
    """

    req_id: str
    tree: DraftTree
    discard: bool = False
    dead_nodes: frozenset[int] = frozenset()
    wants_top_k: bool = False


@dataclass(frozen=True)
class VerifyResult:
    """What one group emits.

    Args:
        nodes: the accepted draft nodes, from the root's child down.
        tokens: their tokens and one more; empty for a discarded group.
        top_k: int32 ``[nodes of the tree, TOP_K_COLUMNS]``, the verify top-k of each node
            that was sampled at (``draft/top_tokens.py``); None where the group wants none.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    top_k: TopKRows | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Place:
    """A node to sample at, and the draft tokens on its path.

    Args:
        group: index of the group.
        node: index of the node in the group's tree, 0 the bonus token.
        path: the draft tokens from the root's child down to the node; empty for node 0.
    """

    group: int
    node: int
    path: list[int]


@dataclass
class AcceptanceWalk:
    """One call's walks through the trees of all groups, and what they emit.

    Args:
        groups: the batch rows, in the order of their logits rows.
        first_rows: for each group the logits row of its node 0.
        states: for each group its request's sampling state.
        logits: ``[rows, vocab]``, any float dtype; only read.
        processed: float32 ``[rows, vocab]``, takes the constrained logits of each sampled
            row; None where nobody wants to see them.

    Attributes:
        results: what each group has emitted so far.
        top_k: int32 ``[rows, TOP_K_COLUMNS]``, the verify top-k of the rows of groups that
            want it, which ``results`` hold views of; None where none does.
    """

    groups: Sequence[VerifyRows]
    first_rows: Sequence[int]
    states: Sequence[SamplingState]
    logits: torch.Tensor
    processed: torch.Tensor | None
    results: list[VerifyResult] = field(init=False)
    top_k: TopKRows | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if any(group.wants_top_k and not group.discard for group in self.groups):
            self.top_k = np.full((len(self.logits), TOP_K_COLUMNS), NO_TOKEN, np.int32)
        self.results = [
            VerifyResult(top_k=self._top_k_of(first_row, group) if group.wants_top_k else None)
            for first_row, group in zip(self.first_rows, self.groups, strict=True)
        ]

    def _top_k_of(self, first_row: int, group: VerifyRows) -> TopKRows | None:
        if self.top_k is None:
            return None
        return self.top_k[first_row : first_row + len(group.tree) + 1]

    def clear_dead_nodes(self) -> None:
        """Nodes that were not verified have no verify top-k; :attr:`top_k` must be there."""
        assert self.top_k is not None
        for first_row, group in zip(self.first_rows, self.groups, strict=True):
            for node in group.dead_nodes:
                self.top_k[first_row + node] = NO_TOKEN

    def row_of(self, place: Place) -> int:
        """The logits row of a place."""
        return self.first_rows[place.group] + place.node

    def logits_of(self, places: Sequence[Place]) -> torch.Tensor:
        """Float32 ``[places, vocab]``, a copy that may be overwritten."""
        rows = [self.row_of(place) for place in places]
        if rows == list(range(len(self.logits))):
            return self.logits.to(torch.float32, copy=True)
        index = torch.tensor(rows, device=self.logits.device)
        return self.logits.index_select(0, index).to(torch.float32)

    def keep_processed(self, places: Sequence[Place], logits: torch.Tensor) -> None:
        """Copies constrained logits into :attr:`processed`, where that is wanted.

        Args:
            places: where they were sampled at.
            logits: float32 ``[places, vocab]``, as the constraints made them.
        """
        if self.processed is not None:
            rows = [self.row_of(place) for place in places]
            self.processed[torch.tensor(rows, device=logits.device)] = logits

    def roots(self) -> list[Place]:
        """Where the walks begin: node 0 of each group that is not discarded."""
        return [Place(i, 0, []) for i, group in enumerate(self.groups) if not group.discard]

    def emit_token(self, place: Place, token: int) -> Place | None:
        """Emit a token, and go on to the child that it leads to.

        Args:
            place: where the walk stands.
            token: the token that was sampled there.

        Returns:
            The child, which is accepted; None where there is none, and the walk ends.
        """
        group, result = self.groups[place.group], self.results[place.group]
        result.tokens.append(token)
        child = group.tree.children[place.node].get(token)
        if child is None or child in group.dead_nodes:
            return None
        result.nodes.append(child)
        return Place(place.group, child, [*place.path, token])

    def reachable_places(self, root: Place) -> list[Place]:
        """Every place that some sequence of tokens leads to from ``root``, which is the first."""
        group = self.groups[root.group]
        vocab_size = self.logits.shape[1]
        places = {0: root}
        for node, children in enumerate(group.tree.children):
            if node not in places:
                continue
            for token, child in children.items():
                # A placeholder (-1) is no token: nothing can be sampled below it.
                if child not in group.dead_nodes and 0 <= token < vocab_size:
                    path = [*places[node].path, token]
                    places[child] = Place(root.group, child, path)
        return list(places.values())

    def emitted_with_logprobs(self) -> tuple[list[EmittedToken], int]:
        """The emitted tokens whose requests want logprobs, and the number of slots.

        A slot is a place of the padded ``[groups, width]`` token matrix, flattened.
        """
        width = max([1, *(len(result.tokens) for result in self.results)])
        emitted = [
            EmittedToken(state, token, i * width + j, self.first_rows[i] + node)
            for i, (state, result) in enumerate(zip(self.states, self.results, strict=True))
            if wants_logprobs(state)
            for j, (node, token) in enumerate(zip([0, *result.nodes], result.tokens, strict=True))
        ]
        return emitted, width * len(self.groups)
