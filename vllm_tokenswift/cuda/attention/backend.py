"""Attention backends that verify draft trees, derived from vLLM's FlashAttention and Triton ones.

Without tree rows in the metadata everything is vLLM's own. With them, the leading requests'
rows take two steps: attention over the paged prefix with log-sum-exp, then
:func:`tree_attention` over the step's own K and V; the other rows take the stock path.
The prefix part is FlashAttention 3's where that is there, else :func:`prefix_attention`.

From vllm/v1/attention/backends/{flash_attn,triton_attn}.py, alike in 0.32 and 0.33 here.

CUDA graphs. Piecewise graphs run attention outside of the graphs. Full graphs are captured and
replayed for batches in which every request has the same number of rows, or fewer with
the missing ones as padding at the end (``cuda/runner.py``): such a batch
always takes the tree path (its trees are chains unless :class:`CudaTreeAttention` fills in
others), so that a captured graph and the step that replays it agree.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn, triton_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from vllm_tokenswift.cuda.attention.prefix_kernel import prefix_attention
from vllm_tokenswift.cuda.attention.tree_kernel import tree_attention
from vllm_tokenswift.cuda.attention.tree_rows import MAX_TREE_ROWS, DeviceTreeRows, TreeRowBuffers


@dataclasses.dataclass
class TreeExtras:
    """What our metadata adds to the stock fields.

    Attributes:
        trees: the tree rows of the step, or None: the stock path for all.
        query_rows: int64 on the device, rows whose query is copied into ``kept_queries``.
        kept_queries: ``[len(query_rows), num_heads, head_size]``, of this layer.
    """

    trees: DeviceTreeRows | None = None
    query_rows: torch.Tensor | None = None
    kept_queries: torch.Tensor | None = None


@dataclasses.dataclass
class TreeFlashMetadata(TreeExtras, flash_attn.FlashAttentionMetadata):
    """FlashAttention's metadata and ours."""


@dataclasses.dataclass
class TreeTritonMetadata(TreeExtras, triton_attn.TritonAttentionMetadata):
    """Triton attention's metadata and ours."""


class TreeMetadataBuilder:
    """Mixed in before a stock builder: tree rows for uniform batches, and for given trees."""

    metadata_cls: type
    vllm_config: VllmConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        scheduler = self.vllm_config.scheduler_config
        device: torch.device = self.device  # type: ignore[attr-defined]
        self.tree_rows = TreeRowBuffers(
            scheduler.max_num_seqs, scheduler.max_num_batched_tokens, device
        )
        # Decoding requests, drafts included, before prefills: tree rows come first.
        self.reorder_batch_threshold = 1 + self.vllm_config.num_speculative_tokens

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        num_reqs = common_attn_metadata.num_reqs
        num_rows = common_attn_metadata.num_actual_tokens
        # In a captured shape all requests have as many rows, padding at the end included.
        width = num_rows // num_reqs
        uniform = num_rows == num_reqs * width and width >= common_attn_metadata.max_query_len
        trees = (
            self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
            and uniform
            and 1 < width <= MAX_TREE_ROWS
        )
        # The tree path has a schedule of its own, of the prefixes.
        stock = super().build(  # type: ignore[misc]
            common_prefix_len, common_attn_metadata, fast_build or trees
        )
        if not trees:
            return stock
        return self.with_rows(stock, self.tree_rows.uniform_chains(common_attn_metadata, width))

    def reschedule(self, common: CommonAttentionMetadata, built: Any) -> None:
        """Makes anew what the device derives from a step's rows and lengths.

        For a full graph, which reads of its metadata only what device buffers hold. Launches
        alone, the same ones each time: a graph may hold them.

        Args:
            common: what ``built`` was made of, its tensors being the step's.
            built: what :meth:`build` returned.
        """

    def extended(self, stock: Any, **extras: Any) -> Any:
        """The stock metadata as ours; what is not named stays."""
        fields = {f.name: getattr(stock, f.name) for f in dataclasses.fields(stock)}
        return self.metadata_cls(**fields | extras)

    def with_rows(self, stock: Any, rows: DeviceTreeRows) -> Any:
        """The step's metadata with tree rows; a remainder of requests keeps the stock path."""
        num_trees = rows.start_loc.shape[0] - 1
        rows.max_num_splits = getattr(stock, "max_num_splits", 0)
        rows.schedule = self._prefix_schedule(rows)
        if num_trees < stock.seq_lens.shape[0] and rows.num_rows < stock.num_actual_tokens:
            rows.rest = self._rest(stock, num_trees, rows.num_rows)
        return self.extended(stock, trees=rows)

    def _rest(self, stock: Any, num_trees: int, num_rows: int) -> Any:
        rest = copy.copy(stock)
        rest.num_actual_tokens = stock.num_actual_tokens - num_rows
        rest.query_start_loc = stock.query_start_loc[num_trees:] - num_rows
        rest.seq_lens = stock.seq_lens[num_trees:]
        rest.block_table = stock.block_table[num_trees:]
        rest.slot_mapping = stock.slot_mapping[num_rows:]
        rest.scheduler_metadata = None  # made for all requests; attention makes its own
        return rest

    def _prefix_schedule(self, rows: DeviceTreeRows) -> torch.Tensor | None:
        return None


class TreeFlashMetadataBuilder(TreeMetadataBuilder, flash_attn.FlashAttentionMetadataBuilder):
    metadata_cls = TreeFlashMetadata

    def reschedule(self, common: CommonAttentionMetadata, built: Any) -> None:
        trees = getattr(built, "trees", None)
        if trees is not None:
            self._prefix_schedule(trees)
        elif built.scheduler_metadata is not None:
            schedule = self._get_scheduler_metadata(
                aot_schedule=self.aot_schedule,
                batch_size=common.num_reqs,
                cu_query_lens=common.query_start_loc,
                max_query_len=built.max_query_len,
                seqlens=common.seq_lens,
                max_seq_len=common.max_seq_len,
                causal=built.causal,
                max_num_splits=built.max_num_splits,
            )
            self._store_scheduler_metadata(schedule)

    def _prefix_schedule(self, rows: DeviceTreeRows) -> torch.Tensor | None:
        schedule: torch.Tensor | None = self._get_scheduler_metadata(
            aot_schedule=self.aot_schedule,
            batch_size=rows.start_loc.shape[0] - 1,
            cu_query_lens=rows.start_loc,
            max_query_len=rows.max_rows,
            seqlens=rows.prefix_lens,
            max_seq_len=rows.max_prefix_len,
            causal=False,
            max_num_splits=rows.max_num_splits,
        )
        stored: torch.Tensor | None = self._store_scheduler_metadata(schedule)
        return stored


class TreeTritonMetadataBuilder(TreeMetadataBuilder, triton_attn.TritonAttentionMetadataBuilder):
    metadata_cls = TreeTritonMetadata


class TreeAttentionImpl:
    """Mixed in before a stock implementation."""

    scale: float
    num_heads: int
    num_kv_heads: int

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the stock ``forward``: rows of q, k, v and output by query row of the step."""
        trees = None
        if isinstance(attn_metadata, TreeExtras):
            if attn_metadata.query_rows is not None:
                assert attn_metadata.kept_queries is not None
                torch.index_select(
                    query, 0, attn_metadata.query_rows, out=attn_metadata.kept_queries
                )
            trees = attn_metadata.trees
        if trees is None:
            stock: torch.Tensor = super().forward(  # type: ignore[misc]
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
            return stock
        n = trees.num_rows
        states, lse = self.prefix_states(query[:n], kv_cache, attn_metadata, trees, output[:n])
        tree_attention(
            query,
            key,
            value,
            states,
            lse,
            output,
            trees.start_loc,
            trees.ancestors,
            self.scale,
            trees.max_rows,
        )
        if trees.rest is not None:
            super().forward(  # type: ignore[misc]
                layer, query[n:], key[n:], value[n:], kv_cache, trees.rest, output[n:]
            )
        return output

    def prefix_states(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        trees: DeviceTreeRows,
        output: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The prefix part of the tree rows' attention.

        Args:
            query: ``[rows, heads, size]``, of the tree rows.
            kv_cache: the layer's.
            attn_metadata: the step's, for its block table.
            trees: the tree rows.
            output: ``[rows, heads, size]``, which may serve as the state's memory.

        Returns:
            States ``[slices, rows, heads, size]`` and log-sum-exp ``[slices, heads, rows]``.
        """
        num_trees = trees.start_loc.shape[0] - 1
        return prefix_attention(
            query,
            kv_cache,
            attn_metadata.block_table[:num_trees],
            trees.prefix_lens,
            trees.start_loc,
            self.scale,
            trees.max_rows,
            num_slices_for(
                num_trees * self.num_kv_heads, trees.max_rows * self.num_heads // self.num_kv_heads
            ),
        )


def num_slices_for(num_tiles: int, packed_rows: int, block_m: int = 64) -> int:
    """Slices of a prefix that fill a device of 132 multiprocessors twice: a power of two."""
    programs = num_tiles * -(-packed_rows // block_m)
    wanted = -(-264 // programs)
    return min(32, 1 << (wanted - 1).bit_length())


class TreeFlashImpl(TreeAttentionImpl, flash_attn.FlashAttentionImpl):
    _cache: torch.Tensor | None = None
    _cache_views: tuple[torch.Tensor, torch.Tensor]

    def prefix_states(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        trees: DeviceTreeRows,
        output: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.vllm_flash_attn_version != 3:
            # FlashAttention 2 does not split a prefix among programs for several query rows.
            return super().prefix_states(query, kv_cache, attn_metadata, trees, output)
        if self._cache is not kv_cache:  # these views cost as much host time as the launch
            views = kv_cache.transpose(1, 2)
            self._cache = kv_cache
            self._cache_views = (
                flash_attn.canonicalize_singleton_dim_strides(views[..., : self.head_size]),
                flash_attn.canonicalize_singleton_dim_strides(views[..., self.head_size :]),
            )
        key_cache, value_cache = self._cache_views
        state, lse = flash_attn.flash_attn_varlen_func(
            q=query,
            k=key_cache,
            v=value_cache,
            out=output,
            cu_seqlens_q=trees.start_loc,
            max_seqlen_q=trees.max_rows,
            seqused_k=trees.prefix_lens,
            max_seqlen_k=trees.max_prefix_len,
            softmax_scale=self.scale,
            causal=False,
            block_table=attn_metadata.block_table[: trees.start_loc.shape[0] - 1],
            return_softmax_lse=True,
            scheduler_metadata=trees.schedule,
            fa_version=3,
            num_splits=trees.max_num_splits,
        )
        return state.unsqueeze(0), lse.unsqueeze(0)


class TreeTritonImpl(TreeAttentionImpl, triton_attn.TritonAttentionImpl):
    pass


class TreeFlashBackend(flash_attn.FlashAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeFlashImpl]:
        return TreeFlashImpl

    @staticmethod
    def get_builder_cls() -> type[TreeFlashMetadataBuilder]:
        return TreeFlashMetadataBuilder


class TreeTritonBackend(triton_attn.TritonAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[TreeTritonImpl]:
        return TreeTritonImpl

    @staticmethod
    def get_builder_cls() -> type[TreeTritonMetadataBuilder]:
        return TreeTritonMetadataBuilder


_OURS = {
    AttentionBackendEnum.FLASH_ATTN: TreeFlashBackend,
    AttentionBackendEnum.TRITON_ATTN: TreeTritonBackend,
}


def preferred_backend(dtype: torch.dtype) -> AttentionBackendEnum:
    """FlashAttention where it runs (compute capability 8 on, 16-bit types), else Triton."""
    capability = current_platform.get_device_capability()
    if capability is not None and capability.major >= 8 and dtype.itemsize == 2:
        return AttentionBackendEnum.FLASH_ATTN
    return AttentionBackendEnum.TRITON_ATTN


@contextmanager
def tree_backends(vllm_config: VllmConfig) -> Iterator[None]:
    """While a model is built inside, its attention layers take our backends.

    Where ``attention_config.backend`` names none, ours is preferred to others that vLLM would
    put first and that know no trees. Configuration and registry are put back afterwards:
    another engine in the same process must find vLLM as it was.
    """
    attention = vllm_config.attention_config
    named = attention.backend
    if named is None:
        attention.backend = preferred_backend(vllm_config.model_config.dtype)
    for backend, ours in _OURS.items():
        register_backend(backend, f"{ours.__module__}.{ours.__qualname__}")
    _cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        attention.backend = named
        for backend in _OURS:
            backend.clear_override()
        _cached_get_attn_backend.cache_clear()
