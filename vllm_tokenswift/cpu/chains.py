"""Tree attention on a kernel that only knows causal attention: a tree as chains.

vLLM's CPU attention kernel (``cpu_attn.py``) takes no mask and returns no
log-sum-exp, so a tree can be neither masked nor split into prefix and tree. But
depth-first order cuts a tree into chains of consecutive query rows
(:attr:`DraftTree.chains`), and along a chain tree attention *is* causal
attention over prefix + ancestors + chain. So each chain becomes a sequence of its own
("virtual sequence") of the same kernel call: the main chain over the request's own blocks, each
side chain over the request's full prefix blocks, shared, followed by *scratch
blocks* that hold a copy of the partial tail block, the ancestors' KV and the
chain's own KV.

The numerics are those of plain decoding (same kernel, same order), for every
memory layout of the cache: whole blocks are copied as bytes, and new KV is
written by vLLM's own cache-writing kernel. So the scratch blocks of a side chain are what
the request's own blocks become if its nodes are accepted: the commit copies them back.

Cost: a side chain reads the prefix once more, and takes one block copy and one small
write per layer. Few side chains, or none, are cheap; the cost model knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.engine.step_trees import RequestTree
from vllm_tokenswift.tree import Chain


@dataclass
class VirtualBatch:
    """The step's sequences after its trees were cut into chains.

    Attributes:
        query_start_loc: int32 ``[sequences + 1]``, first query row of each.
        seq_lens: int32 ``[sequences]``, tokens of each.
        block_table: int32 ``[sequences, blocks]``, physical blocks.
        tail_copies: whole blocks to copy before attention: a source, and targets in a row.
        extra_slots: int64 ``[writes, query rows]``: where the K and V of a row are written besides
            its own slot, -1 for nowhere; more than one write where a row is the ancestor of several
            side chains.
        scratch: ``(req_id, node) -> blocks`` for the nodes of side chains: the blocks that take the
            place of the request's own, from the one with the root's slot on.
        dead_nodes: per request, the nodes for which no scratch block was left: their rows hold
            garbage, and the tree sampler must not walk into them.
    """

    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    tail_copies: list[tuple[int, slice]]
    extra_slots: npt.NDArray[np.int64]
    scratch: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    dead_nodes: dict[str, frozenset[int]] = field(default_factory=dict)


def cut_into_chains(
    trees: Sequence[RequestTree],
    query_start_loc: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    block_table: npt.NDArray[np.int32],
    block_size: int,
    scratch_blocks: Sequence[int],
) -> VirtualBatch:
    """Rewrites a step's batch so that every branching tree becomes chains.

    Args:
        trees: the branching trees, any order, at most one for a batch row.
        query_start_loc: int32 ``[requests + 1]``.
        seq_lens: int32 ``[requests]``.
        block_table: int32 ``[requests, blocks]``: the step as vLLM built it, by batch row.
        block_size: tokens of a block.
        scratch_blocks: physical blocks that belong to no request.
    """
    num_rows = int(query_start_loc[len(seq_lens)])
    by_row = {tree.batch_row: tree for tree in trees}
    free = list(scratch_blocks)[::-1]
    starts: list[int] = []
    lens: list[int] = []
    tables: list[npt.NDArray[np.int32]] = []
    tail_copies: list[tuple[int, slice]] = []
    extra_slots: list[npt.NDArray[np.int64]] = []
    scratch: dict[tuple[str, int], list[int]] = {}
    dead: dict[str, frozenset[int]] = {}

    for batch_row in range(len(seq_lens)):
        table = block_table[batch_row]
        rows = by_row.get(batch_row)
        if rows is None:
            starts.append(int(query_start_loc[batch_row]))
            lens.append(int(seq_lens[batch_row]))
            tables.append(table)
            continue

        main, *sides = rows.tree.chains
        starts.append(rows.query_start)
        lens.append(rows.root_position + main.last + 1)
        tables.append(table)
        first_block, tail_tokens = divmod(rows.root_position, block_size)
        depths = rows.tree.depths
        request_dead: set[int] = set()
        # Chains that get scratch blocks: with how many, and their block tables.
        alive: list[tuple[Chain, int, npt.NDArray[np.int32]]] = []
        room = len(free)
        for chain in sides:
            end = rows.root_position + int(depths[chain.last]) + 1
            num_scratch = -(-end // block_size) - first_block
            starts.append(rows.root_row + chain.first)
            if num_scratch > room or not request_dead.isdisjoint(chain.ancestors):
                request_dead.update(range(chain.first, chain.last + 1))
                # The rows still need a sequence to be computed in: any valid one.
                lens.append(rows.root_position + chain.num_nodes)
                tables.append(table)
                continue
            room -= num_scratch
            lens.append(end)
            tables.append(table.copy())
            alive.append((chain, num_scratch, tables[-1]))
        # All first blocks before any other: copies of one tail to blocks in a row are one copy.
        firsts = [free.pop() for _ in alive]
        if tail_tokens:
            tail_copies += [(int(table[first_block]), run) for run in _runs(firsts)]
        for (chain, num_scratch, chain_table), first in zip(alive, firsts, strict=True):
            blocks = [first, *(free.pop() for _ in range(num_scratch - 1))]
            chain_table[first_block : first_block + num_scratch] = blocks
            nodes = range(chain.first, chain.last + 1)
            scratch.update(((rows.req_id, node), blocks) for node in nodes)
            for node in (*chain.ancestors, *nodes):
                block, offset = divmod(tail_tokens + int(depths[node]), block_size)
                _add(
                    extra_slots,
                    rows.root_row + node,
                    blocks[block] * block_size + offset,
                    num_rows,
                )
        if request_dead:
            dead[rows.req_id] = frozenset(request_dead)

    starts.append(num_rows)
    return VirtualBatch(
        np.asarray(starts, np.int32),
        np.asarray(lens, np.int32),
        np.stack(tables),
        tail_copies,
        np.stack(extra_slots) if extra_slots else np.empty((0, num_rows), np.int64),
        scratch,
        dead,
    )


def _add(writes: list[npt.NDArray[np.int64]], row: int, slot: int, num_rows: int) -> None:
    """One more slot for a row, in the first write that has none for it."""
    for write in writes:
        if write[row] < 0:
            write[row] = slot
            return
    writes.append(np.full(num_rows, -1, np.int64))
    writes[-1][row] = slot


def _runs(blocks: Sequence[int]) -> list[slice]:
    """The blocks, ascending, as ranges of consecutive ones."""
    runs: list[slice] = []
    for block in blocks:
        start = runs.pop().start if runs and runs[-1].stop == block else block
        runs.append(slice(start, block + 1))
    return runs
