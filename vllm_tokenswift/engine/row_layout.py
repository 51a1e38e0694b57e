"""Where the query rows of a step of decodes lie, worked out by one call of compiled code."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.common.compiled import entry

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@entry
def lay_out_rows(
    num_rows: Ints,
    computed: Ints,
    num_drafts: Longs,
    parents: Ints,
    token_ids: Ints,
    block_table: Ints,
    block_size: int,
    positions: Longs,
    slots: Longs,
    row_tokens: Ints,
    logits_rows: Ints,
    starts: Ints,
) -> None:
    """Fills the last five arrays.

    Args:
        num_rows: ``[requests]``, query rows of each.
        computed: ``[requests]``, tokens before them whose KV is there.
        num_drafts: ``[requests]``, drafts of each, which are its last rows.
        parents: ``[drafts]``, of the requests' trees one after another (see
            :class:`~vllm_tokenswift.tree.DraftTree`).
        token_ids: ``[requests, tokens]`` by position, drafts behind the text.
        block_table: ``[requests, blocks]``, physical.
        block_size: tokens of a block.
        positions: ``[rows]``, for RoPE, which turns by depth.
        slots: ``[rows]``, for KV, which lies by place.
        row_tokens: ``[rows]``, token ids.
        logits_rows: ``[requests + drafts]``, every request's last ones, its root's first.
        starts: ``[most requests + 1]``, first row of each, never falling to the end.
    """
    num_reqs = len(num_rows)
    row = logits_row = tree = 0
    starts[0] = 0
    for request in range(num_reqs):
        root = row + num_rows[request] - num_drafts[request] - 1
        place = computed[request]
        for _ in range(num_rows[request]):
            row_tokens[row] = token_ids[request, place]
            block = np.int64(block_table[request, place // block_size])
            slots[row] = block * block_size + place % block_size
            positions[row] = place
            if row >= root:
                logits_rows[logits_row] = row
                logits_row += 1
                if row > root:
                    positions[row] = positions[root + parents[tree]] + 1
                    tree += 1
            row += 1
            place += 1
        starts[request + 1] = row
    starts[num_reqs + 1 :] = row


def warm_up() -> None:
    """Compiles it, or loads what was compiled before, ahead of the first request."""
    ints, longs = np.zeros(1, np.int32), np.zeros(1, np.int64)
    table, ones = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    rows = (longs.copy(), longs.copy(), ints.copy(), ints.copy(), np.zeros(2, np.int32))
    lay_out_rows(ones, ints, longs, ints, table, table, 1, *rows)
