"""The inputs of a step of decodes, laid out on the host and copied to the device at once.

vLLM's own ``_prepare_inputs`` (``vllm/v1/worker/gpu_model_runner.py``) makes some twenty
small copies and launches, for features (M-RoPE, LoRA, hybrid models, asynchronous
scheduling) that TokenSwift refuses; on a GPU they take longer than a small model's pass.
Here the same numbers take one copy. Steps with prefill chunks, whose passes are long, stay
with vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_tokenswift.engine.staging import Staging
from vllm_tokenswift.engine.verify_plan import VerifyPlan

if TYPE_CHECKING:
    from vllm_tokenswift.engine.runner import TokenSwiftRunnerMixin


class StepInputs:
    """Fills the runner's persistent buffers for steps of decoding requests."""

    def __init__(self, runner: TokenSwiftRunnerMixin) -> None:
        self.runner = runner
        self._staging = Staging(runner.device)
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

    def fill(
        self, num_scheduled_tokens: npt.NDArray[np.int32], plan: VerifyPlan
    ) -> tuple[torch.Tensor, SpecDecodeMetadata, int]:
        """What ``_prepare_inputs`` returns: logits rows, their layout, the most of a request.

        num_scheduled_tokens: int32 ``[requests]``, query rows of each.
        """
        runner = self.runner
        batch = runner.input_batch
        num_reqs = batch.num_reqs
        self._commit_tables(num_reqs)

        stops = np.cumsum(num_scheduled_tokens)
        num_rows = int(stops[-1])
        request = np.repeat(np.arange(num_reqs), num_scheduled_tokens)  # [rows]
        computed = batch.num_computed_tokens_cpu[:num_reqs]
        places = computed[request] + (
            np.arange(num_rows) - np.repeat(stops - num_scheduled_tokens, num_scheduled_tokens)
        )
        token_ids = batch.token_ids_cpu[request, places]
        table, block_size = batch.block_table[0], runner.tree_attention.block_size
        slots = table.get_numpy_array()[request, places // block_size].astype(np.int64)
        slots = slots * block_size + places % block_size
        positions = places.astype(np.int64)  # KV lies by place, RoPE turns by depth
        for rows in plan.branching:
            positions[rows.root_row : rows.root_row + len(rows.tree) + 1] = rows.positions

        seq_lens = computed + num_scheduled_tokens
        num_tokens = [runner.requests[req_id].num_tokens for req_id in batch.req_ids]
        runner.discard_request_mask.np[:num_reqs] = seq_lens < np.asarray(num_tokens)
        lengths = runner.optimistic_seq_lens_cpu.numpy()
        lengths[:num_reqs] = seq_lens
        lengths[num_reqs:] = 0
        starts = runner.query_start_loc.np
        starts[0] = 0
        starts[1 : num_reqs + 1] = stops
        starts[num_reqs + 1 :] = num_rows  # never falling, as attention kernels require

        num_drafts = np.zeros(num_reqs, np.int64)
        for tree in plan.trees:
            num_drafts[tree.batch_row] = len(tree.tree)

        *given, logits_indices = self._staging.to_device(
            positions, slots, token_ids, lengths, starts, logits_rows(num_drafts, stops)
        )
        buffers: tuple[Any, ...] = (
            runner.positions[:num_rows],
            table.slot_mapping.gpu[:num_rows],
            runner.input_ids.gpu[:num_rows],
            runner.seq_lens,
            runner.query_start_loc.gpu,
        )
        # One launch for all buffers of a type.
        for chosen in ((0, 1), (2, 3, 4)):
            torch._foreach_copy_([buffers[i] for i in chosen], [given[i] for i in chosen])
        metadata = logits_layout(logits_indices, num_drafts)
        return logits_indices, metadata, int(num_drafts.max()) + 1


def logits_rows(
    num_drafts: npt.NDArray[np.integer[Any]], stops: npt.NDArray[np.integer[Any]]
) -> npt.NDArray[np.int32]:
    """The query rows to make logits for: every request's last ones, its root's first.

    num_drafts: ``[requests]``; stops: ``[requests]``, where each request's query rows end.
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
