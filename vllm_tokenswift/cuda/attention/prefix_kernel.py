"""Attention of tree rows over the paged prefix, with log-sum-exp, in slices of the prefix.

Used where FlashAttention 3 is not there (FlashAttention 2 does not split a prefix among
programs for more than one query row; float32 is nobody else's).

Maths. The prefix of ``n`` tokens is cut into ``num_slices`` equal ranges of whole
tiles; for each range ``s`` and query row, ``o_s = softmax(scale q K_s^T) V_s`` and
``lse_s = logsumexp(scale q K_s^T)``. :mod:`vllm_tokenswift.cuda.attention.tree_kernel` goes
on from these states; no separate reduction is needed.

Memory. Each K and V of the prefix once per block of query rows (``block_m`` packed rows:
all rows of a tree of 32 in the 8B shape at 128); the states, ``num_slices * rows *
num_heads * head_size`` float32, written once.

Aliasing. None. Sentinel: ``lse = -inf`` where a range is empty; its state is left
unwritten. CUDA graphs: the launch depends on shapes and ``max_rows``; lengths, block
table and starts may change between replays.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from vllm_tokenswift.cuda.attention.tree_kernel import tile_shape


def prefix_attention_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    tree_start_loc: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Eager twin with one slice: states ``[1, rows, heads, size]``, lse ``[1, heads, rows]``."""
    num_rows, num_heads, head_size = query.shape
    states = query.new_zeros(1, num_rows, num_heads, head_size, dtype=torch.float32)
    lse = query.new_full((1, num_heads, num_rows), -math.inf, dtype=torch.float32)
    block_size, group = kv_cache.shape[2], num_heads // kv_cache.shape[1]
    starts = tree_start_loc.tolist()
    for tree, length in enumerate(prefix_lens.tolist()):
        if not length:
            continue
        rows = slice(starts[tree], starts[tree + 1])
        blocks = block_table[tree, : -(-length // block_size)].long()
        cached = kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]  # [tokens, heads, 2 size]
        key, value = cached.float().repeat_interleave(group, 1).split(head_size, dim=-1)
        scores = torch.einsum("rhd,thd->hrt", query[rows].float(), key) * scale
        lse[0, :, rows] = scores.logsumexp(-1)
        states[0, rows] = torch.einsum("hrt,thd->rhd", scores.softmax(-1), value)
    return states, lse


@triton.jit(do_not_specialize=["table_stride", "lse_slice_stride", "lse_head_stride"])
def _prefix_attention_kernel(
    query_ptr,  # [num_rows, num_heads, head_size]
    cache_ptr,  # [num_blocks, num_kv_heads, block_size, 2 * head_size]
    block_table_ptr,  # [num_trees, max_blocks]
    prefix_lens_ptr,  # [num_trees]
    tree_start_loc_ptr,  # [num_trees + 1]
    states_ptr,  # [num_slices, num_rows, num_heads, head_size]
    lse_ptr,  # [num_slices, num_heads, num_rows]
    scale_log2,
    query_row_stride,
    query_head_stride,
    table_stride,
    block_stride,
    head_stride,
    token_stride,
    states_slice_stride,
    states_row_stride,
    lse_slice_stride,
    lse_head_stride,
    num_row_blocks,
    NUM_SLICES: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    piece = tl.program_id(0)
    kv_head = tl.program_id(1)
    tree = tl.program_id(2) // num_row_blocks
    first_packed = (tl.program_id(2) % num_row_blocks) * BLOCK_M
    first_row = tl.load(tree_start_loc_ptr + tree)
    num_nodes = tl.load(tree_start_loc_ptr + tree + 1) - first_row
    if first_packed >= num_nodes * GROUP:
        return

    packed = first_packed + tl.arange(0, BLOCK_M)
    row = first_row + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    row_ok = packed < num_nodes * GROUP
    dim = tl.arange(0, HEAD_SIZE_PADDED)
    dim_ok = dim < HEAD_SIZE
    tile_ok = row_ok[:, None] & dim_ok[None, :]

    prefix_len = tl.load(prefix_lens_ptr + tree)
    slice_tokens = tl.cdiv(tl.cdiv(prefix_len, BLOCK_N), NUM_SLICES) * BLOCK_N
    start = piece * slice_tokens
    stop = tl.minimum(start + slice_tokens, prefix_len)
    lse_at = lse_ptr + piece * lse_slice_stride + head * lse_head_stride + row
    if start >= stop:
        tl.store(lse_at, tl.full([BLOCK_M], float("-inf"), tl.float32), mask=row_ok)
        return

    query = tl.load(
        query_ptr
        + row[:, None] * query_row_stride
        + head[:, None] * query_head_stride
        + dim[None, :],
        mask=tile_ok,
        other=0.0,
    )
    maximum = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_SIZE_PADDED], tl.float32)
    for first in range(start, stop, BLOCK_N):
        token = first + tl.arange(0, BLOCK_N)
        token_ok = token < stop
        physical = tl.load(
            block_table_ptr + tree * table_stride + token // BLOCK_SIZE, mask=token_ok, other=0
        ).to(tl.int64)
        token_at = physical * block_stride + (token % BLOCK_SIZE) * token_stride
        cache_at = cache_ptr + kv_head * head_stride + token_at
        key = tl.load(
            cache_at[None, :] + dim[:, None],
            mask=token_ok[None, :] & dim_ok[:, None],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2
        scores = tl.where(token_ok[None, :], scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        keep = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * keep + tl.sum(weights, 1)
        value = tl.load(
            cache_at[:, None] + HEAD_SIZE + dim[None, :],
            mask=token_ok[:, None] & dim_ok[None, :],
            other=0.0,
        )
        accumulator = accumulator * keep[:, None]
        accumulator = tl.dot(
            weights.to(value.dtype), value, acc=accumulator, input_precision="ieee"
        )
        maximum = new_maximum

    tl.store(
        states_ptr
        + piece * states_slice_stride
        + row[:, None] * states_row_stride
        + head[:, None] * HEAD_SIZE
        + dim[None, :],
        accumulator / total[:, None],
        mask=tile_ok,
    )
    tl.store(lse_at, (maximum + tl.log2(total)) / 1.4426950408889634, mask=row_ok)


def prefix_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    tree_start_loc: torch.Tensor,
    scale: float,
    max_rows: int,
    num_slices: int,
    block_m: int = 64,
    block_n: int = 32,
    num_warps: int = 4,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The prefix part of tree attention; see the module's header.

    Args:
        query: ``[num_rows, num_heads, head_size]``, the rows of all trees.
        kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``, any strides with a
            contiguous last axis, of the query's type.
        block_table: int32 ``[num_trees, max_blocks]``.
        prefix_lens: int32 ``[num_trees]``.
        tree_start_loc: int32 ``[num_trees + 1]``.
        max_rows: at least the rows of each tree.

    Returns:
        Float32 states ``[num_slices, num_rows, num_heads, head_size]`` and log-sum-exp
        ``[num_slices, num_heads, num_rows]``.
    """
    num_rows, num_heads, head_size = query.shape
    num_kv_heads, block_size = kv_cache.shape[1:3]
    group = num_heads // num_kv_heads
    block_m, block_n = tile_shape(head_size, query.element_size(), block_m, block_n)
    states = query.new_empty(num_slices, num_rows, num_heads, head_size, dtype=torch.float32)
    lse = query.new_empty(num_slices, num_heads, num_rows, dtype=torch.float32)
    num_row_blocks = triton.cdiv(max_rows * group, block_m)
    grid = (num_slices, num_kv_heads, (tree_start_loc.shape[0] - 1) * num_row_blocks)
    _prefix_attention_kernel[grid](
        query,
        kv_cache,
        block_table,
        prefix_lens,
        tree_start_loc,
        states,
        lse,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        states.stride(0),
        states.stride(1),
        lse.stride(0),
        lse.stride(1),
        num_row_blocks,
        NUM_SLICES=num_slices,
        GROUP=group,
        HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=max(16, triton.next_power_of_2(head_size)),
        BLOCK_SIZE=block_size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
    return states, lse
