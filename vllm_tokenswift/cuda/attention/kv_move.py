"""Moves the KV of accepted drafts to the slots where plain decoding would have put it.

What. For every request and layer, for each move in order: slot ``dst`` becomes a
copy of slot ``src`` (K and V of all heads).

Memory. Each moved slot is read once and written once per layer: 8 moves in the 8B
shape (4 KiB a slot and layer) are 2.1 MB over 32 layers. One launch for all layers.

Aliasing. Sources and destinations of one request may overlap as ranges. The
accepted nodes ``n_1 < n_2 < ...`` of depths 1, 2, ... move from ``n_d`` to ``d <= n_d``,
so no source is an earlier destination, while a destination may be an earlier
source. A program owns a stripe of every slot and takes the moves in order,
each thread the same elements of each: it reads what it will overwrite before it
does. Slots of different requests must differ.

Sentinel. A negative ``src`` means no move.

CUDA graphs. The launch depends on shapes and ``num_moves``; the contents of ``src_slots`` and
``dst_slots`` may change between replays.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_tokenswift.cuda.attention.cache_layout import CacheLayers

# A copy does not look at the numbers: elements travel as integers of the same width.
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


def move_kv_reference(
    layers: CacheLayers, src_slots: torch.Tensor, dst_slots: torch.Tensor
) -> None:
    """Eager twin of :func:`move_kv`: same arguments."""
    moved = src_slots.flatten() >= 0
    src, dst = src_slots.flatten()[moved].long(), dst_slots.flatten()[moved].long()
    size = layers.block_size
    for cache in layers.caches:
        cache[dst // size, :, dst % size] = cache[src // size, :, src % size].clone()


@triton.jit(do_not_specialize=["num_moves"])
def _move_kv_kernel(
    addresses_ptr,  # [num_layers]
    src_slots_ptr,  # [num_reqs, max_moves]
    dst_slots_ptr,  # [num_reqs, max_moves]
    num_moves,
    slots_stride,
    block_stride,
    head_stride,
    token_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_ELEMENTS: tl.constexpr,
    SLOT_ELEMENTS: tl.constexpr,
    STRIPE: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    layer = tl.program_id(0)
    request = tl.program_id(1)
    # Caches are allocated at 16 bytes and more; a compiler that knows copies 16 at once.
    cache_ptr = tl.load(addresses_ptr + layer).to(tl.pointer_type(ELEMENT))
    cache_ptr = tl.multiple_of(cache_ptr, 16)
    element = tl.program_id(2) * STRIPE + tl.arange(0, STRIPE)
    element_ok = element < SLOT_ELEMENTS
    in_slot = (element // HEAD_ELEMENTS) * head_stride + element % HEAD_ELEMENTS

    for move in range(num_moves):
        src = tl.load(src_slots_ptr + request * slots_stride + move).to(tl.int64)
        if src >= 0:
            dst = tl.load(dst_slots_ptr + request * slots_stride + move).to(tl.int64)
            src_at = (src // BLOCK_SIZE) * block_stride + (src % BLOCK_SIZE) * token_stride
            dst_at = (dst // BLOCK_SIZE) * block_stride + (dst % BLOCK_SIZE) * token_stride
            moved = tl.load(cache_ptr + src_at + in_slot, mask=element_ok)
            tl.store(cache_ptr + dst_at + in_slot, moved, mask=element_ok)


def move_kv(
    layers: CacheLayers,
    src_slots: torch.Tensor,
    dst_slots: torch.Tensor,
    num_moves: int | None = None,
    stripe: int = 512,
    num_warps: int = 2,
) -> None:
    """Copies slots to slots in every layer's KV cache; see the module's header.

    Args:
        layers: the caches.
        src_slots: int64 or int32 ``[num_reqs, max_moves]`` on the device, KV slots (physical block
            * block size + offset); moves of a request by rising depth.
        dst_slots: the same, where they go.
        num_moves: moves of each request that are looked at; all unless given.
    """
    num_reqs, max_moves = src_slots.shape
    slot_elements = layers.num_kv_heads * 2 * layers.head_size
    block_stride, head_stride, token_stride = layers.strides
    grid = (layers.num_layers, num_reqs, triton.cdiv(slot_elements, stripe))
    _move_kv_kernel[grid](
        layers.addresses,
        src_slots,
        dst_slots,
        max_moves if num_moves is None else num_moves,
        src_slots.stride(0),
        block_stride,
        head_stride,
        token_stride,
        BLOCK_SIZE=layers.block_size,
        HEAD_ELEMENTS=2 * layers.head_size,
        SLOT_ELEMENTS=slot_elements,
        STRIPE=stripe,
        ELEMENT=_INTEGERS[layers.dtype.itemsize],
        num_warps=num_warps,
    )
