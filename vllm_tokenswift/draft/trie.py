"""Merging all sources' offers into one trie, opened best-first, and cutting it to a tree.

Prefixes that several sources share become one node. The trie is never built whole: a node's
children are worked out when the node itself is taken, so the work follows the number of
nodes that are wanted, not the number of paths that are offered.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter

from vllm_tokenswift.draft.candidates import (
    AfterOffer,
    Handle,
    HeadCandidates,
    HeadOffer,
    NgramOffer,
    Offer,
    Step,
)
from vllm_tokenswift.draft.foresight import Foresight
from vllm_tokenswift.draft.ngrams import NgramTable
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree, Source

# At most one child is accepted, so their chances add up to at most 1. What is too much is
# taken from all but the surest, which may be sure for a good reason (a long match) and is
# left at this much at most.
_MAX_FIRST_RATE = 0.995

# Sources whose chances know the noise already: the draft pass's own token
# (:class:`HeadOffer`), and heads where they say so (:class:`HeadCandidates`).
_KNOWING = frozenset({int(Source.SELF)})
_KNOWING_WITH_HEADS = _KNOWING | {int(Source.HEADS), int(Source.FREE_HEADS)}

Cursor = tuple[Offer, Handle]
Child = tuple[float, int, int, list[Cursor]]
# (-path probability, order of discovery, trie, parent node, token, source, cursors)
_Entry = tuple[float, int, int, int, int, int, list[Cursor]]


class Trie:
    """One request's merged offers.

    chain_only: keep only the likeliest child of each node (requests under a grammar).
    foresight: the noise that will decide the samples, None where there is none to see.
    heads_foreseen: the heads' chances know it already.

    ``tokens``, ``parents``, ``sources`` and ``probabilities`` list the nodes taken so far,
    in the order they were taken: node ``i + 1`` at index ``i``, parents before children
    (node 0 is the bonus token). Probabilities are those of the whole path.
    """

    def __init__(
        self,
        offers: Sequence[Offer],
        chain_only: bool = False,
        foresight: Foresight | None = None,
        heads_foreseen: bool = False,
    ) -> None:
        self.roots: list[Cursor] = [(offer, offer.root) for offer in offers]
        self._chain_only = chain_only
        self._foresight = foresight
        self._knowing = _KNOWING_WITH_HEADS if heads_foreseen else _KNOWING
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.sources: list[int] = []
        self.probabilities: list[float] = []
        self._depths = [0]  # by node, the bonus token first

    def take(self, parent: int, token: int, source: int, probability: float) -> int:
        """Adds a node; returns its depth (1 below the bonus token)."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.sources.append(source)
        self.probabilities.append(probability)
        depth = self._depths[parent] + 1
        self._depths.append(depth)
        return depth

    def children(self, cursors: list[Cursor], depth: int) -> list[Child]:
        """(chance if the parent is accepted, token, source, cursors), likeliest first.

        depth: of the children below the root's, from 0.

        Offers that propose the same token read the same text, so their chances are not
        independent (1 - (1 - p)(1 - q) came out half as true as it claimed on prose and code);
        the surest one counts, and names the node's source.
        """
        if len(cursors) == 1:
            offer, handle = cursors[0]
            steps = self._seen(offer.steps(handle), depth)
            if len(steps) == 1:
                token, rate, source, _, below = steps[0]
                return [(rate, token, source, [] if below is None else [(offer, below)])]
            found = [
                (rate, token, source, [] if below is None else [(offer, below)])
                for token, rate, source, _, below in steps
            ]
        else:
            found = _merge(
                [(offer, self._seen(offer.steps(handle), depth)) for offer, handle in cursors]
            )
        if len(found) > 1:
            found.sort(key=_by_rate, reverse=True)
            if self._chain_only:
                del found[1:]
            else:
                total = sum(map(_by_rate, found))
                if total > 1.0:
                    rate, token, source, below = found[0]
                    first = min(rate, _MAX_FIRST_RATE)
                    scale = (1.0 - first) / (total - rate)
                    found = [(r * scale, t, s, c) for r, t, s, c in found]
                    found[0] = (first, token, source, below)
        return found

    def _seen(self, steps: Sequence[Step], depth: int) -> Sequence[Step]:
        """The steps with rates that know the noise."""
        if self._foresight is None:
            return steps
        weighed, knowing = self._foresight.weighed, self._knowing
        return [
            step
            if step[2] in knowing
            else (step[0], weighed(step[1], depth, step[0]), step[2], step[3], step[4])
            for step in steps
        ]

    def tree(self, num_nodes: int, without: Collection[int] = ()) -> DraftTree:
        """The first ``num_nodes`` taken, depth-first, likeliest child first.

        without: nodes to leave out together with everything below them.
        """
        if num_nodes == 0:
            return EMPTY_TREE
        if not without and self.parents[:num_nodes] == list(range(num_nodes)):
            return DraftTree.build(
                self.tokens[:num_nodes],
                self.parents[:num_nodes],
                self.sources[:num_nodes],
                self.probabilities[:num_nodes],
            )
        children: list[list[int]] = [[] for _ in range(num_nodes + 1)]
        for node in range(1, num_nodes + 1):
            if node not in without:
                children[self.parents[node - 1]].append(node)
        tokens: list[int] = []
        parents: list[int] = []
        sources: list[int] = []
        probabilities: list[float] = []
        stack = [(node, 0) for node in reversed(children[0])]
        while stack:
            node, parent = stack.pop()
            tokens.append(self.tokens[node - 1])
            parents.append(parent)
            sources.append(self.sources[node - 1])
            probabilities.append(self.probabilities[node - 1])
            place = len(tokens)
            for child in reversed(children[node]):
                stack.append((child, place))
        return DraftTree.build(tokens, parents, sources, probabilities)


def _merge(opened: Sequence[tuple[Offer, Sequence[Step]]]) -> list[Child]:
    """The children of several offers, one for each token."""
    places: dict[int, int] = {}
    found: list[Child] = []
    for offer, steps in opened:
        for token, rate, source, _, below in steps:
            place = places.get(token)
            if place is None:
                places[token] = len(found)
                found.append((rate, token, source, [] if below is None else [(offer, below)]))
                continue
            best_rate, _, _, cursors_below = found[place]
            if below is not None:
                cursors_below.append((offer, below))
            if rate > best_rate:
                found[place] = (rate, token, source, cursors_below)
    return found


_by_rate = itemgetter(0)


def take_best_first(
    tries: Sequence[Trie], limits: Sequence[int], min_probability: float = 0.0
) -> Iterator[tuple[int, float]]:
    """Take nodes over all tries in order of their path probability.

    limits: the most nodes each trie may give. min_probability: paths at or below it are
    not offered. Yields (trie, path probability) for every node taken.
    """
    heap: list[_Entry] = []
    order = 0
    for index, trie in enumerate(tries):
        if limits[index] > 0:
            for rate, token, source, below in trie.children(trie.roots, 0):
                if rate > min_probability:
                    order += 1
                    heap.append((-rate, order, index, 0, token, source, below))
    if not heap:
        return
    heapq.heapify(heap)
    heappush, heappop, heappushpop = heapq.heappush, heapq.heappop, heapq.heappushpop
    entry = heappop(heap)
    while True:
        negative, _, index, parent, token, source, cursors = entry
        trie = tries[index]
        node = len(trie.tokens) + 1
        limit = limits[index]
        if node <= limit:
            depth = trie.take(parent, token, source, -negative)
            yield index, -negative
            if cursors and node < limit:
                children = trie.children(cursors, depth)
                if len(children) == 1:
                    rate, token, source, below = children[0]
                    if -negative * rate > min_probability:
                        order += 1
                        entry = (negative * rate, order, index, node, token, source, below)
                        entry = heappushpop(heap, entry)
                        continue
                else:
                    for rate, token, source, below in children:
                        if -negative * rate > min_probability:
                            order += 1
                            entry = (negative * rate, order, index, node, token, source, below)
                            heappush(heap, entry)
        if not heap:
            return
        entry = heappop(heap)


def grow_tree(offers: Sequence[Offer], budget: int, chain_only: bool = False) -> DraftTree:
    """The ``budget`` likeliest nodes that the offers hold, merged."""
    trie = Trie(offers, chain_only)
    for _ in take_best_first([trie], [budget]):
        pass
    return trie.tree(len(trie.tokens))


def paper_tree(
    heads: HeadCandidates,
    table: NgramTable,
    budget: int,
    widths: Sequence[int] = (1, 3, 3, 3),
    chain_only: bool = False,
) -> DraftTree:
    """The paper's setting: a fixed Cartesian tree and the ``k`` n-grams after ``argmax p_0``.

    Probabilities are the heads' and the n-grams' shares at face value; where the budget is
    smaller than the tree (the paper's has up to 101 nodes), they say what is kept.
    """
    offers: list[Offer] = [HeadOffer(None, heads, widths)]
    first = heads.tokens[0][0]
    ngrams = table.lookup(first)
    if ngrams:
        after = NgramOffer(None, ngrams, table.total(first), max_depth=table.n - 1)
        offers.append(AfterOffer(first, after))
    return grow_tree(offers, budget, chain_only)
