"""The CUDA side of the seam: trees into metadata, accepted KV kept, draft passes, scores.

See :class:`~vllm_tokenswift.engine.tree_attention.TreeAttention` for what is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.utils import CpuGpuBuffer

from vllm_tokenswift.common.staging import Staging
from vllm_tokenswift.cuda.attention.backend import TreeAttentionImpl, TreeMetadataBuilder
from vllm_tokenswift.cuda.attention.block_scores import block_scores
from vllm_tokenswift.cuda.attention.cache_layout import CacheLayers
from vllm_tokenswift.cuda.attention.kv_move import move_kv
from vllm_tokenswift.cuda.attention.tree_kernel import MAX_DRAFT_NODES
from vllm_tokenswift.cuda.attention.tree_rows import MAX_TREE_ROWS
from vllm_tokenswift.engine.step_trees import RequestTree, StepTrees
from vllm_tokenswift.engine.tree_attention import LayerMetadata
from vllm_tokenswift.tree import DraftTree


class CUDATreeAttention:
    """See :class:`~vllm_tokenswift.engine.tree_attention.TreeAttention`.

    Args:
        layers: the model's attention layers by name.
        builder: their metadata builder.
        max_num_reqs: most requests of a batch.
        max_depth: most accepted drafts of one.

    Raises:
        ValueError: Where a layer is of a kind that trees are not made for.
    """

    chains_cost = False
    max_side_chains = MAX_DRAFT_NODES

    def __init__(
        self,
        layers: dict[str, Attention],
        builder: TreeMetadataBuilder,
        max_num_reqs: int,
        max_depth: int,
    ) -> None:
        for name, layer in layers.items():
            _refuse_unsupported(name, layer)
        self.layer_names = list(layers)
        self.builder = builder
        self.cache = CacheLayers.of([layer.kv_cache for layer in layers.values()])
        self.block_size = self.cache.block_size
        self.scale: float = next(iter(layers.values())).impl.scale
        self.num_heads: int = next(iter(layers.values())).impl.num_heads
        device = self.cache.addresses.device
        self._staging = Staging(device)
        self._moves = CpuGpuBuffer(2, max_num_reqs, max_depth, dtype=torch.int64, device=device)

    def warm_up(self, ranks_blocks: bool) -> None:
        """Compiles what no captured pass launches.

        Args:
            ranks_blocks: whether blocks will be scored.
        """
        self._moves.np[0, 0, :1] = -1  # no move
        on_device = self._moves.copy_to_gpu()
        move_kv(self.cache, on_device[0, :1], on_device[1, :1], 1)
        if ranks_blocks:
            shape = (len(self.layer_names), 1, self.num_heads, self.cache.head_size)
            queries = torch.zeros(shape, dtype=self.cache.dtype, device=on_device.device)
            blocks, num_tokens = self._staging.to_device(
                np.zeros((1, 1), np.int32), np.ones(1, np.int32)
            )
            block_scores(queries, self.cache, blocks, num_tokens, self.scale)

    def with_trees(
        self,
        metadata: LayerMetadata,
        trees: StepTrees,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
    ) -> tuple[LayerMetadata, dict[str, frozenset[int]]]:
        widths = np.diff(query_start_loc)
        too_wide = np.flatnonzero(widths > MAX_TREE_ROWS)
        num_leading = int(too_wide[0]) if len(too_wide) else len(widths)
        leading = []
        dead: dict[str, frozenset[int]] = {}
        for rows in trees.branching:
            if rows.batch_row < num_leading:
                leading.append((rows.batch_row, rows.tree))
            else:
                dead[rows.req_id] = _nodes_off_the_main_chain(rows.tree)
        if not leading:
            return metadata, dead
        stock = metadata[self.layer_names[0]]
        buffers = self.builder.tree_rows
        starts = query_start_loc[: num_leading + 1]
        if getattr(stock, "trees", None) is not None:
            # A uniform batch: its metadata reads the buffer that this fills.
            buffers.fill_ancestors(starts, leading)
            return metadata, dead
        filled = buffers.fill(starts, seq_lens[:num_leading], leading)
        return dict.fromkeys(metadata, self.builder.with_rows(stock, filled)), dead

    def commit(
        self,
        trees: StepTrees,
        accepted: dict[str, list[int]],
        block_table: npt.NDArray[np.int32],
    ) -> int:
        moves = [self._slots(rows, accepted[rows.req_id], block_table) for rows in trees.branching]
        moves = [pair for pair in moves if len(pair[0])]
        if not moves:
            return 0
        width = max(len(src) for src, _ in moves)
        staged = self._moves.np
        staged[0, : len(moves), :width] = -1  # no move
        for i, (src, dst) in enumerate(moves):
            staged[0, i, : len(src)] = src
            staged[1, i, : len(dst)] = dst
        on_device = self._moves.copy_to_gpu()
        move_kv(self.cache, on_device[0, : len(moves)], on_device[1, : len(moves)], width)
        return sum(len(src) for src, _ in moves)

    def _slots(
        self, rows: RequestTree, nodes: list[int], block_table: npt.NDArray[np.int32]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """KV slots, from and to, of the accepted nodes that do not lie where they belong."""
        path = np.asarray(nodes, np.int64)
        depths = np.arange(1, len(path) + 1)
        moved = path != depths
        table = block_table[rows.batch_row].astype(np.int64)

        def slots(offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            positions = rows.root_position + offsets
            blocks: npt.NDArray[np.int64] = table[positions // self.block_size]
            return blocks * self.block_size + positions % self.block_size

        return slots(path[moved]), slots(depths[moved])

    def draft_metadata(
        self,
        block_tables: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        slots: torch.Tensor,
        query_rows: npt.NDArray[np.int64],
        query_start_loc: npt.NDArray[np.int32] | None = None,
    ) -> LayerMetadata:
        num_layers, num_reqs, _ = block_tables.shape
        starts = (
            np.arange(num_reqs + 1, dtype=np.int32) if query_start_loc is None else query_start_loc
        )
        tables, starts_d, seq_lens_d, rows = self._staging.to_device(
            block_tables, starts, seq_lens, query_rows
        )
        common = CommonAttentionMetadata(
            query_start_loc=starts_d,
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=seq_lens_d,
            num_reqs=num_reqs,
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(np.diff(starts).max()),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=tables[0],
            slot_mapping=slots,
        )
        stock = self.builder.build(0, common)
        if common.max_query_len > 1 and getattr(stock, "trees", None) is None:
            # Several rows a request stand for a verify pass: they take its path.
            stock = self.builder.with_rows(stock, self.builder.tree_rows.fill(starts, seq_lens, ()))
        extras: list[dict[str, torch.Tensor]] = [{} for _ in self.layer_names]
        if len(query_rows):
            shape = (num_layers, len(query_rows), self.num_heads, self.cache.head_size)
            kept = torch.empty(shape, dtype=self.cache.dtype, device=rows.device)
            for layer, queries in zip(extras, kept.unbind(), strict=True):
                layer |= {"query_rows": rows, "kept_queries": queries}
        return self._by_layer(stock, tables, extras)

    def by_layer(self, common: CommonAttentionMetadata, tables: torch.Tensor) -> LayerMetadata:
        """Metadata of one row a request, each layer with its block table of ``tables``.

        Args:
            common: what the builder makes metadata of.
            tables: int32 ``[layers, requests, blocks]`` on the device.
        """
        return self._by_layer(self.builder.build(0, common), tables, [{}] * len(tables))

    def _by_layer(
        self, stock: Any, tables: torch.Tensor, extras: Sequence[dict[str, torch.Tensor]]
    ) -> LayerMetadata:
        base = self.builder.extended(stock)
        return {
            name: _with_fields(base, {"block_table": table, **extra})
            for name, table, extra in zip(self.layer_names, tables.unbind(), extras, strict=True)
        }

    def block_masses(
        self,
        metadata: LayerMetadata,
        query_index: int,
        blocks: npt.NDArray[np.int32],
        num_tokens: int,
    ) -> npt.NDArray[np.float32]:
        blocks_d, num_tokens_d = self._staging.to_device(blocks, np.array([num_tokens], np.int32))
        queries = torch.stack(
            [metadata[name].kept_queries[query_index] for name in self.layer_names]
        )
        masses = block_scores(
            queries.unsqueeze(1),  # [layers, 1, heads, head_size]
            self.cache,
            blocks_d[None],
            num_tokens_d,
            self.scale,
        )
        scores: npt.NDArray[np.float32] = masses[:, 0].cpu().numpy()
        return scores


def _with_fields(metadata: Any, fields: dict[str, torch.Tensor]) -> Any:
    """A shallow copy with some fields set: there is one for each layer, made in each pass."""
    changed = object.__new__(type(metadata))
    changed.__dict__.update(metadata.__dict__, **fields)
    return changed


def _nodes_off_the_main_chain(tree: DraftTree) -> frozenset[int]:
    """Nodes that causal attention does not verify rightly: their rows see other branches."""
    return frozenset(range(tree.chains[0].last + 1, len(tree) + 1))


def _refuse_unsupported(name: str, layer: Any) -> None:
    impl = layer.impl
    if not isinstance(impl, TreeAttentionImpl):
        raise ValueError(
            f"attention layer {name} runs on {type(impl).__name__}: TokenSwift verifies trees on "
            "FLASH_ATTN and TRITON_ATTN; set attention_config.backend to one of them"
        )
    stock: Any = impl
    refused = {
        f"a KV cache of type {stock.kv_cache_dtype}": stock.kv_cache_dtype
        not in ("auto", "float16", "bfloat16"),
        "heads of more than 256 elements": stock.head_size > 256,
        "a sliding window": tuple(stock.sliding_window) != (-1, -1),
        "ALiBi": stock.alibi_slopes is not None,
        "soft-capped logits": bool(stock.logits_soft_cap),
        "attention sinks": stock.sinks is not None,
        "a KV cache shared with another layer": layer.kv_sharing_target_layer_name is not None,
        "attention other than a decoder's": stock.attn_type != AttentionType.DECODER,
    }
    for what, present in refused.items():
        if present:
            raise ValueError(
                f"attention layer {name} has {what}, which TokenSwift does not support on CUDA; "
                "it supports full causal attention with a bf16, fp16 or float32 KV cache"
            )
