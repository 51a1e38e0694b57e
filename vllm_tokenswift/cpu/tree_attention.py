"""Tree attention on vLLM's CPU kernel: virtual sequences (``chains.py``) over scratch blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend
from vllm.v1.kv_cache_interface import KVCacheConfig

from vllm_tokenswift.cpu import attention_backend as cpu_attention
from vllm_tokenswift.cpu.attention_backend import ChainMetadata, DraftMetadata
from vllm_tokenswift.cpu.chains import VirtualBatch, cut_into_chains
from vllm_tokenswift.engine.step_trees import StepTrees
from vllm_tokenswift.engine.tree_attention import LayerMetadata
from vllm_tokenswift.partial_kv.importance import block_masses

_STOCK_FIELDS = [f.name for f in dataclasses.fields(CPUAttentionMetadata)]


@contextmanager
def tree_backend() -> Iterator[None]:
    """While a model is built inside, its attention layers take our CPU backend.

    The registry is put back afterwards: another engine in the same process, one
    without TokenSwift, must find vLLM as it was.
    """
    register_backend(
        AttentionBackendEnum.CPU_ATTN,
        f"{cpu_attention.__name__}.{cpu_attention.TreeCPUAttentionBackend.__name__}",
    )
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        _cached_get_attn_backend.cache_clear()


def num_scratch_blocks(num_blocks: int) -> int:
    """Scratch blocks beside a cache of ``num_blocks``: room for the side chains of a step.

    At most 64 (more side chains than that are slower than they are worth on a
    CPU), a sixteenth of the cache where that is less, and never under 8.
    """
    return min(64, max(8, num_blocks // 16))


def with_scratch_blocks(config: KVCacheConfig, extra: int) -> KVCacheConfig:
    """The configuration with ``extra`` more blocks than the scheduler knows of."""
    old, new = config.num_blocks, config.num_blocks + extra
    tensors = []
    for tensor in config.kv_cache_tensors:
        size = tensor.size // old * new
        if tensor.layer_stride >= tensor.block_stride * old:  # layer-outermost layout
            tensors.append(
                dataclasses.replace(
                    tensor,
                    size=size,
                    layer_stride=tensor.layer_stride // old * new,
                    offset=tensor.offset // old * new,
                )
            )
        else:
            tensors.append(dataclasses.replace(tensor, size=size))
    return dataclasses.replace(config, num_blocks=new, kv_cache_tensors=tensors)


class CPUTreeAttention:
    """See :class:`~vllm_tokenswift.engine.tree_attention.TreeAttention`.

    Args:
        layers: the model's attention layers by name.
        builder: their metadata builder.
        scratch_blocks: physical blocks that belong to no request.
    """

    chains_cost = True

    def __init__(
        self, layers: dict[str, Attention], builder: Any, scratch_blocks: list[int]
    ) -> None:
        self.layer_names = list(layers)
        self.layers = layers
        self.builder = builder
        self.block_size: int = builder.block_size
        self.scratch_blocks = scratch_blocks
        self.max_side_chains = len(scratch_blocks)
        self._batch: VirtualBatch | None = None
        self._kv_caches = {name: layer.kv_cache for name, layer in layers.items()}
        first = next(iter(layers.values()))
        self.key_permutation = cpu_attention.key_permutation(
            first.impl, first, first.kv_cache[scratch_blocks[0] : scratch_blocks[0] + 1]
        )

    def with_trees(
        self,
        metadata: LayerMetadata,
        trees: StepTrees,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
    ) -> tuple[LayerMetadata, dict[str, frozenset[int]]]:
        batch = cut_into_chains(
            trees.branching,
            query_start_loc,
            seq_lens,
            block_table,
            self.block_size,
            self.scratch_blocks,
        )
        stock = next(iter(metadata.values()))
        fields = {name: getattr(stock, name) for name in _STOCK_FIELDS}
        starts = torch.from_numpy(batch.query_start_loc)
        lens = torch.from_numpy(batch.seq_lens)
        fields.update(
            query_start_loc=starts,
            seq_lens=lens,
            block_table=torch.from_numpy(batch.block_table),
            scheduler_metadata=cpu_attention.scheduler_metadata(self.builder, starts, lens),
        )
        chained = ChainMetadata(
            **fields,
            tail_copies=batch.tail_copies,
            extra_slots=tuple(torch.from_numpy(slots) for slots in batch.extra_slots),
            kv_caches=self._kv_caches,
        )
        self._batch = batch
        return dict.fromkeys(metadata, chained), batch.dead_nodes

    def commit(
        self,
        trees: StepTrees,
        accepted: dict[str, list[int]],
        block_table: npt.NDArray[np.int32],
    ) -> int:
        batch, self._batch = self._batch, None
        copies: list[tuple[int, int]] = []
        num_moved = 0
        for rows in trees.branching:
            nodes = accepted[rows.req_id]
            moved = sum(node != depth for depth, node in enumerate(nodes, start=1))
            if not moved:  # the main chain's KV lies in its slots
                continue
            assert batch is not None
            num_moved += moved
            first, tail_tokens = divmod(rows.root_position, self.block_size)
            last = first + (tail_tokens + len(nodes)) // self.block_size
            own = block_table[rows.batch_row, first : last + 1].tolist()
            scratch = batch.scratch[rows.req_id, nodes[-1]]
            copies += zip(scratch[: len(own)], own, strict=True)
        for cache in self._kv_caches.values() if copies else ():
            for source, target in copies:
                cache[target] = cache[source]
        return num_moved

    def draft_metadata(
        self,
        block_tables: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        slots: torch.Tensor,
        query_rows: npt.NDArray[np.int64],
        query_start_loc: npt.NDArray[np.int32] | None = None,
    ) -> LayerMetadata:
        if query_start_loc is None:
            query_start_loc = np.arange(len(seq_lens) + 1, dtype=np.int32)
        starts = torch.from_numpy(query_start_loc)
        lens = torch.from_numpy(seq_lens)
        scheduled = cpu_attention.scheduler_metadata(self.builder, starts, lens)
        kept: dict[str, torch.Tensor] = {}
        tables = torch.from_numpy(block_tables)
        return {
            name: DraftMetadata(
                num_actual_tokens=int(query_start_loc[-1]),
                max_query_len=int(np.diff(query_start_loc).max()),
                query_start_loc=starts,
                max_seq_len=int(seq_lens.max()),
                seq_lens=lens,
                block_table=tables[layer],
                slot_mapping=slots,
                scheduler_metadata=scheduled,
                query_rows=torch.from_numpy(query_rows),
                kept_queries=kept,
            )
            for layer, name in enumerate(self.layer_names)
        }

    def block_masses(
        self,
        metadata: LayerMetadata,
        query_index: int,
        blocks: npt.NDArray[np.int32],
        num_tokens: int,
    ) -> npt.NDArray[np.float32]:
        physical = torch.from_numpy(blocks.astype(np.int64))
        masses = [
            block_masses(
                metadata[name].kept_queries[name][query_index],
                cpu_attention.gather_keys(layer.kv_cache, physical, self.key_permutation),
                num_tokens,
                layer.impl.scale,
            )
            for name, layer in self.layers.items()
        ]
        return torch.stack(masses).numpy()
