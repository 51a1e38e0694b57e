"""The inputs of a step of decodes, laid out on the host and copied to the device at once.

vLLM's own ``_prepare_inputs`` (``vllm/v1/worker/gpu_model_runner.py``) makes some twenty
small copies and launches, for features (M-RoPE, LoRA, hybrid models, asynchronous
scheduling) that TokenSwift refuses; on a GPU they take longer than a small model's pass.
Here the same numbers take one call of compiled code and one copy. Steps with prefill chunks,
whose passes are long, stay with vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_tokenswift.common.staging import Staging
from vllm_tokenswift.engine.row_layout import lay_out_rows
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.engine.step_trees import StepTrees


@dataclass(frozen=True)
class RowArrays:
    """Where a step's inputs are laid out, on the host; arrays by row may be longer than a step.

    Attributes:
        positions: int64 ``[rows]``.
        slots: int64 ``[rows]``.
        token_ids: int32 ``[rows]``.
        logits_indices: int32 ``[logits rows]``.
        starts: int32 ``[most requests + 1]``, first row of each request, never falling to the end.
        seq_lens: int32 ``[most requests]``, tokens of each with its rows, 0 behind the batch.
        prefix_lens: int32 ``[most requests]``, tokens of each without its rows, 0 behind the batch.
    """

    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int32]
    logits_indices: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    prefix_lens: npt.NDArray[np.int32]


class StepInputs:
    """Fills the runner's persistent buffers for steps of decoding requests.

    Args:
        runner: whose buffers and batch they are.
    """

    def __init__(self, runner: RunnerView) -> None:
        self.runner = runner
        self._staging = Staging(runner.device)
        self._logits_staging = Staging(runner.device)
        # int64 [most query rows]: each row's place in it is written again only after the step that
        # read it.
        self._node_positions = torch.zeros(
            runner.max_num_tokens, dtype=torch.int64, pin_memory=PIN_MEMORY
        )
        # The block table's rows as they are on the device; unknown at first.
        self._tables = np.empty((0, 0), np.int32)

    def forget_tables(self) -> None:
        """To be called where somebody else writes the block table to the device."""
        self._tables = self._tables[:0]

    def _commit_tables(self, num_reqs: int) -> None:
        """The first requests' rows to the device; most steps they are there already."""
        batch = self.runner.input_batch
        table = batch.block_table[0].get_numpy_array()[:num_reqs]
        if not np.array_equal(table, self._tables[:num_reqs]):
            batch.block_table.commit_block_table(num_reqs)
            self._tables = table.copy()
        else:
            # Rows behind the batch's own may be overwritten as padding.
            self._tables = self._tables[:num_reqs]

    def lay_out(
        self, num_scheduled_tokens: npt.NDArray[np.int32], trees: StepTrees, rows: RowArrays
    ) -> npt.NDArray[np.int64]:
        """Fills ``rows`` and what vLLM keeps of a step on the host.

        Args:
            num_scheduled_tokens: int32 ``[requests]``, query rows of each.
            trees: what they are.
            rows: where they are laid out.

        Returns:
            int64 ``[requests]``, drafts of each.
        """
        runner = self.runner
        batch = runner.input_batch
        num_reqs = batch.num_reqs
        self._commit_tables(num_reqs)
        num_drafts = np.zeros(num_reqs, np.int64)
        for request_tree in trees.trees:
            num_drafts[request_tree.batch_row] = len(request_tree.tree)
        computed = batch.num_computed_tokens_cpu[:num_reqs]
        lay_out_rows(
            num_scheduled_tokens,
            computed,
            num_drafts,
            trees.parents,
            batch.token_ids_cpu,
            batch.block_table[0].get_numpy_array(),
            runner.tree_attention.block_size,
            rows.positions,
            rows.slots,
            rows.token_ids,
            rows.logits_indices,
            rows.starts,
        )
        seq_lens = computed + num_scheduled_tokens
        for lengths, by_request in (
            (rows.seq_lens, seq_lens),
            (rows.prefix_lens, computed),
            (runner.optimistic_seq_lens_cpu.numpy(), seq_lens),
        ):
            lengths[:num_reqs] = by_request
            lengths[num_reqs:] = 0
        runner.query_start_loc.np[:] = rows.starts
        num_tokens = [runner.requests[req_id].num_tokens for req_id in batch.req_ids]
        runner.discard_request_mask.np[:num_reqs] = seq_lens < np.asarray(num_tokens)
        return num_drafts

    def fill(
        self, num_scheduled_tokens: npt.NDArray[np.int32], trees: StepTrees
    ) -> tuple[torch.Tensor, SpecDecodeMetadata, int]:
        """Lays a step out and copies it to the device, in vLLM's ``_prepare_inputs``' place.

        Args:
            num_scheduled_tokens: int32 ``[requests]``, query rows of each.
            trees: what they are.

        Returns:
            What ``_prepare_inputs`` returns: logits rows (int32 on the device), their layout, the
            most of a request.
        """
        runner = self.runner
        num_rows = int(num_scheduled_tokens.sum())
        num_logits = runner.input_batch.num_reqs + sum(len(rows.tree) for rows in trees.trees)
        starts = runner.query_start_loc
        rows = RowArrays(
            positions=np.empty(num_rows, np.int64),
            slots=np.empty(num_rows, np.int64),
            token_ids=np.empty(num_rows, np.int32),
            logits_indices=np.empty(num_logits, np.int32),
            starts=np.empty(len(starts.np), np.int32),
            seq_lens=np.empty(runner.max_num_reqs, np.int32),
            prefix_lens=np.empty(runner.max_num_reqs, np.int32),
        )
        num_drafts = self.lay_out(num_scheduled_tokens, trees, rows)
        given: list[tuple[torch.Tensor, npt.NDArray[Any]]] = [
            (runner.positions[:num_rows], rows.positions),
            (runner.input_batch.block_table[0].slot_mapping.gpu[:num_rows], rows.slots),
            (runner.input_ids.gpu[:num_rows], rows.token_ids),
            (runner.seq_lens, rows.seq_lens),
            (starts.gpu, rows.starts),
        ]
        if runner.prefix_lens is not None:
            given.append((runner.prefix_lens, rows.prefix_lens))
        buffers = [buffer for buffer, _ in given]
        *staged, indices = self._staging.to_device(
            *(values for _, values in given), rows.logits_indices
        )
        # One launch for all buffers of a type.
        for chosen in (slice(0, 2), slice(2, None)):
            torch._foreach_copy_(buffers[chosen], staged[chosen])
        metadata = logits_layout(indices, num_drafts)
        return indices, metadata, int(num_drafts.max()) + 1

    def fill_positions(self, trees: StepTrees) -> None:
        """Places branching trees by depth, in a step that vLLM has laid out as chains."""
        for rows in trees.branching:
            stop = rows.root_row + len(rows.tree) + 1
            positions = self._node_positions[rows.root_row : stop]
            positions.numpy()[:] = rows.positions
            self.runner.positions[rows.root_row : stop].copy_(positions, non_blocking=True)

    def logits_metadata(
        self, num_drafts: npt.NDArray[np.integer[Any]], stops: npt.NDArray[np.integer[Any]]
    ) -> SpecDecodeMetadata:
        """The layout of logits rows in a step that vLLM lays out; see :func:`logits_rows`."""
        [indices] = self._logits_staging.to_device(logits_rows(num_drafts, stops))
        return logits_layout(indices, num_drafts)


def logits_rows(
    num_drafts: npt.NDArray[np.integer[Any]], stops: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.int32]:
    """The query rows to make logits for: every request's last ones, its root's first.

    Args:
        num_drafts: ``[requests]``, drafts of each.
        stops: ``[requests]``, where each request's query rows end.

    Returns:
        int32 ``[requests + drafts]``.
    """
    num_rows = num_drafts + 1
    ends = np.cumsum(num_rows)
    rows = np.arange(ends[-1]) + np.repeat(stops - ends, num_rows)
    return rows.astype(np.int32)


def logits_layout(
    logits_indices: torch.Tensor, num_drafts: npt.NDArray[np.integer[Any]]
) -> SpecDecodeMetadata:
    """vLLM's layout of logits rows, as far as verifying trees reads it.

    The other fields are for vLLM's rejection sampler, which trees do not go through.

    Args:
        logits_indices: int32 ``[logits rows]`` on the device, their query rows.
        num_drafts: ``[requests]``, drafts of each.
    """
    unread = logits_indices
    return SpecDecodeMetadata(
        draft_token_ids=unread,
        num_draft_tokens=num_drafts.tolist(),
        cu_num_draft_tokens=unread,
        cu_num_sampled_tokens=unread,
        target_logits_indices=unread,
        bonus_logits_indices=unread,
        logits_indices=logits_indices,
    )
