"""How many of the likeliest nodes are taken, against every way to take some."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest

from vllm_tokenswift.draft.planner.tree_size import profitable_counts, profitable_counts_padded


@pytest.mark.parametrize("seed", range(200))
def test_those_nodes_are_taken_that_make_requests_fastest_whatever_the_curve(seed: int) -> None:
    """In the geometric mean; also where a pass over more rows takes less time, behind nodes
    that do not pay. Compared with every way to take some of each request's likeliest."""
    rng = np.random.default_rng(seed)
    num_drafted = rng.integers(0, 13 if seed % 2 else 5, 1 if seed % 2 else rng.integers(2, 5))
    each = [np.sort(rng.random(number) ** 3)[::-1] for number in num_drafted]
    curve = np.maximum(10.0 + np.cumsum(rng.normal(0.2, 1.0, num_drafted.sum() + 5)), 0.5)
    steps = np.diff(curve, append=np.inf)
    cheapest = np.minimum.accumulate(steps[::-1])[::-1].copy()
    fixed_ms = float(rng.random())
    counts, tokens, step_ms = profitable_counts(
        np.concatenate(each), num_drafted, curve, cheapest, fixed_ms
    )

    def emitted(numbers: Sequence[int]) -> list[float]:
        return [1.0 + chances[:n].sum() for chances, n in zip(each, numbers, strict=True)]

    def speed(numbers: Sequence[int]) -> float:
        return float(np.mean(np.log(emitted(numbers))) - np.log(curve[sum(numbers)] + fixed_ms))

    every = itertools.product(*(range(number + 1) for number in num_drafted))
    assert speed(counts.tolist()) == pytest.approx(max(map(speed, every)))
    assert tokens.tolist() == pytest.approx(emitted(counts.tolist()))
    assert step_ms == curve[counts.sum()] + fixed_ms


@pytest.mark.parametrize("seed", range(20))
def test_of_all_widths_the_one_with_the_most_speed_is_taken(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_drafted = rng.integers(0, 20, 3)
    each = [np.sort(rng.random(count) ** 3)[::-1] for count in num_drafted]
    widths, step_ms = np.array([1, 4, 8, 16], np.int32), np.cumsum(rng.random(4)) + 2.0
    options = []
    for width, ms in zip(widths.tolist(), step_ms.tolist(), strict=True):
        counts = [min(count, width - 1) for count in num_drafted.tolist()]
        tokens = [1.0 + chances[:count].sum() for chances, count in zip(each, counts, strict=True)]
        options.append((sum(map(math.log, tokens)) - 3 * math.log(ms), counts, tokens, ms))
    _, counts, tokens, ms = max(options, key=lambda option: option[0])
    found = profitable_counts_padded(np.concatenate(each), num_drafted, widths, step_ms)
    assert found[0].tolist() == counts
    assert found[1].tolist() == pytest.approx(tokens)
    assert found[2] == ms
