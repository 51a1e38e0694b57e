"""Which verify passes run as full CUDA graphs: any number of rows a request, not vLLM's one.

vLLM captures full graphs for batches in which every request has the same number of rows,
``1 + num_speculative_tokens`` or, without drafts, 1. Trees come in every size: here
there is a graph for each of a few *widths* (rows that every request of a batch has), and
a step takes the narrowest that its widest request fits. The rows that are missing are
padding at the end: they write no KV, and no request's attention reaches them.

From vllm/v1/cudagraph_dispatcher.py, alike in 0.32 and 0.33.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

# Tiles of the matrix products are 8, 16, 32, ... rows high: a row less than that saves nothing.
_TILES = (4, 8, 16, 32, 64)
# Attention packs the query rows of a KV head's query heads into tiles of that many (FlashAttention
# 3, heads of 128), and each tile reads the whole prefix.
_ATTENTION_TILE = 128
# A tile is given up for the sake of the last few rows, not of more than this share of one.
_MOST_GIVEN_UP = 1 / 8


def graph_widths(num_speculative_tokens: int, group: int) -> tuple[int, ...]:
    """Rows a request has in the captured shapes, ascending: from 1 to the widest tree's.

    Args:
        num_speculative_tokens: most drafts of a request; the widest tree has a few less where
            these would begin another tile of attention.
        group: query heads that share a KV head.
    """
    widest = 1 + num_speculative_tokens
    rows_of_tile = max(1, _ATTENTION_TILE // group)
    further = widest % rows_of_tile
    if widest > rows_of_tile and further <= rows_of_tile * _MOST_GIVEN_UP:
        widest -= further
    return (1, *(width for width in _TILES if width < widest), widest)


class TreeGraphDispatcher(CudagraphDispatcher):
    """vLLM's dispatcher, and full graphs for trees beside those for plain decoding.

    Args:
        vllm_config: the engine's.
        widths: see :func:`graph_widths`.

    Attributes:
        wide_shapes: the shapes ``(requests, width)`` that are captured besides vLLM's own, once
            the keys are initialized.
    """

    def __init__(self, vllm_config: VllmConfig, widths: Sequence[int]) -> None:
        super().__init__(vllm_config)
        # To vLLM's part a uniform batch is one of plain decodes.
        self.uniform_decode_query_len = 1
        self.widths = tuple(widths)
        self.wide_shapes: list[tuple[int, int]] = []
        self._counts: list[int] = []

    def initialize_cudagraph_keys(
        self, cudagraph_mode: CUDAGraphMode, uniform_decode_query_len: int = 1
    ) -> None:
        super().initialize_cudagraph_keys(cudagraph_mode, 1)
        self.wide_shapes = []
        if cudagraph_mode.decode_mode() is not CUDAGraphMode.FULL:
            return
        largest = self.compilation_config.max_cudagraph_capture_size
        assert largest is not None
        max_num_seqs = self.vllm_config.scheduler_config.max_num_seqs
        powers = (1 << i for i in range(max_num_seqs.bit_length()))
        self._counts = sorted({*powers, max_num_seqs})
        for width in self.widths[1:]:
            for count in self._counts:
                if count * width <= largest:
                    self.wide_shapes.append((count, width))
                    self.add_cudagraph_key(CUDAGraphMode.FULL, wide_descriptor(count, width))

    @property
    def full_shapes(self) -> list[BatchDescriptor]:
        """All shapes of full graphs, plain decoding's among them, the smallest first."""
        keys = self.cudagraph_keys[CUDAGraphMode.FULL]
        shapes = [key for key in keys if key.uniform and key.num_reqs is not None]
        return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.num_reqs))

    def wide(self, num_reqs: int, max_rows: int) -> BatchDescriptor | None:
        """The shape for requests of up to ``max_rows`` rows each (more than 1), if there is one."""
        if not self.wide_shapes or max_rows > self.widths[-1] or num_reqs > self._counts[-1]:
            return None
        width = self.widths[bisect_left(self.widths, max_rows)]
        count = self._counts[bisect_left(self._counts, num_reqs)]
        descriptor = wide_descriptor(count, width)
        return descriptor if descriptor in self.cudagraph_keys[CUDAGraphMode.FULL] else None

    def widest(self, num_reqs: int) -> int:
        """The most rows that each of so many requests may have for :meth:`wide` to find a shape;
        1 where there is none."""
        for width in reversed(self.widths[1:]):
            if self.wide(num_reqs, width) is not None:
                return width
        return 1

    def full(self, num_reqs: int, max_rows: int) -> BatchDescriptor | None:
        """The same for any number of rows: a single one is plain decoding's."""
        if max_rows > 1:
            return self.wide(num_reqs, max_rows)
        mode, descriptor = self.dispatch(num_reqs, uniform_decode=True)
        return descriptor if mode is CUDAGraphMode.FULL else None


def wide_descriptor(num_reqs: int, width: int) -> BatchDescriptor:
    """The shape of so many requests that have as many rows each."""
    return BatchDescriptor(num_tokens=num_reqs * width, num_reqs=num_reqs, uniform=True)
