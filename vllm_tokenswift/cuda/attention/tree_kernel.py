"""Attention of draft-tree rows, continued from the state over the paged prefix.

Maths. Row ``i`` of a tree attends to the request's cached prefix ``P`` and to
the tree rows ``A(i)`` = itself and its ancestors. With the prefix part given as
``(o_s, lse_s)`` for one or more slices ``s`` of ``P`` (``o_s`` normalised within
its slice), the result is

    out_i = (sum_s exp(lse_s) o_s + sum_{j in A(i)} exp(scale q_i.k_j) v_j)
          / (sum_s exp(lse_s)     + sum_{j in A(i)} exp(scale q_i.k_j))

computed as flash attention does, with a running maximum, in float32.

Memory. Per KV head and tree of ``n`` rows: q, the prefix state and the output
once; K and V of the tree once per block of query rows (from L2 after the first).
For 33 rows of the 8B shape (32/8 heads of 128, bf16) that is 1.1 MB a layer.

Aliasing. ``out`` may be ``prefix_out[0]``: a program reads its own tile of it
before writing the same tile. Nothing else may overlap.

Sentinels. ``lse`` of -inf or +inf means an empty slice (FlashAttention 2 writes
+inf, 3 writes -inf); its ``o`` is then never used, whatever it holds. A tree of
zero rows (a padded request) writes nothing.

CUDA graphs. The launch depends on the host-side ``max_rows`` and the tensors'
shapes; contents of ``tree_start_loc`` and ``ancestors`` may change between
replays, their addresses may not.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from vllm_tokenswift.cuda.attention.ancestor_rows import pack_rows
from vllm_tokenswift.tree import DraftTree

MAX_DRAFT_NODES = 128
"""Nodes below the bonus token that the two 64-bit ancestor words can name."""


def pack_ancestors(tree: DraftTree, rows_before: int = 0) -> npt.NDArray[np.int64]:
    """int64 ``[rows_before + n + 1, 2]``: per row, which rows of its request it attends to.

    Bit ``(j - 1) % 64`` of word ``(j - 1) // 64`` stands for row ``j``: the row itself
    and its ancestors. Row 0 has no bit: every row attends to it. It is the bonus
    token, unless ``rows_before`` tokens, each after the other, stand before that.
    """
    num_rows = rows_before + len(tree) + 1
    if num_rows > MAX_DRAFT_NODES + 1:
        raise ValueError(
            f"a draft tree may hold at most {MAX_DRAFT_NODES} drafts, this holds {num_rows - 1}"
        )
    packed = np.empty((num_rows, 2), np.int64)
    starts, num_drafts = np.array([0, num_rows], np.int32), np.array([len(tree)], np.int32)
    pack_rows(starts, num_drafts, tree.parents, packed)
    return packed


def unpack_ancestors(ancestors: torch.Tensor, num_rows: int) -> torch.Tensor:
    """bool ``[rows, num_rows]`` from int64 ``[rows, 2]``: the inverse of ``pack_ancestors``."""
    drafts = torch.arange(max(num_rows - 1, 0), device=ancestors.device)
    bits = (ancestors[:, drafts // 64] >> (drafts % 64)) & 1  # [rows, num_rows - 1]
    bonus = torch.ones(len(ancestors), 1, dtype=torch.bool, device=ancestors.device)
    return torch.cat([bonus, bits.bool()], dim=1)


def tree_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    out: torch.Tensor,
    tree_start_loc: Sequence[int],
    ancestors: torch.Tensor,
    scale: float,
) -> None:
    """Eager twin of :func:`tree_attention`: same arguments, float32 inside."""
    group = query.shape[1] // key.shape[1]
    for start, end in itertools.pairwise(tree_start_loc):
        rows = slice(start, end)
        q = query[rows].float().transpose(0, 1)  # [heads, rows, head_size]
        k = key[rows].float().transpose(0, 1).repeat_interleave(group, 0)
        v = value[rows].float().transpose(0, 1).repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) * scale  # [heads, rows, rows]
        visible = unpack_ancestors(ancestors[rows], end - start)
        scores = scores.masked_fill(~visible, -math.inf)
        lse = prefix_lse[:, :, rows].permute(1, 2, 0).float()  # [heads, rows, slices]
        lse = lse.masked_fill(lse.isinf(), -math.inf)
        weights = torch.cat([lse, scores], dim=2).softmax(-1)
        num_slices = lse.shape[2]
        states = prefix_out[:, rows].permute(2, 1, 0, 3).float()  # [heads, rows, slices, size]
        states = states.masked_fill((lse == -math.inf).unsqueeze(-1), 0)
        result = (weights[:, :, :num_slices].unsqueeze(2) @ states).squeeze(2)
        result = result + weights[:, :, num_slices:] @ v
        out[rows] = result.transpose(0, 1).to(out.dtype)


def tile_shape(head_size: int, itemsize: int, block_m: int, block_n: int) -> tuple[int, int]:
    """Rows and keys of a tile, halved (not below 16) for each doubling of a head beyond 256 bytes.

    Tiles given for heads of 128 in 16 bits then keep to registers and shared memory.
    """
    row_bytes = triton.next_power_of_2(head_size) * itemsize
    shift = max(0, (row_bytes // 256).bit_length() - 1)
    return max(16, block_m >> shift), max(16, block_n >> shift)


@triton.jit(do_not_specialize=["prefix_slice_stride", "lse_slice_stride", "lse_head_stride"])
def _tree_attention_kernel(
    query_ptr,  # [num_rows, num_heads, head_size]
    key_ptr,  # [num_rows, num_kv_heads, head_size]
    value_ptr,  # [num_rows, num_kv_heads, head_size]
    prefix_out_ptr,  # [num_slices, num_rows, num_heads, head_size]
    prefix_lse_ptr,  # [num_slices, num_heads, num_rows]
    out_ptr,  # [num_rows, num_heads, head_size]
    tree_start_loc_ptr,  # [num_trees + 1]
    ancestors_ptr,  # [num_rows, 2]
    scale_log2,
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    prefix_slice_stride,
    prefix_row_stride,
    prefix_head_stride,
    lse_slice_stride,
    lse_head_stride,
    out_row_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    NUM_SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tree = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_row = tl.load(tree_start_loc_ptr + tree)
    num_nodes = tl.load(tree_start_loc_ptr + tree + 1) - first_row
    # A packed row is (node, query head of the group): the heads of a group share K.
    first_packed = tl.program_id(2) * BLOCK_M
    if first_packed >= num_nodes * GROUP:
        return

    packed = first_packed + tl.arange(0, BLOCK_M)
    node = packed // GROUP
    row = first_row + node
    head = kv_head * GROUP + packed % GROUP
    row_ok = node < num_nodes
    dim = tl.arange(0, HEAD_SIZE_PADDED)
    dim_ok = dim < HEAD_SIZE
    tile_ok = row_ok[:, None] & dim_ok[None, :]

    query = tl.load(
        query_ptr
        + row[:, None] * query_row_stride
        + head[:, None] * query_head_stride
        + dim[None, :],
        mask=tile_ok,
        other=0.0,
    )
    word0 = tl.load(ancestors_ptr + row * 2, mask=row_ok, other=0)
    word1 = tl.load(ancestors_ptr + row * 2 + 1, mask=row_ok, other=0)

    # -1e30 instead of -inf keeps (maximum - maximum) finite while nothing was seen.
    maximum = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD_SIZE_PADDED], tl.float32)
    for piece in range(NUM_SLICES):
        lse = tl.load(
            prefix_lse_ptr + piece * lse_slice_stride + head * lse_head_stride + row,
            mask=row_ok,
            other=float("-inf"),
        )
        filled = (lse > float("-inf")) & (lse < float("inf"))
        lse_log2 = tl.where(filled, lse * 1.4426950408889634, -1e30)
        state = tl.load(
            prefix_out_ptr
            + piece * prefix_slice_stride
            + row[:, None] * prefix_row_stride
            + head[:, None] * prefix_head_stride
            + dim[None, :],
            mask=tile_ok & filled[:, None],
            other=0.0,
        ).to(tl.float32)
        new_maximum = tl.maximum(maximum, lse_log2)
        keep = tl.exp2(maximum - new_maximum)
        weight = tl.where(filled, tl.exp2(lse_log2 - new_maximum), 0.0)
        total = total * keep + weight
        accumulator = accumulator * keep[:, None] + state * weight[:, None]
        maximum = new_maximum

    # A node's ancestors stand before it, so no row of this block looks further.
    last_node = tl.minimum(num_nodes - 1, (first_packed + BLOCK_M - 1) // GROUP)
    for start in range(0, last_node + 1, BLOCK_N):
        other = start + tl.arange(0, BLOCK_N)
        other_ok = other < num_nodes
        key = tl.load(
            key_ptr
            + (first_row + other)[None, :] * key_row_stride
            + kv_head * key_head_stride
            + dim[:, None],
            mask=other_ok[None, :] & dim_ok[:, None],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2
        bit = tl.maximum(other - 1, 0)
        word = tl.where((bit < 64)[None, :], word0[:, None], word1[:, None])
        visible = ((word >> (bit % 64)[None, :].to(tl.int64)) & 1) != 0
        visible = (visible | (other == 0)[None, :]) & other_ok[None, :]
        scores = tl.where(visible, scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        keep = tl.exp2(maximum - new_maximum)
        weights = tl.exp2(scores - new_maximum[:, None])
        total = total * keep + tl.sum(weights, 1)
        value = tl.load(
            value_ptr
            + (first_row + other)[:, None] * value_row_stride
            + kv_head * value_head_stride
            + dim[None, :],
            mask=other_ok[:, None] & dim_ok[None, :],
            other=0.0,
        )
        accumulator = accumulator * keep[:, None]
        accumulator = tl.dot(
            weights.to(value.dtype), value, acc=accumulator, input_precision="ieee"
        )
        maximum = new_maximum

    tl.store(
        out_ptr + row[:, None] * out_row_stride + head[:, None] * out_head_stride + dim[None, :],
        (accumulator / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=tile_ok,
    )


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix_out: torch.Tensor,
    prefix_lse: torch.Tensor,
    out: torch.Tensor,
    tree_start_loc: torch.Tensor,
    ancestors: torch.Tensor,
    scale: float,
    max_rows: int,
    block_m: int = 32,
    block_n: int = 32,
    num_warps: int = 4,
) -> None:
    """Finish the attention of tree rows over their own K and V; see the module's header.

    The innermost dimension of every tensor must be contiguous.

    Args:
        query: ``[num_rows, num_heads, head_size]`` bf16, fp16 or float32; the rows of all trees,
            tree after tree (further rows may follow).
        key: ``[num_rows, num_kv_heads, head_size]``, this step's fresh K and V.
        value: ``[num_rows, num_kv_heads, head_size]``, this step's fresh K and V.
        prefix_out: ``[num_slices, num_rows, num_heads, head_size]``, the prefix part.
        prefix_lse: float32 ``[num_slices, num_heads, num_rows]``, natural logarithm; the layout of
            FlashAttention's variable-length ``softmax_lse``.
        out: ``[num_rows, num_heads, head_size]``, written for the rows of trees only.
        tree_start_loc: int32 ``[num_trees + 1]`` on the device, first row of each tree.
        ancestors: int64 ``[num_rows, 2]`` on the device, see :func:`pack_ancestors`.
        max_rows: at least the rows of the largest tree; a bound fixes the launch.
    """
    num_heads, head_size = query.shape[1:]
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    block_m, block_n = tile_shape(head_size, query.element_size(), block_m, block_n)
    grid = (tree_start_loc.shape[0] - 1, num_kv_heads, triton.cdiv(max_rows * group, block_m))
    _tree_attention_kernel[grid](
        query,
        key,
        value,
        prefix_out,
        prefix_lse,
        out,
        tree_start_loc,
        ancestors,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        prefix_out.stride(0),
        prefix_out.stride(1),
        prefix_out.stride(2),
        prefix_lse.stride(0),
        prefix_lse.stride(1),
        out.stride(0),
        out.stride(1),
        GROUP=group,
        HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=max(16, triton.next_power_of_2(head_size)),
        NUM_SLICES=prefix_out.shape[0],
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=num_warps,
    )
