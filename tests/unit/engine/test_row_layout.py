"""Rows of a step, against each request's rows worked out one by one."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tokenswift.engine.row_layout import lay_out_rows
from vllm_tokenswift.tree import DraftTree

BLOCK_SIZE, MOST_REQUESTS = 4, 6


@pytest.mark.parametrize("seed", range(20))
def test_rows_lie_by_place_and_turn_by_depth(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_reqs = int(rng.integers(1, MOST_REQUESTS + 1))
    trees = []
    for _ in range(num_reqs):
        parents = [int(rng.integers(0, i + 1)) for i in range(rng.integers(0, 9))]
        trees.append(DraftTree.build([7] * len(parents), parents))
    # A resumed request computes tokens before its root as well.
    before = rng.integers(0, 3, num_reqs)
    num_rows = np.array([b + 1 + len(t) for b, t in zip(before, trees, strict=True)], np.int32)
    computed = rng.integers(0, 20, num_reqs).astype(np.int32)
    token_ids = rng.integers(0, 1000, (MOST_REQUESTS, 64)).astype(np.int32)
    blocks = rng.permutation(MOST_REQUESTS * 16).reshape(MOST_REQUESTS, 16).astype(np.int32)
    total, num_drafts = int(num_rows.sum()), np.array([len(t) for t in trees], np.int64)
    positions, slots = np.empty(total, np.int64), np.empty(total, np.int64)
    tokens = np.empty(total, np.int32)
    logits_rows = np.empty(num_reqs + int(num_drafts.sum()), np.int32)
    starts = np.full(MOST_REQUESTS + 1, -1, np.int32)

    parents = np.concatenate([t.parents for t in trees])
    lay_out_rows(
        *(num_rows, computed, num_drafts, parents, token_ids, blocks, BLOCK_SIZE),
        *(positions, slots, tokens, logits_rows, starts),
    )

    expected_rows = []
    for request, tree in enumerate(trees):
        start, stop = starts[request], starts[request + 1]
        places = computed[request] + np.arange(num_rows[request])
        root = int(before[request])
        depths = np.concatenate([np.arange(root), root + tree.depths])
        assert stop - start == num_rows[request]
        assert (positions[start:stop] == computed[request] + depths).all()
        assert (tokens[start:stop] == token_ids[request, places]).all()
        physical = blocks[request, places // BLOCK_SIZE].astype(np.int64)
        assert (slots[start:stop] == physical * BLOCK_SIZE + places % BLOCK_SIZE).all()
        expected_rows += range(start + root, stop)
    assert logits_rows.tolist() == expected_rows
    assert (starts[num_reqs:] == total).all()
