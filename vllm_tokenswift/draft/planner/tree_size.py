"""How many of the likeliest nodes to take: as many as make the step's requests the fastest."""

from __future__ import annotations

from math import log

import numpy as np

from vllm_tokenswift.common.arrays import Floats, Ints, Longs
from vllm_tokenswift.common.compiled import entry
from vllm_tokenswift.draft.tree_builder import PARENT


@entry
def profitable_counts(
    probabilities: Floats,
    num_drafted: Longs,
    curve_ms: Floats,
    cheapest_ms: Floats,
    fixed_ms: float,
) -> tuple[Longs, Floats, float]:
    """How many of each request's likeliest nodes to take, for the most speed (``planner.py``).

    A node that comes with chance p multiplies its request's tokens t by 1 + p / t: of any number
    of nodes the best are those taken by falling p / t.

    Args:
        probabilities: float64 ``[nodes]``, of all requests' nodes, one request after another,
            falling in each.
        num_drafted: int64 ``[requests]``, how many each has.
        curve_ms: float64 ``[nodes + 1 or more]``, of the verify pass, by number of nodes.
        cheapest_ms: float64, as long, the least that any further node adds to it.
        fixed_ms: of the step besides.

    Returns:
        By request the nodes, int64, and the tokens that it is expected to emit, float64; and
        the step's ms.
    """
    num_requests = len(num_drafted)
    ends = np.cumsum(num_drafted)
    first = ends - num_drafted
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
def profitable_counts_padded(
    probabilities: Floats, num_drafted: Longs, widths: Ints, step_ms: Floats
) -> tuple[Longs, Floats, float]:
    """The same where all requests have as many rows, used or not: as wide as the widest tree.

    Args:
        probabilities: see :func:`profitable_counts`.
        num_drafted: see :func:`profitable_counts`.
        widths: int32 ``[shapes]``, rows of a request, at first the 1 of plain decoding, ascending.
        step_ms: float64 ``[shapes]``, of a step of that width.

    Returns:
        As :func:`profitable_counts` does.
    """
    num_requests = len(num_drafted)
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
            most = min(num_drafted[request], widths[option] - 1)
            for node in range(taken[request], most):
                growing[request] += probabilities[first + node]
            taken[request] = most
            speed += log(growing[request])
            first += num_drafted[request]
        if speed > best_speed:
            best_speed, best_ms = speed, step_ms[option]
            counts[:], tokens[:] = taken, growing
    return counts, tokens, best_ms


@entry
def drop_unprofitable_branches(
    nodes: Ints,
    probabilities: Floats,
    count: int,
    rate: float,
    node_ms: float,
    chain_ms: float,
) -> tuple[float, float]:
    """Marks side branches that bring less than their own chain.

    Args:
        nodes: of :class:`~vllm_tokenswift.draft.tree_builder.DraftedNodes`. Where such a branch
            begins, the parent becomes -1.
        probabilities: of the nodes' paths.
        count: of the nodes, the first, that are planned.
        rate: tokens of this request that a ms is worth.
        node_ms: what a node costs the step.
        chain_ms: what a side branch costs it.

    Returns:
        The expected tokens lost with them, and the change in ms (chains kept less nodes saved).
    """
    tokens = np.zeros(count + 1)  # of the subtree as kept, by node
    sizes = np.ones(count + 1, np.int32)
    chains = np.zeros(count + 1, np.int32)
    first_child = np.zeros(count + 1, np.int32)
    for node in range(count, 0, -1):
        tokens[node] = probabilities[node - 1]
        first_child[nodes[node - 1, PARENT]] = node
    lost = 0.0
    saved_nodes = 0
    for node in range(count, 0, -1):
        parent = nodes[node - 1, PARENT]
        if first_child[parent] != node:
            cost_ms = sizes[node] * node_ms + (chains[node] + 1) * chain_ms
            if tokens[node] < rate * cost_ms:
                nodes[node - 1, PARENT] = -1
                lost += tokens[node]
                saved_nodes += sizes[node]
                continue
            chains[parent] += 1
        tokens[parent] += tokens[node]
        sizes[parent] += sizes[node]
        chains[parent] += chains[node]
    return lost, chains[0] * chain_ms - saved_nodes * node_ms
