"""The walks through a batch of draft trees, and what they emit.

Index spaces: a *group* is a batch row; it owns ``len(tree) + 1`` consecutive
*logits rows*, one per tree node, node 0 first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vllm_tokenswift.draft.top_tokens import COLUMNS, NOTHING, Likeliest
from vllm_tokenswift.sampling.logprobs import EmittedToken, wants_logprobs
from vllm_tokenswift.sampling.sampling_state import SamplingState
from vllm_tokenswift.tree import DraftTree


@dataclass(frozen=True)
class VerifyRows:
    """The logits rows of one batch row: ``len(tree) + 1`` in a row, node by node.

    tree: ``EMPTY_TREE`` for a plain decode step or the last chunk of a prompt.
    discard: a partial prefill. It has its one logits row, but nothing is sampled
        and no noise is drawn.
    dead_nodes: nodes that were not verified; the walk never enters them.
    hears: whether to say what the target found likeliest at its nodes.
    """

    req_id: str
    tree: DraftTree
    discard: bool = False
    dead_nodes: frozenset[int] = frozenset()
    wants_top_k: bool = False


@dataclass(frozen=True)
class VerifyResult:
    """What one group emits.

    nodes: the accepted draft nodes, from the root's child down.
    tokens: their tokens and one more; empty for a discarded group.
    said: ``[nodes of the tree, COLUMNS]``, what the target found likeliest at each that was
        sampled at; None where the group does not hear it.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    said: Likeliest | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Place:
    """A node to sample at, and the draft tokens on its path."""

    group: int
    node: int
    path: list[int]


@dataclass
class AcceptanceWalk:
    """One call's walks through the trees of all groups, and what they emit.

    starts: for each group the logits row of its node 0.
    logits, processed: ``[rows, vocab]``; processed takes the constrained logits of
        each sampled row, where somebody wants to see them.
    """

    groups: Sequence[VerifyRows]
    starts: Sequence[int]
    states: Sequence[SamplingState]
    logits: torch.Tensor
    processed: torch.Tensor | None
    accepted: list[VerifyResult] = field(init=False)
    # int32 ``[rows, COLUMNS]``, of the rows of groups that hear it; None where none does.
    said: Likeliest | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if any(group.wants_top_k and not group.discard for group in self.groups):
            self.said = np.full((len(self.logits), COLUMNS), NOTHING, np.int32)
        self.accepted = [
            VerifyResult(said=self._rows_of(start, group) if group.wants_top_k else None)
            for start, group in zip(self.starts, self.groups, strict=True)
        ]

    def _rows_of(self, start: int, group: VerifyRows) -> Likeliest | None:
        return None if self.said is None else self.said[start : start + len(group.tree) + 1]

    def silence_dead_nodes(self) -> None:
        """Nodes that were not verified have nothing to say."""
        assert self.said is not None
        for start, group in zip(self.starts, self.groups, strict=True):
            for node in group.dead_nodes:
                self.said[start + node] = NOTHING

    def row(self, place: Place) -> int:
        return self.starts[place.group] + place.node

    def logits_of(self, places: Sequence[Place]) -> torch.Tensor:
        """Float32 ``[places, vocab]``, a copy that may be overwritten."""
        rows = [self.row(place) for place in places]
        if rows == list(range(len(self.logits))):
            return self.logits.to(torch.float32, copy=True)
        index = torch.tensor(rows, device=self.logits.device)
        return self.logits.index_select(0, index).to(torch.float32)

    def keep_processed(self, places: Sequence[Place], logits: torch.Tensor) -> None:
        """logits: float32 ``[places, vocab]``, as the constraints made them."""
        if self.processed is not None:
            rows = [self.row(place) for place in places]
            self.processed[torch.tensor(rows, device=logits.device)] = logits

    def roots(self) -> list[Place]:
        return [Place(i, 0, []) for i, group in enumerate(self.groups) if not group.discard]

    def step(self, place: Place, token: int) -> Place | None:
        """Emit ``token``, sampled at ``place``; the child it leads to, if there is one."""
        group, accepted = self.groups[place.group], self.accepted[place.group]
        accepted.tokens.append(token)
        child = group.tree.children[place.node].get(token)
        if child is None or child in group.dead_nodes:
            return None
        accepted.nodes.append(child)
        return Place(place.group, child, [*place.path, token])

    def reachable(self, root: Place) -> list[Place]:
        """Every place that some sequence of steps from ``root`` leads to."""
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
        """The emitted tokens whose requests want logprobs, and the number of slots."""
        width = max([1, *(len(accepted.tokens) for accepted in self.accepted)])
        emitted = [
            EmittedToken(state, token, i * width + j, self.starts[i] + node)
            for i, (state, accepted) in enumerate(zip(self.states, self.accepted, strict=True))
            if wants_logprobs(state)
            for j, (node, token) in enumerate(
                zip([0, *accepted.nodes], accepted.tokens, strict=True)
            )
        ]
        return emitted, width * len(self.groups)
