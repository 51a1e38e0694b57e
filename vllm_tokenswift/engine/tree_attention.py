"""What the runner asks of an attention backend: trees in, accepted KV kept, partial passes.

One implementation for each platform (``tree_attention.py``); everything
above it, the runner mixin included, is the same for all.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_tokenswift.engine.step_trees import StepTrees

LayerMetadata = dict[str, Any]


class TreeAttention(Protocol):
    """Tree attention, the move of accepted KV, and the draft pass's metadata."""

    layer_names: list[str]
    block_size: int
    max_side_chains: int
    """Side chains that one step can verify, over all requests; more become dead nodes."""
    chains_cost: bool
    """Whether a side chain reads the prefix once more (else the whole tree shares one read)."""

    def with_trees(
        self,
        metadata: LayerMetadata,
        trees: StepTrees,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
    ) -> tuple[LayerMetadata, dict[str, frozenset[int]]]:
        """Puts a step's branching trees into its metadata.

        Args:
            metadata: vLLM's, by layer, in which all requests are chains.
            trees: the step's.
            query_start_loc: int32 ``[requests + 1]``, by batch row.
            seq_lens: int32 ``[requests]``, tokens of each with its rows.
            block_table: int32 ``[requests, blocks]``, physical blocks.

        Returns:
            The metadata, and by request the nodes that are not verified.
        """
        ...

    def commit(
        self,
        trees: StepTrees,
        accepted: dict[str, list[int]],
        block_table: npt.NDArray[np.int32],
    ) -> int:
        """Puts the KV of the accepted path where plain decoding would have put it.

        Args:
            trees: the step's.
            accepted: by request, its accepted nodes, from the root down.
            block_table: int32 ``[requests, blocks]``, physical blocks, by batch row.

        Returns:
            The number of tokens moved (0 where every path was the main path).
        """
        ...

    def draft_metadata(
        self,
        block_tables: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        slots: torch.Tensor,
        query_rows: npt.NDArray[np.int64],
        query_start_loc: npt.NDArray[np.int32] | None = None,
    ) -> LayerMetadata:
        """Metadata of a draft pass: one query row a request.

        Args:
            block_tables: int32 ``[layers, requests, blocks]``, physical blocks, each request's
                compact sequence from the left.
            seq_lens: int32 ``[requests]``, its length.
            slots: int64 ``[requests]``, where the pass writes each row's KV.
            query_rows: int64 ``[kept queries]``, rows whose query is kept for :meth:`block_masses`.
            query_start_loc: int32 ``[requests + 1]``, where a request has more than one row (the
                measurement of the cost curve).
        """
        ...

    def block_masses(
        self,
        metadata: LayerMetadata,
        query_index: int,
        blocks: npt.NDArray[np.int32],
        num_tokens: int,
    ) -> npt.NDArray[np.float32]:
        """Importance of every block to one kept query: float32 ``[layers, len(blocks)]``.

        Args:
            metadata: the draft pass's.
            query_index: index into ``query_rows``.
            blocks: int32 ``[blocks]``, physical, in logical order.
            num_tokens: tokens of the sequence that lie in them.
        """
        ...
