"""The draft tree: what one request asks the target model to verify in one pass.

Index space: a *tree node*. Node 0 is the bonus token (already sampled, not a
draft); nodes ``1..n`` are drafts. ``parents[i - 1]`` is the parent node of
node ``i`` and is always smaller than ``i``, so every prefix of the node list is
itself a valid tree: vLLM's scheduler may cut the list of draft tokens anywhere.

Nodes stand in *depth-first order, likeliest child first*. Two things follow:
the likeliest path is nodes ``1..m`` (its KV already lies where plain decoding
would have put it), and every chain of only children is contiguous.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt


class Source(IntEnum):
    """Where a draft node came from; the planner learns acceptance for each."""

    UNKNOWN = 0
    SELF = 1
    HEADS = 2
    FREE_HEADS = 3
    NGRAM = 4
    SUFFIX = 5
    CONTEXT = 6


BySource = tuple[int, ...]
"""A number for each :class:`Source`, in its order."""


@dataclass(frozen=True)
class Chain:
    """A run of consecutive nodes in which each is the parent of the next.

    Attributes:
        first: its first node, 0 in the main chain.
        last: its last node.
        ancestors: the nodes above ``first``, nearest last, the bonus token (node 0) included.
    """

    first: int
    last: int
    ancestors: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """Its nodes, ancestors not counted."""
        return self.last - self.first + 1


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A flattened draft tree.

    :meth:`build` converts and checks; the constructor is for arrays that are known to be right.

    Attributes:
        tokens: int32 ``[n]``, the token of node ``i + 1``.
        parents: int32 ``[n]``, the parent node of node ``i + 1``; ``0 <= parents[i] <= i``.
        sources: int8 ``[n]``, a :class:`Source` for each node.
        probabilities: float32 ``[n]``, estimated chance that the node is accepted
            (that the whole path down to it is), or zeros where nobody estimated it.
    """

    tokens: npt.NDArray[np.int32]
    parents: npt.NDArray[np.int32]
    sources: npt.NDArray[np.int8]
    probabilities: npt.NDArray[np.float32]

    @classmethod
    def build(
        cls,
        tokens: Sequence[int] | npt.NDArray[np.int32],
        parents: Sequence[int] | npt.NDArray[np.int32],
        sources: Sequence[int] | npt.NDArray[np.int8] | None = None,
        probabilities: Sequence[float] | npt.NDArray[np.float32] | None = None,
    ) -> DraftTree:
        """A tree of anything that converts to its arrays.

        Args:
            tokens: ``[n]``, of nodes ``1..n``.
            parents: ``[n]``, their parent nodes.
            sources: ``[n]``; :attr:`Source.UNKNOWN` unless given.
            probabilities: ``[n]``; zeros unless given.

        Returns:
            The tree.

        Raises:
            ValueError: where the arrays do not describe a tree.
        """
        n = len(tokens)
        tree = cls(
            np.asarray(tokens, dtype=np.int32),
            np.asarray(parents, dtype=np.int32),
            np.zeros(n, np.int8) if sources is None else np.asarray(sources, dtype=np.int8),
            np.zeros(n, np.float32)
            if probabilities is None
            else np.asarray(probabilities, dtype=np.float32),
        )
        for name in ("parents", "sources", "probabilities"):
            if len(getattr(tree, name)) != n:
                raise ValueError(
                    f"{name} has {len(getattr(tree, name))} entries, tokens has {n}: "
                    "a draft tree holds one of each for every node"
                )
        if n and ((tree.parents < 0) | (tree.parents > np.arange(n))).any():
            raise ValueError("parents[i] must lie in 0..i: a parent stands before its child")
        return tree

    @classmethod
    def chain(cls, tokens: Sequence[int], source: Source = Source.UNKNOWN) -> DraftTree:
        """A tree with one path: what vLLM's own speculative methods draft.

        Args:
            tokens: ``[n]``, from the root's child down.
            source: of all nodes.

        Returns:
            The tree.
        """
        n = len(tokens)
        return cls.build(tokens, np.arange(n), np.full(n, source, np.int8))

    def __len__(self) -> int:
        """Number of draft nodes (the bonus token not counted)."""
        return len(self.tokens)

    def truncate(self, n: int) -> DraftTree:
        """The tree of the first drafts: valid because parents come first.

        Args:
            n: nodes at most.

        Returns:
            The tree, itself where it has no more.
        """
        if n >= len(self):
            return self
        return DraftTree(
            self.tokens[:n], self.parents[:n], self.sources[:n], self.probabilities[:n]
        )

    @cached_property
    def depths(self) -> npt.NDArray[np.int32]:
        """int32 ``[n + 1]``: depth of every node, node 0 included (depth 0)."""
        depths = np.zeros(len(self) + 1, np.int32)
        for i, parent in enumerate(self.parents.tolist(), start=1):
            depths[i] = depths[parent] + 1
        return depths

    @cached_property
    def is_chain(self) -> bool:
        """Whether it has one path only."""
        return bool((self.parents == np.arange(len(self))).all())

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For every node, its children as ``{token: node}``; of equal tokens the first."""
        children: list[dict[int, int]] = [{} for _ in range(len(self) + 1)]
        for i, (token, parent) in enumerate(
            zip(self.tokens.tolist(), self.parents.tolist(), strict=True), start=1
        ):
            children[parent].setdefault(token, i)
        return children

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """The path that tokens go down.

        Args:
            tokens: that follow the bonus token.

        Returns:
            Its nodes from the root's child down, as far as the tree has it.
        """
        nodes: list[int] = []
        children = self.children[0]
        for token in tokens:
            if token not in children:
                break
            nodes.append(children[token])
            children = self.children[nodes[-1]]
        return nodes

    def nodes_by_source(self, accepted_nodes: Sequence[int]) -> tuple[BySource, BySource]:
        """How many nodes came from each source.

        Args:
            accepted_nodes: tree nodes, from 1.

        Returns:
            Of all nodes, and of the accepted ones.
        """
        drafted, accepted = [0] * len(Source), [0] * len(Source)
        sources = self.sources.tolist()
        for source in sources:
            drafted[source] += 1
        for node in accepted_nodes:
            accepted[sources[node - 1]] += 1
        return tuple(drafted), tuple(accepted)

    def path(self, node: int) -> list[int]:
        """The way from the root to a node.

        Args:
            node: a tree node.

        Returns:
            Draft nodes from the root's child down to it (node 0 not included).
        """
        path: list[int] = []
        while node:
            path.append(node)
            node = int(self.parents[node - 1])
        return path[::-1]

    @cached_property
    def chains(self) -> list[Chain]:
        """The nodes ``0..n`` cut into chains, in node order.

        The first is the main chain; each further one starts at a node whose
        parent is not the node before it.
        """
        starts = [0, *(np.flatnonzero(self.parents != np.arange(len(self))) + 1).tolist()]
        chains = []
        for first, nxt in zip(starts, [*starts[1:], len(self) + 1], strict=True):
            ancestors = [0, *self.path(int(self.parents[first - 1]))] if first else []
            chains.append(Chain(first, nxt - 1, tuple(ancestors)))
        return chains

    def mask(self) -> npt.NDArray[np.bool_]:
        """bool ``[n + 1, n + 1]``: ``mask[i, j]`` where node ``i`` attends to node ``j``.

        A node sees itself and its ancestors (paper, appendix "Tree-Based Attention").
        """
        size = len(self) + 1
        mask = np.eye(size, dtype=bool)
        for i, parent in enumerate(self.parents.tolist(), start=1):
            mask[i] |= mask[parent]
        return mask


EMPTY_TREE = DraftTree.build([], [])
