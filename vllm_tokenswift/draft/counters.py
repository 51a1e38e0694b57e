"""Counts of what was drafted and what was accepted, per source."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tokenswift.tree import DraftTree, Source


class DraftCounters:
    """drafted, accepted: nodes per :class:`Source`; steps: verified trees, empty ones included."""

    def __init__(self) -> None:
        self.steps = 0
        self.drafted: dict[Source, int] = dict.fromkeys(Source, 0)
        self.accepted: dict[Source, int] = dict.fromkeys(Source, 0)

    def observe(self, tree: DraftTree, accepted_nodes: Sequence[int]) -> None:
        """tree: what was verified, as the scheduler left it; accepted_nodes: from 1."""
        self.steps += 1
        sources = tree.sources.tolist()  # plain ints; an IntEnum key equals its number
        for source in sources:
            self.drafted[source] += 1
        for node in accepted_nodes:
            self.accepted[sources[node - 1]] += 1

    def add(self, other: DraftCounters) -> None:
        """Add another request's counts."""
        self.steps += other.steps
        for source in Source:
            self.drafted[source] += other.drafted[source]
            self.accepted[source] += other.accepted[source]
