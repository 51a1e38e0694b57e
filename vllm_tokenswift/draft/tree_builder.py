"""Merging all sources' proposals into one trie, opened best-first, and cutting it to a tree.

Prefixes that several sources share become one node. The trie is never built whole: a node's
children are worked out when the node itself is taken, so the work follows the number of
nodes that are wanted, not the number of paths that are proposed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.common.arrays import Floats, Ints
from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.draft.gumbel_noise import (
    NO_NOISE,
    UNSEEN_NOISE,
    Noise,
    NoiseArrays,
    position_key,
    weighed_by,
)
from vllm_tokenswift.draft.proposals.table import (
    BELOW,
    NUM_BELOW,
    NUM_PROPOSALS,
    SOURCE,
    TOKEN,
    CandidateArrays,
    Candidates,
)
from vllm_tokenswift.tree import DraftTree, Source

# At most one child is accepted, so their chances add up to at most 1. What is too much is
# taken from all but the surest, which may be sure for a good reason (a long match) and is
# left at this much at most.
_MAX_FIRST_RATE = 0.995

# Columns of the nodes: token, source, parent node (0 is the bonus token).
PARENT = 2
NODE_COLUMNS = 3

_SELF, _HEADS, _FREE_HEADS = int(Source.SELF), int(Source.HEADS), int(Source.FREE_HEADS)
_CONTEXT = int(Source.CONTEXT)
_INITIAL = 256


@inner
def _longer_table(numbers: Ints, least: int) -> Ints:
    """A copy of the rows with room for twice as many as are needed at least."""
    larger = np.empty((2 * least, numbers.shape[1]), np.int32)
    for row in range(len(numbers)):
        for column in range(numbers.shape[1]):
            larger[row, column] = numbers[row, column]
    return larger


@inner
def _longer(chances: Floats, length: int) -> Floats:
    """A copy of the chances with room for so many."""
    larger = np.empty(length)
    for index in range(len(chances)):
        larger[index] = chances[index]
    return larger


@inner
def _knows_noise(source: int, heads_see_noise: bool) -> bool:
    """Whether a source's chances know the noise already: the draft pass's own token, contexts,
    and heads where they say so (:class:`HeadProposals`)."""
    return source in (_SELF, _CONTEXT) or (heads_see_noise and source in (_HEADS, _FREE_HEADS))


@inner
def _sort(found: Ints, chances: Floats, number: int) -> None:
    """Likeliest first; of equals the order stays."""
    for place in range(1, number):
        chance = chances[place]
        if chances[place - 1] >= chance:
            continue
        before = place
        while before > 0 and chances[before - 1] < chance:
            before -= 1
        for column in range(found.shape[1]):
            moved = found[place, column]
            for index in range(place, before, -1):
                found[index, column] = found[index - 1, column]
            found[before, column] = moved
        for index in range(place, before, -1):
            chances[index] = chances[index - 1]
        chances[before] = chance


@inner
def _share_out(chances: Floats, number: int) -> None:
    """Takes what is too much from chances that are sorted."""
    total = 0.0
    for place in range(number):
        total += chances[place]
    if total > 1.0:
        first = min(chances[0], _MAX_FIRST_RATE)
        scale = (1.0 - first) / (total - chances[0])
        for place in range(1, number):
            chances[place] *= scale
        chances[0] = first


@inner
def _push(heap: Ints, size: int, chances: Floats, entry: int) -> None:
    """Heap: the likeliest entry on top, of equals the one found first (of the lower number)."""
    place = size
    chance = chances[entry]
    while place > 0:
        above = (place - 1) >> 1
        if chances[heap[above, 0]] >= chance:
            break
        heap[place, 0] = heap[above, 0]
        place = above
    heap[place, 0] = entry


@inner
def _pop(heap: Ints, size: int, chances: Floats) -> int:
    top, last = heap[0, 0], heap[size - 1, 0]
    size -= 1
    place = 0
    while True:
        below = 2 * place + 1
        if below >= size:
            break
        if below + 1 < size and _is_before(chances, heap[below + 1, 0], heap[below, 0]):
            below += 1
        if not _is_before(chances, heap[below, 0], last):
            break
        heap[place, 0] = heap[below, 0]
        place = below
    heap[place, 0] = last
    return top


@inner
def _is_before(chances: Floats, entry: int, other: int) -> bool:
    return chances[entry] > chances[other] or (chances[entry] == chances[other] and entry < other)


@dataclass(slots=True, eq=False)
class DraftedNodes:
    """The likeliest nodes of what all sources proposed for one request, the likeliest first.

    Attributes:
        count: how many there are.
        nodes: int32 ``[count or more, NODE_COLUMNS]``: token, source and parent of node ``i + 1``
            at ``i``, parents before children.
        probabilities: float64 ``[count or more]``, of the whole path down to each.
    """

    count: int
    nodes: Ints
    probabilities: Floats

    def tree(self, count: int) -> DraftTree:
        """The tree of the likeliest nodes, depth-first, likeliest child first.

        Args:
            count: how many of them.
        """
        return DraftTree(*_depth_first(self.nodes, self.probabilities, count))


NO_NODES: Ints = np.empty((0, NODE_COLUMNS), np.int32)
NOTHING_DRAFTED = DraftedNodes(0, NO_NODES, np.empty(0))


def drafted_nodes(
    table_arrays: CandidateArrays,
    limit: int,
    min_probability: float = 0.0,
    chain_only: bool = False,
    heads_see_noise: bool = False,
    noise_arrays: NoiseArrays = UNSEEN_NOISE,
) -> DraftedNodes:
    """The likeliest nodes of the merged proposals.

    Args:
        table_arrays: of the proposals.
        limit: the most nodes.
        min_probability: paths at or below it are not taken.
        chain_only: take only the likeliest child of a node (requests under a grammar).
        heads_see_noise: the heads' chances know the noise already.
        noise_arrays: of the coming positions.
    """
    nodes, probabilities = np.empty((limit, NODE_COLUMNS), np.int32), np.empty(limit)
    count = _take_best_first(
        table_arrays,
        limit,
        min_probability,
        chain_only,
        heads_see_noise,
        noise_arrays,
        nodes,
        probabilities,
    )
    return DraftedNodes(count, nodes, probabilities)


@entry
def _take_best_first(
    table_arrays: CandidateArrays,
    limit: int,
    min_probability: float,
    chain_only: bool,
    heads_see_noise: bool,
    noise_arrays: NoiseArrays,
    nodes: Ints,
    probabilities: Floats,
) -> int:
    """Takes nodes in order of their path probability; see :func:`drafted_nodes`.

    Writes what :class:`DraftedNodes` holds; returns the number of nodes.
    """
    table, noise = Candidates(*table_arrays), Noise(*noise_arrays)
    rows, rates, roots, kind, keys = table.rows, table.rates, table.roots, noise.kind, noise.keys
    num_proposals = table.counts[NUM_PROPOSALS]
    # Of a path that may be taken: token, source, parent and its cursors. A cursor is a group
    # of candidates that may follow: first, number, and the next cursor (-1: none).
    entries = np.empty((_INITIAL, 4), np.int32)
    chances = np.empty(_INITIAL)
    heap = np.empty((_INITIAL, 1), np.int32)
    cursors = np.empty((_INITIAL, 3), np.int32)
    found = np.empty((_INITIAL, 4), np.int32)  # token, source, first and last cursor
    found_chances = np.empty(_INITIAL)
    depths = np.empty(limit + 1, np.int32)
    for proposal in range(num_proposals):
        cursors[proposal, 0], cursors[proposal, 1] = roots[proposal, 0], roots[proposal, 1]
        cursors[proposal, 2] = proposal + 1 if proposal + 1 < num_proposals else -1
    num_cursors, num_entries, heap_size = num_proposals, 0, 0
    node = depth = 0
    cursor = 0 if num_proposals > 0 and limit > 0 else -1
    path = 1.0
    depths[0] = 0
    while True:
        # The children of the node taken last, one for each token. Sources that propose the same
        # token read the same text, so their chances are not independent; the surest one counts,
        # and names the node's source.
        number = 0
        key = position_key(kind, keys, depth)
        while cursor >= 0:
            first, size = cursors[cursor, 0], cursors[cursor, 1]
            cursor = cursors[cursor, 2]
            if number + size > len(found):
                found = _longer_table(found, number + size)
                found_chances = _longer(found_chances, len(found))
            if num_cursors + size > len(cursors):
                cursors = _longer_table(cursors, num_cursors + size)
            for row in range(first, first + size):
                token, source, rate = rows[row, TOKEN], rows[row, SOURCE], rates[row]
                if kind != NO_NOISE and not _knows_noise(source, heads_see_noise):
                    rate = weighed_by(kind, key, rate, token)
                place = 0
                while place < number and found[place, 0] != token:
                    place += 1
                if place == number:
                    found[place, 0], found[place, 1] = token, source
                    found[place, 2], found[place, 3] = -1, -1
                    found_chances[place] = rate
                    number += 1
                elif rate > found_chances[place]:
                    found[place, 1] = source
                    found_chances[place] = rate
                if rows[row, NUM_BELOW] > 0:
                    cursors[num_cursors, 0] = rows[row, BELOW]
                    cursors[num_cursors, 1] = rows[row, NUM_BELOW]
                    cursors[num_cursors, 2] = -1
                    if found[place, 2] < 0:
                        found[place, 2] = num_cursors
                    else:
                        cursors[found[place, 3], 2] = num_cursors
                    found[place, 3] = num_cursors
                    num_cursors += 1
        if number > 1:
            _sort(found, found_chances, number)
            if chain_only:
                number = 1
            else:
                _share_out(found_chances, number)
        if num_entries + number > len(entries):
            entries = _longer_table(entries, num_entries + number)
            chances = _longer(chances, len(entries))
            heap = _longer_table(heap, len(entries) // 2)
        for place in range(number):
            chance = path * found_chances[place]
            if chance > min_probability:
                entries[num_entries, 0], entries[num_entries, 1] = found[place, 0], found[place, 1]
                entries[num_entries, 2], entries[num_entries, 3] = node, found[place, 2]
                chances[num_entries] = chance
                _push(heap, heap_size, chances, num_entries)
                num_entries += 1
                heap_size += 1
        if heap_size == 0 or node == limit:
            return node
        best = _pop(heap, heap_size, chances)
        heap_size -= 1
        path = chances[best]
        for column in range(NODE_COLUMNS):
            nodes[node, column] = entries[best, column]
        probabilities[node] = path
        depth = depths[entries[best, PARENT]] + 1
        node += 1
        depths[node] = depth
        cursor = entries[best, 3] if node < limit else -1


@entry
def _depth_first(
    nodes: Ints, probabilities: Floats, count: int
) -> tuple[Ints, Ints, npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """The first ``count`` nodes as a draft tree's arrays, dropped branches left out."""
    # Children in the order they were taken, which is likeliest first.
    first_child = np.zeros(count + 1, np.int32)
    sibling = np.zeros(count + 1, np.int32)
    for node in range(count, 0, -1):
        parent = nodes[node - 1, PARENT]
        if parent >= 0:
            sibling[node] = first_child[parent]
            first_child[parent] = node
    tokens = np.empty(count, np.int32)
    parents = np.empty(count, np.int32)
    sources = np.empty(count, np.int8)
    chances = np.empty(count, np.float32)
    place = np.zeros(count + 1, np.int32)  # in the tree, by node
    number = 0
    node = first_child[0]
    while node > 0:
        parent = nodes[node - 1, PARENT]
        tokens[number], sources[number] = nodes[node - 1, 0], nodes[node - 1, 1]
        parents[number], chances[number] = place[parent], probabilities[node - 1]
        number += 1
        place[node] = number
        following = first_child[node]
        while following == 0 and node > 0:
            following = sibling[node]
            node = nodes[node - 1, PARENT]
        node = following
    return tokens[:number], parents[:number], sources[:number], chances[:number]


@entry
def num_followed(nodes: Ints, tokens: Ints) -> int:
    """How many of the tokens, from the first without a gap, stand on a path of the nodes.

    Args:
        nodes: of :class:`DraftedNodes`, or the first of them.
        tokens: int32 ``[.]``, that follow the bonus token.
    """
    followed = node = 0
    for child in range(1, len(nodes) + 1):
        if followed == len(tokens):
            break
        if nodes[child - 1, PARENT] == node and nodes[child - 1, 0] == tokens[followed]:
            node = child
            followed += 1
    return followed
