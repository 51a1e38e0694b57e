"""vLLM's CPU attention backend, extended where a step carries trees or a draft pass.

Derived from ``vllm/v1/attention/backends/cpu_attn.py``. Metadata of the stock
class takes the stock path untouched; :class:`ChainMetadata` adds what
``chains.py`` needs before the kernel, :class:`DraftMetadata` keeps the queries
of a draft pass for the importance scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
)


@dataclass
class ChainMetadata(CPUAttentionMetadata):
    """A verify step with branching trees, cut into chains (all fields: ``chains.py``).

    Attributes:
        kv_caches: every layer's cache by name, in the order they run in; the first layer copies the
            tails of all: between two layers an operation of torch takes long, because the weights
            have taken its code's place in the processor's cache.
    """

    tail_copies: list[tuple[int, slice]] = field(default_factory=list)
    extra_slots: tuple[torch.Tensor, ...] = ()
    kv_caches: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class DraftMetadata(CPUAttentionMetadata):
    """A draft pass: one query row a request, over the layer's draft block table.

    Attributes:
        query_rows: int64 ``[kept queries]``: rows whose query is kept for the importance scores.
        kept_queries: ``[kept queries, heads, head size]``, by layer.
    """

    query_rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    kept_queries: dict[str, torch.Tensor] = field(default_factory=dict)


class TreeCPUAttentionImpl(CPUAttentionBackendImpl):
    def forward(  # type: ignore[no-untyped-def]
        self, layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
    ) -> torch.Tensor:
        if isinstance(attn_metadata, ChainMetadata):
            self._fill_scratch(layer, key, value, kv_cache, attn_metadata)
        elif isinstance(attn_metadata, DraftMetadata) and len(attn_metadata.query_rows):
            attn_metadata.kept_queries[layer.layer_name] = query[attn_metadata.query_rows]
        return super().forward(
            layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs
        )

    def _fill_scratch(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: ChainMetadata,
    ) -> None:
        if layer.layer_name == next(iter(metadata.kv_caches)):
            for cache in metadata.kv_caches.values():
                for source, targets in metadata.tail_copies:
                    cache[targets] = cache[source]
        # The kernel skips rows whose slot is negative.
        for slots in metadata.extra_slots:
            self.do_kv_cache_update(layer, key, value, kv_cache, slots)


class TreeCPUAttentionBackend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeCPUAttentionImpl]:
        return TreeCPUAttentionImpl


def scheduler_metadata(
    builder: object, query_start_loc: torch.Tensor, seq_lens: torch.Tensor
) -> torch.Tensor:
    """The kernel's work split for a causal batch.

    As ``CPUAttentionMetadataBuilder.build`` (``vllm/v1/attention/backends/cpu_attn.py``) makes it.

    Args:
        builder: one of that class.
        query_start_loc: int32 ``[r + 1]``.
        seq_lens: int32 ``[r]``.
    """
    from vllm import envs

    return ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(seq_lens),
        num_heads=builder.num_heads,  # type: ignore[attr-defined]
        num_kv_heads=builder.num_kv_heads,  # type: ignore[attr-defined]
        head_dim=builder.head_dim,  # type: ignore[attr-defined]
        seq_lens=seq_lens,
        dtype=builder.dtype,  # type: ignore[attr-defined]
        query_start_loc=query_start_loc,
        causal=True,
        sliding_window_size=builder.window_size,  # type: ignore[attr-defined]
        isa=builder.isa,  # type: ignore[attr-defined]
        enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        kv_cache_dtype=builder.kv_cache_dtype,  # type: ignore[attr-defined]
    )


def key_permutation(
    impl: TreeCPUAttentionImpl, layer: torch.nn.Module, block: torch.Tensor
) -> torch.Tensor:
    """Where the kernel keeps a block's keys: int64 ``[block_size * head_dim]``.

    ``block[0, head].flatten()[:block_size * head_dim][permutation]`` is the keys
    as ``[block_size, head_dim]``. vLLM's CPU kernels store keys transposed or in
    tiles, depending on the instruction set; instead of knowing every layout, write
    two blocks of known keys through vLLM's own kernel and see where they went.

    Args:
        block: one scratch block, ``[1, kv_heads, block_size, 2 * head_dim]``; overwritten.

    Raises:
        ValueError: If the layout is not a permutation.
    """
    _, num_kv_heads, block_size, width = block.shape
    head_dim = width // 2
    slots = torch.arange(block_size)
    found = []
    for axis in (0, 1):
        # Small integers: exact in every dtype of a KV cache that is supported here.
        index = torch.arange(block_size if axis == 0 else head_dim)
        grid = (index[:, None] if axis == 0 else index[None, :]).expand(block_size, head_dim)
        coordinate = []
        for part in (grid % 256, grid // 256):
            keys = part.to(block.dtype)[:, None, :].expand(-1, num_kv_heads, -1).contiguous()
            impl.do_kv_cache_update(layer, keys, keys, block, slots)
            coordinate.append(block[0, 0].flatten()[: block_size * head_dim].to(torch.int64))
        found.append(coordinate[0] + 256 * coordinate[1])
    flat = found[0] * head_dim + found[1]
    permutation = torch.full((block_size * head_dim,), -1, dtype=torch.int64)
    inside = (flat >= 0) & (flat < block_size * head_dim)
    permutation[flat[inside]] = torch.arange(len(flat))[inside]
    if (permutation < 0).any():
        raise ValueError(
            "the KV cache layout of this CPU attention kernel is not a permutation of the keys; "
            "partial_kv must be 'full' here"
        )
    return permutation


def gather_keys(
    kv_cache: torch.Tensor, blocks: torch.Tensor, permutation: torch.Tensor
) -> torch.Tensor:
    """The keys of some physical blocks.

    Args:
        kv_cache: ``[blocks, kv_heads, block_size, 2 * head_dim]``, a layer's.
        blocks: int64 ``[chosen blocks]``, physical.
        permutation: see :func:`key_permutation`.

    Returns:
        ``[chosen blocks, kv_heads, block_size, head_dim]``.
    """
    _, num_kv_heads, block_size, width = kv_cache.shape
    head_dim = width // 2
    flat = kv_cache[blocks].reshape(len(blocks), num_kv_heads, -1)
    return flat[..., permutation].view(len(blocks), num_kv_heads, block_size, head_dim)
