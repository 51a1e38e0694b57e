"""Attention mass of every KV block, for all layers and requests in three launches.

Maths. For layer ``l``, request ``r``, query head ``h`` and cached token ``t``,
``s_t = scale q_h . k_t``; the mass of block ``b`` is

    mass_b = sum_h sum_{t in b} exp(s_t - lse_h),   lse_h = log sum_t exp(s_t)

(:mod:`vllm_tokenswift.partial_kv.importance` says why mass and not raw scores).
The first kernel reads each key once and keeps ``log sum_{t in b} exp(s_t)`` of every
block and head; from these the second makes ``lse_h`` and the third the masses.

Memory. Keys once (K only, half of each cache row: 256 bytes of 512 for heads of
128): 6.7 GB for 100K tokens of the 8B shape, 2 ms at 3.3 TB/s. The blocks' sums
are ``num_heads / (block_size * num_kv_heads * head_size)`` of that, 0.4 %, times
three (written once, read twice).

Aliasing. None. Sentinels: a block beyond the sequence gets mass 0 where the row's
grid reaches it (``max_blocks`` of it); a request of length 0 gets zeros.

CUDA graphs. The launch depends on shapes alone (``max_blocks`` of the block table's
view); lengths and table contents may change between replays.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_tokenswift.cuda.attention.cache_layout import CacheLayers
from vllm_tokenswift.partial_kv.importance import block_masses

_FLOATS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def block_scores_reference(
    queries: torch.Tensor,
    layers: CacheLayers,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Eager twin of :func:`block_scores`: same arguments, float32 inside."""
    num_layers, num_reqs = queries.shape[:2]
    masses = torch.zeros(num_layers, num_reqs, block_table.shape[1], device=queries.device)
    for r, length in enumerate(seq_lens.tolist()):
        blocks = block_table[r, : -(-length // layers.block_size)].long()
        if length:
            for i, cache in enumerate(layers.caches):
                keys = cache[blocks][..., : layers.head_size]
                masses[i, r, : len(blocks)] = block_masses(queries[i, r], keys, length, scale)
    return masses


@triton.jit(do_not_specialize=["num_reqs", "max_blocks", "table_stride"])
def _block_log_sums_kernel(
    queries_ptr,  # [num_layers, num_reqs, num_heads, head_size]
    addresses_ptr,  # [num_layers]
    block_table_ptr,  # [num_reqs, max_blocks]
    seq_lens_ptr,  # [num_reqs]
    log_sums_ptr,  # [num_layers, num_reqs, num_heads, max_blocks], base 2
    scale_log2,
    num_reqs,
    max_blocks,
    table_stride,
    block_stride,
    head_stride,
    token_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    HEAD_SIZE_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    layer = tl.program_id(2) // num_reqs
    request = tl.program_id(2) % num_reqs
    kv_head = tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + request)
    # Caches are allocated at 16 bytes and more; a compiler that knows loads 16 at once.
    cache_ptr = tl.load(addresses_ptr + layer).to(tl.pointer_type(ELEMENT))
    cache_ptr = tl.multiple_of(cache_ptr, 16)

    member = tl.arange(0, GROUP_PADDED)
    member_ok = member < GROUP
    dim = tl.arange(0, HEAD_SIZE_PADDED)
    dim_ok = dim < HEAD_SIZE
    query_row = (
        (layer.to(tl.int64) * num_reqs + request) * NUM_KV_HEADS * GROUP + kv_head * GROUP + member
    )
    query = tl.load(
        queries_ptr + query_row[:, None] * HEAD_SIZE + dim[None, :],
        mask=member_ok[:, None] & dim_ok[None, :],
        other=0.0,
    )
    token = tl.arange(0, TILE_BLOCKS * BLOCK_SIZE)
    for tile in range(TILES):
        first_block = (tl.program_id(0) * TILES + tile) * TILE_BLOCKS
        position = first_block * BLOCK_SIZE + token
        ok = position < seq_len
        physical = tl.load(
            block_table_ptr + request * table_stride + first_block + token // BLOCK_SIZE,
            mask=ok,
            other=0,
        ).to(tl.int64)
        key_at = physical * block_stride + (token % BLOCK_SIZE) * token_stride
        key = tl.load(
            cache_ptr + kv_head * head_stride + key_at[None, :] + dim[:, None],
            mask=ok[None, :] & dim_ok[:, None],
            other=0.0,
        )
        scores = tl.dot(query, key, input_precision="ieee") * scale_log2
        scores = tl.where(ok[None, :], scores, -1e30)
        by_block = tl.reshape(scores, [GROUP_PADDED, TILE_BLOCKS, BLOCK_SIZE])
        maximum = tl.max(by_block, 2)
        sums = tl.sum(tl.exp2(by_block - maximum[:, :, None]), 2)
        block = first_block + tl.arange(0, TILE_BLOCKS)
        tl.store(
            log_sums_ptr + query_row[:, None] * max_blocks + block[None, :],
            maximum + tl.log2(sums),
            mask=member_ok[:, None] & (block < max_blocks)[None, :],
        )


@triton.jit(do_not_specialize=["num_reqs", "max_blocks"])
def _head_log_sums_kernel(
    log_sums_ptr,  # [num_layers, num_reqs, num_heads, max_blocks]
    seq_lens_ptr,  # [num_reqs]
    head_log_sums_ptr,  # [num_layers, num_reqs, num_heads]
    num_reqs,
    num_heads,
    max_blocks,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    num_blocks = tl.cdiv(tl.load(seq_lens_ptr + (row // num_heads) % num_reqs), BLOCK_SIZE)
    maximum = tl.full([CHUNK], -1e30, tl.float32)
    sums = tl.zeros([CHUNK], tl.float32)
    for start in range(0, num_blocks, CHUNK):
        block = start + tl.arange(0, CHUNK)
        part = tl.load(
            log_sums_ptr + row.to(tl.int64) * max_blocks + block,
            mask=block < num_blocks,
            other=-1e30,
        )
        new_maximum = tl.maximum(maximum, part)
        sums = sums * tl.exp2(maximum - new_maximum)
        sums += tl.where(block < num_blocks, tl.exp2(part - new_maximum), 0.0)
        maximum = new_maximum
    overall = tl.max(maximum, 0)
    total = tl.sum(sums * tl.exp2(maximum - overall), 0)
    tl.store(head_log_sums_ptr + row, overall + tl.log2(tl.maximum(total, 1e-30)))


@triton.jit(do_not_specialize=["num_reqs", "max_blocks"])
def _block_masses_kernel(
    log_sums_ptr,  # [num_layers, num_reqs, num_heads, max_blocks]
    head_log_sums_ptr,  # [num_layers, num_reqs, num_heads]
    seq_lens_ptr,  # [num_reqs]
    masses_ptr,  # [num_layers, num_reqs, max_blocks]
    num_reqs,
    max_blocks,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(1)  # layer * num_reqs + request
    num_blocks = tl.cdiv(tl.load(seq_lens_ptr + row % num_reqs), BLOCK_SIZE)
    block = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    masses = tl.zeros([CHUNK], tl.float32)
    for head in range(NUM_HEADS):
        head_row = row.to(tl.int64) * NUM_HEADS + head
        log_sum = tl.load(
            log_sums_ptr + head_row * max_blocks + block, mask=block < num_blocks, other=-1e30
        )
        masses += tl.exp2(log_sum - tl.load(head_log_sums_ptr + head_row))
    masses = tl.where(block < num_blocks, masses, 0.0)
    tl.store(masses_ptr + row.to(tl.int64) * max_blocks + block, masses, mask=block < max_blocks)


def block_scores(
    queries: torch.Tensor,
    layers: CacheLayers,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    tile_tokens: int = 64,
    tiles: int = 4,
    num_warps: int = 4,
) -> torch.Tensor:
    """Attention mass of every block of every request and layer; see the module's header.

    Args:
        queries: ``[num_layers, num_reqs, num_heads, head_size]``, contiguous, of the cache's type:
            the newest token's query in every layer.
        layers: the caches; block size a power of two.
        block_table: int32 ``[num_reqs, max_blocks]``; pass a view no wider than needed.
        seq_lens: int32 ``[num_reqs]``, cached tokens that count.

    Returns:
        float32 ``[num_layers, num_reqs, max_blocks]``; a row sums to ``num_heads``.
    """
    num_layers, num_reqs, num_heads, head_size = queries.shape
    max_blocks = block_table.shape[1]
    block_size = layers.block_size
    if block_size & (block_size - 1):
        raise ValueError(f"block size {block_size} is not a power of two, which scoring needs")
    tile_blocks = max(1, tile_tokens // block_size)
    group = num_heads // layers.num_kv_heads
    shape = (num_layers, num_reqs, num_heads)
    log_sums = queries.new_empty(*shape, max_blocks, dtype=torch.float32)
    head_log_sums = queries.new_empty(shape, dtype=torch.float32)
    masses = queries.new_empty(num_layers, num_reqs, max_blocks, dtype=torch.float32)
    block_stride, head_stride, token_stride = layers.strides
    grid = (
        triton.cdiv(max_blocks, tile_blocks * tiles),
        layers.num_kv_heads,
        num_layers * num_reqs,
    )
    _block_log_sums_kernel[grid](
        queries,
        layers.addresses,
        block_table,
        seq_lens,
        log_sums,
        scale * 1.4426950408889634,
        num_reqs,
        max_blocks,
        block_table.stride(0),
        block_stride,
        head_stride,
        token_stride,
        NUM_KV_HEADS=layers.num_kv_heads,
        GROUP=group,
        GROUP_PADDED=max(16, triton.next_power_of_2(group)),
        HEAD_SIZE=head_size,
        HEAD_SIZE_PADDED=max(16, triton.next_power_of_2(head_size)),
        BLOCK_SIZE=block_size,
        TILE_BLOCKS=tile_blocks,
        TILES=tiles,
        ELEMENT=_FLOATS[layers.dtype],
        num_warps=num_warps,
    )
    _head_log_sums_kernel[(num_layers * num_reqs * num_heads,)](
        log_sums,
        seq_lens,
        head_log_sums,
        num_reqs,
        num_heads,
        max_blocks,
        BLOCK_SIZE=block_size,
        CHUNK=1024,
    )
    _block_masses_kernel[(triton.cdiv(max_blocks, 256), num_layers * num_reqs)](
        log_sums,
        head_log_sums,
        seq_lens,
        masses,
        num_reqs,
        max_blocks,
        NUM_HEADS=num_heads,
        BLOCK_SIZE=block_size,
        CHUNK=256,
    )
    return masses
