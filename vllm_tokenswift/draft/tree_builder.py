"""Merging all sources' offers into one trie, opened best-first, and cutting it to a tree.

Prefixes that several sources share become one node. The trie is never built whole: a node's
children are worked out when the node itself is taken, so the work follows the number of
nodes that are wanted, not the number of paths that are offered.
"""

from __future__ import annotations

from math import log

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.draft.acceptance import Floats
from vllm_tokenswift.draft.exponential_noise import NO_NOISE, Keys, position_key
from vllm_tokenswift.draft.gumbel_noise import weighed_by
from vllm_tokenswift.draft.proposals.table import BELOW, NUM_BELOW, SOURCE, TOKEN
from vllm_tokenswift.tree import DraftTree, Source

Ints = npt.NDArray[np.int32]

# At most one child is accepted, so their chances add up to at most 1. What is too much is
# taken from all but the surest, which may be sure for a good reason (a long match) and is
# left at this much at most.
_MAX_FIRST_RATE = 0.995

# Columns of the nodes taken: token, source, parent node (0 is the bonus token).
_PARENT = 2
TAKEN_COLUMNS = 3

_SELF, _HEADS, _FREE_HEADS = int(Source.SELF), int(Source.HEADS), int(Source.FREE_HEADS)
_CONTEXT = int(Source.CONTEXT)
_INITIAL = 256


@inner
def _with_room(numbers: Ints, used: int, more: int) -> Ints:
    """The rows, or a larger copy where they have no room for ``more``."""
    if used + more <= len(numbers):
        return numbers
    larger = np.empty((2 * (used + more), numbers.shape[1]), np.int32)
    for row in range(used):
        for column in range(numbers.shape[1]):
            larger[row, column] = numbers[row, column]
    return larger


@inner
def _as_long(chances: Floats, used: int, length: int) -> Floats:
    """The chances, or a copy of that length where they are shorter."""
    if length == len(chances):
        return chances
    longer = np.empty(length)
    for index in range(used):
        longer[index] = chances[index]
    return longer


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
def _is_before(chances: Floats, one: int, other: int) -> bool:
    return chances[one] > chances[other] or (chances[one] == chances[other] and one < other)


@entry
def take_best_first(
    steps: Ints,
    rates: Floats,
    roots: Ints,
    num_roots: int,
    limit: int,
    min_probability: float,
    chain_only: bool,
    heads_see_noise: bool,
    noise_kind: int,
    keys: Keys,
    taken: Ints,
    probabilities: Floats,
) -> int:
    """Takes nodes of the merged offers in order of their path probability.

    limit: the most nodes. min_probability: paths at or below it are not taken. chain_only: only
    the likeliest child of a node (requests under a grammar). heads_see_noise: the heads' chances
    know the noise already.

    Writes ``taken``, int32 ``[limit, 3]``: token, source and parent of node ``i + 1`` at ``i``,
    parents before children; and ``probabilities``, float64 ``[limit]``, of the whole path.
    Returns the number of nodes.
    """
    # Of a path that may be taken: token, source, parent and its cursors. A cursor is a group
    # of steps that may follow: first step, number, and the next cursor (-1: none).
    entries = np.empty((_INITIAL, 4), np.int32)
    chances = np.empty(_INITIAL)
    heap = np.empty((_INITIAL, 1), np.int32)
    cursors = np.empty((_INITIAL, 3), np.int32)
    found = np.empty((_INITIAL, 4), np.int32)  # token, source, first and last cursor
    found_chances = np.empty(_INITIAL)
    depths = np.empty(limit + 1, np.int32)
    for offer in range(num_roots):
        cursors[offer, 0], cursors[offer, 1] = roots[offer, 0], roots[offer, 1]
        cursors[offer, 2] = offer + 1 if offer + 1 < num_roots else -1
    num_cursors, num_entries, heap_size = num_roots, 0, 0
    node = depth = 0
    cursor = 0 if num_roots > 0 and limit > 0 else -1
    path = 1.0
    depths[0] = 0
    while True:
        # The children of the node taken last, one for each token. Offers that propose the same
        # token read the same text, so their chances are not independent (1 - (1 - p)(1 - q)
        # came out half as true as it claimed on prose and code); the surest one counts, and
        # names the node's source.
        number = 0
        key = position_key(noise_kind, keys, depth)
        while cursor >= 0:
            first, size = cursors[cursor, 0], cursors[cursor, 1]
            cursor = cursors[cursor, 2]
            found = _with_room(found, number, size)
            found_chances = _as_long(found_chances, number, len(found))
            cursors = _with_room(cursors, num_cursors, size)
            for step in range(first, first + size):
                token, source, rate = steps[step, TOKEN], steps[step, SOURCE], rates[step]
                if noise_kind != NO_NOISE and not _knows_noise(source, heads_see_noise):
                    rate = weighed_by(noise_kind, key, rate, token)
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
                if steps[step, NUM_BELOW] > 0:
                    cursors[num_cursors, 0] = steps[step, BELOW]
                    cursors[num_cursors, 1] = steps[step, NUM_BELOW]
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
        entries = _with_room(entries, num_entries, number)
        chances = _as_long(chances, num_entries, len(entries))
        heap = _with_room(heap, heap_size, num_entries + number - heap_size)
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
        for column in range(TAKEN_COLUMNS):
            taken[node, column] = entries[best, column]
        probabilities[node] = path
        depth = depths[entries[best, _PARENT]] + 1
        node += 1
        depths[node] = depth
        cursor = entries[best, 3] if node < limit else -1


@entry
def pay_off(
    probabilities: Floats,
    offered: npt.NDArray[np.int64],
    curve_ms: Floats,
    cheapest_ms: Floats,
    fixed_ms: float,
) -> tuple[npt.NDArray[np.int64], Floats, float]:
    """How many of each request's likeliest nodes to take, for the most speed (``planner.py``).

    probabilities: of all requests' nodes, one request after another, falling in each. offered:
    how many each has. curve_ms: of the verify pass, by number of nodes; cheapest_ms: the least
    that any further node adds to it; fixed_ms: of the step besides.

    Returns by request the nodes and the tokens that it is expected to emit, and the step's ms.

    A node that comes with chance p multiplies its request's tokens t by 1 + p / t: of any number
    of nodes the best are those taken by falling p / t.
    """
    num_requests = len(offered)
    ends = np.cumsum(offered)
    first = ends - offered
    upcoming = first.copy()
    growing = np.ones(num_requests)
    owners = np.empty(len(probabilities), np.int64)
    speed = -num_requests * log(curve_ms[0] + fixed_ms)  # the sum of the requests' logarithms
    best_speed = speed
    sum_of_logs = 0.0
    best = 0
    for index in range(len(probabilities)):
        chosen = -1
        most = 0.0
        for request in range(num_requests):
            if upcoming[request] < ends[request]:
                ratio = probabilities[upcoming[request]] / growing[request]
                if ratio > most:
                    chosen, most = request, ratio
        if chosen < 0:
            break
        step_ms = curve_ms[index] + fixed_ms
        if most * step_ms <= num_requests * cheapest_ms[index]:
            break  # m more multiply tokens by up to (1 + m most / n)^n, and time by as much
        growing[chosen] += probabilities[upcoming[chosen]]
        upcoming[chosen] += 1
        owners[index] = chosen
        sum_of_logs += log(1.0 + most)
        speed = sum_of_logs - num_requests * log(curve_ms[index + 1] + fixed_ms)
        if speed > best_speed:
            best_speed, best = speed, index + 1
    counts = np.zeros(num_requests, np.int64)
    tokens = np.ones(num_requests)
    for index in range(best):
        owner = owners[index]
        tokens[owner] += probabilities[first[owner] + counts[owner]]
        counts[owner] += 1
    return counts, tokens, curve_ms[best] + fixed_ms


@entry
def pay_off_padded(
    probabilities: Floats, offered: npt.NDArray[np.int64], widths: Ints, step_ms: Floats
) -> tuple[npt.NDArray[np.int64], Floats, float]:
    """The same where all requests have as many rows, used or not: as wide as the widest tree.

    widths: rows of a request, at first the 1 of plain decoding, ascending. step_ms: of a step of
    that width.

    Returns by request the nodes and the tokens that it is expected to emit, and the step's ms.
    """
    num_requests = len(offered)
    counts = np.zeros(num_requests, np.int64)
    tokens = np.ones(num_requests)
    growing = np.ones(num_requests)
    taken = np.zeros(num_requests, np.int64)
    best_ms = step_ms[0]
    best_speed = -num_requests * log(best_ms)
    for option in range(1, len(widths)):
        first = 0
        speed = -num_requests * log(step_ms[option])
        for request in range(num_requests):
            most = min(offered[request], widths[option] - 1)
            for node in range(taken[request], most):
                growing[request] += probabilities[first + node]
            taken[request] = most
            speed += log(growing[request])
            first += offered[request]
        if speed > best_speed:
            best_speed, best_ms = speed, step_ms[option]
            counts[:], tokens[:] = taken, growing
    return counts, tokens, best_ms


@entry
def drop_dear_branches(
    taken: Ints,
    probabilities: Floats,
    count: int,
    rate: float,
    node_ms: float,
    chain_ms: float,
) -> tuple[float, float]:
    """Marks side branches, of the first ``count`` nodes, that bring less than their own chain.

    rate: tokens of this request that a ms is worth. Where such a branch begins, the parent
    becomes -1. Returns the expected tokens lost with them, and the change in ms (chains kept less
    nodes saved).
    """
    tokens = np.zeros(count + 1)  # of the subtree as kept, by node
    nodes = np.ones(count + 1, np.int32)
    chains = np.zeros(count + 1, np.int32)
    first_child = np.zeros(count + 1, np.int32)
    for node in range(count, 0, -1):
        tokens[node] = probabilities[node - 1]
        first_child[taken[node - 1, _PARENT]] = node
    lost = 0.0
    saved_nodes = 0
    for node in range(count, 0, -1):
        parent = taken[node - 1, _PARENT]
        if first_child[parent] != node:
            cost_ms = nodes[node] * node_ms + (chains[node] + 1) * chain_ms
            if tokens[node] < rate * cost_ms:
                taken[node - 1, _PARENT] = -1
                lost += tokens[node]
                saved_nodes += nodes[node]
                continue
            chains[parent] += 1
        tokens[parent] += tokens[node]
        nodes[parent] += nodes[node]
        chains[parent] += chains[node]
    return lost, chains[0] * chain_ms - saved_nodes * node_ms


@entry
def _depth_first(
    taken: Ints, probabilities: Floats, count: int
) -> tuple[Ints, Ints, npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """The first ``count`` nodes as a draft tree's arrays, dropped branches left out."""
    # Children in the order they were taken, which is likeliest first.
    first_child = np.zeros(count + 1, np.int32)
    sibling = np.zeros(count + 1, np.int32)
    for node in range(count, 0, -1):
        parent = taken[node - 1, _PARENT]
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
        parent = taken[node - 1, _PARENT]
        tokens[number], sources[number] = taken[node - 1, 0], taken[node - 1, 1]
        parents[number], chances[number] = place[parent], probabilities[node - 1]
        number += 1
        place[node] = number
        following = first_child[node]
        while following == 0 and node > 0:
            following = sibling[node]
            node = taken[node - 1, _PARENT]
        node = following
    return tokens[:number], parents[:number], sources[:number], chances[:number]


def tree_of(taken: Ints, probabilities: Floats, count: int) -> DraftTree:
    """The first ``count`` nodes taken, depth-first, likeliest child first."""
    return DraftTree(*_depth_first(taken, probabilities, count))


@entry
def num_followed(taken: Ints, tokens: Ints) -> int:
    """How many of the ``tokens``, from the first without a gap, stand on a path of the nodes.

    taken: as :func:`take_best_first` gives them, children after their parents.
    """
    followed = node = 0
    for child in range(1, len(taken) + 1):
        if followed == len(tokens):
            break
        if taken[child - 1, _PARENT] == node and taken[child - 1, 0] == tokens[followed]:
            node = child
            followed += 1
    return followed
