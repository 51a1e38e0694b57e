"""The self-draft: one forward pass of the target itself over the partial KV cache.

Paper, algorithm 1, "Multi-token Parallel Generation". One query row a request, the newest
token at its own position, attending through the draft block table of each layer: the bonus
token, or in a further pass the token that the one before it proposed. The pass writes the
token's KV, computed from the partial cache, at the token's own slot; the verify pass
processes the same position and overwrites it, so nothing approximate survives in the full cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from vllm_tokenswift.common.staging import Staging
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.engine.tree_attention import LayerMetadata
from vllm_tokenswift.partial_kv.table import DraftBlockTable


@dataclass(frozen=True)
class DraftRow:
    """One request of a draft pass.

    Attributes:
        req_id: the request.
        token: the newest of the sequence.
        num_tokens: tokens of the sequence, that one included.
        blocks: int32 ``[blocks]``, physical blocks of the request in logical order.
        table: says which of them the pass reads.
    """

    req_id: str
    token: int
    num_tokens: int
    blocks: np.ndarray
    table: DraftBlockTable


@dataclass(frozen=True)
class PassInputs:
    """A draft pass laid out on the host; a row is a request.

    Attributes:
        tables: int32 ``[layers, rows, blocks]``, physical.
        seq_lens: int32 ``[rows]``, tokens of each compact sequence.
        slots: int64 ``[rows]``, where each row's KV goes.
        token_ids: int32 ``[rows]``.
        positions: int64 ``[rows]``, of RoPE.
        ranking: rows whose query is kept to rank their blocks.
    """

    tables: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int64]
    ranking: Sequence[int]


@dataclass
class DraftPassRecord:
    """What a pass read, for inspection.

    Attributes:
        logical_blocks: by request, int32 ``[layers, blocks]``, logical.
        refreshed: requests whose blocks were selected anew.
    """

    logical_blocks: dict[str, np.ndarray]
    refreshed: list[str]


class DraftPass:
    """Runs draft passes over the runner's own input buffers (fixed addresses for CUDA graphs).

    Args:
        runner: whose target it runs.

    Attributes:
        last: what the newest pass read.
    """

    def __init__(self, runner: RunnerView) -> None:
        self.vllm_config: VllmConfig = runner.vllm_config
        self.attention = runner.tree_attention
        self.model = runner.forward_rows
        self.input_ids: torch.Tensor = runner.input_ids.gpu
        self.positions: torch.Tensor = runner.positions
        self._staging = Staging(runner.device)
        self.last: DraftPassRecord | None = None

    def run(self, rows: list[DraftRow]) -> torch.Tensor:
        """Runs a pass of some requests (paper, algorithm 1, "Multi-token Parallel Generation").

        A request whose table needs a selection reads its whole cache in this pass; its
        query then ranks the blocks for the passes that follow.

        Args:
            rows: the requests.

        Returns:
            What the model returns: hidden states ``[requests, hidden]``, and auxiliary ones.
        """
        attention = self.attention
        num_layers, block_size = len(attention.layer_names), attention.block_size
        logical = [self._logical_blocks(row, num_layers) for row in rows]
        width = max(blocks.shape[1] for blocks in logical)
        tables = np.zeros((num_layers, len(rows), width), np.int32)
        seq_lens = np.zeros(len(rows), np.int32)
        slots = np.zeros(len(rows), np.int64)
        for i, (row, blocks) in enumerate(zip(rows, logical, strict=True)):
            tables[:, i, : blocks.shape[1]] = row.blocks[blocks]
            block, offset = divmod(row.num_tokens - 1, block_size)
            seq_lens[i] = (blocks.shape[1] - 1) * block_size + offset + 1
            slots[i] = int(row.blocks[block]) * block_size + offset
        ranking = [i for i, row in enumerate(rows) if row.table.needs_selection(row.num_tokens)]

        token_ids = np.array([row.token for row in rows], np.int32)
        positions = np.array([row.num_tokens - 1 for row in rows], np.int64)
        inputs = PassInputs(tables, seq_lens, slots, token_ids, positions, ranking)
        output, metadata = self.forward(inputs)
        for query_index, i in enumerate(ranking):
            self._rank(metadata, query_index, rows[i])
        self.last = DraftPassRecord(
            {row.req_id: blocks for row, blocks in zip(rows, logical, strict=True)},
            [rows[i].req_id for i in ranking],
        )
        return output

    def forward(self, inputs: PassInputs) -> tuple[Any, LayerMetadata]:
        """What the model returns for the rows, and the metadata it ran with."""
        attention, n = self.attention, len(inputs.token_ids)
        slot_mapping, token_ids_d, positions_d = self._staging.to_device(
            inputs.slots, inputs.token_ids, inputs.positions
        )
        metadata = attention.draft_metadata(
            inputs.tables, inputs.seq_lens, slot_mapping, np.asarray(inputs.ranking, np.int64)
        )
        self.input_ids[:n].copy_(token_ids_d)
        self.positions[:n].copy_(positions_d)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=n,
            slot_mapping=dict.fromkeys(attention.layer_names, slot_mapping),
        ):
            return self.model(self.input_ids[:n], self.positions[:n]), metadata

    def _logical_blocks(self, row: DraftRow, num_layers: int) -> np.ndarray:
        if row.table.needs_selection(row.num_tokens):
            num_blocks = -(-row.num_tokens // self.attention.block_size)
            return np.tile(np.arange(num_blocks, dtype=np.int32), (num_layers, 1))
        return row.table.blocks(row.num_tokens, num_layers)

    def _rank(self, metadata: LayerMetadata, query_index: int, row: DraftRow) -> None:
        num_blocks = -(-row.num_tokens // self.attention.block_size)
        masses = self.attention.block_masses(
            metadata, query_index, row.blocks[:num_blocks], row.num_tokens
        )
        row.table.select(masses, row.num_tokens)
