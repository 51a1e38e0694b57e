"""Verify passes of decoding requests as graphs, which a step takes the host few calls to launch.

A full CUDA graph reads buffers whose addresses never change: in every step of a captured shape
metadata, views and launches are the same, and only what the buffers hold is not. That is laid
out on the host by compiled code. One graph, replayed before the pass's own, copies it over,
spreads it among the buffers and makes FlashAttention's schedule anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.utils.torch_utils import current_stream
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_tokenswift.common.staged_arrays import ArrayShape, StagedArrays
from vllm_tokenswift.cuda.attention.ancestor_rows import pack_rows
from vllm_tokenswift.cuda.attention.backend import TreeMetadataBuilder
from vllm_tokenswift.cuda.graphs.capture import captured
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.engine.step import LaunchedPass
from vllm_tokenswift.engine.step_inputs import RowArrays, StepInputs, logits_layout
from vllm_tokenswift.engine.step_trees import StepTrees


class VerifyGraph:
    """The pass of one captured shape, a :class:`~vllm_tokenswift.engine.runner_view.PassLauncher`.

    Args:
        runner: whose buffers the shape's graph reads.
        step_inputs: which lays a step out.
        builder: of the attention layers' metadata.
        shape: ``shape.num_reqs`` requests at most, of equally many rows at most.
    """

    def __init__(
        self,
        runner: RunnerView,
        step_inputs: StepInputs,
        builder: TreeMetadataBuilder,
        shape: BatchDescriptor,
    ) -> None:
        assert shape.num_reqs is not None
        self.runner, self.shape = runner, shape
        self._step_inputs, self._builder = step_inputs, builder
        count, num_rows = shape.num_reqs, shape.num_tokens
        blocks = runner.input_batch.block_table[0]
        self._slots = blocks.slot_mapping.gpu[:num_rows]
        self._input_ids = runner.input_ids.gpu[:num_rows]
        self._positions = runner.positions[:num_rows]
        self._is_padding = runner._prepare_padding_mask(num_rows, num_rows)
        self._staged = StagedArrays(runner.device, self._shapes(num_rows, runner.max_num_reqs))
        host = self._staged.host
        self._padding, self._ancestors = host["is_padding"], host["ancestors"]
        by_row = {name: host[name] for name in ("positions", "slots", "token_ids")}
        by_request = {name: host[name] for name in ("starts", "seq_lens", "prefix_lens")}
        every = np.empty(num_rows, np.int32)  # all rows of a decode have logits
        self._rows = RowArrays(**by_row, **by_request, logits_indices=every)
        self._every_row = torch.arange(num_rows, dtype=torch.int32, device=runner.device)

        self._common = CommonAttentionMetadata(
            query_start_loc=runner.query_start_loc.gpu[: count + 1],
            query_start_loc_cpu=runner.query_start_loc.cpu[: count + 1],
            seq_lens=runner.seq_lens[:count],
            num_reqs=count,
            num_actual_tokens=num_rows,
            max_query_len=num_rows // count,
            # A bound that holds in every step: the schedule does not look at it.
            max_seq_len=runner.max_model_len,
            block_table_tensor=blocks.get_device_tensor(count),
            slot_mapping=self._slots,
        )
        self._built = self._builder.build(0, self._common)
        self._metadata = dict.fromkeys(runner.tree_attention.layer_names, self._built)
        self._slots_of = dict.fromkeys(runner.tree_attention.layer_names, self._slots)
        self._copied = torch.cuda.Event() if runner.device.type == "cuda" else None
        self.run_spread = self.spread

    @staticmethod
    def _shapes(num_rows: int, max_num_reqs: int) -> dict[str, ArrayShape]:
        return {
            "positions": ArrayShape((num_rows,), np.int64),
            "slots": ArrayShape((num_rows,), np.int64),
            "ancestors": ArrayShape((num_rows, 2), np.int64),
            "token_ids": ArrayShape((num_rows,), np.int32),
            "starts": ArrayShape((max_num_reqs + 1,), np.int32),
            "seq_lens": ArrayShape((max_num_reqs,), np.int32),
            "prefix_lens": ArrayShape((max_num_reqs,), np.int32),
            "is_padding": ArrayShape((num_rows,), np.bool_),
        }

    def launch(
        self,
        num_rows: npt.NDArray[np.int32],
        trees: StepTrees,
        newest: torch.Tensor | None,
    ) -> LaunchedPass:
        """See :meth:`~vllm_tokenswift.engine.runner_view.PassLauncher.launch`."""
        if self._copied is not None:
            self._copied.synchronize()  # the last step may still read the host's arrays
        num_drafts = self._step_inputs.lay_out(num_rows, trees, self._rows)
        total = int(num_rows.sum())
        self._rows.slots[total:] = -1  # padding writes no KV
        self._padding[:total], self._padding[total:] = False, True
        starts = self._rows.starts[: len(num_rows) + 1]
        pack_rows(starts, num_drafts.astype(np.int32), trees.parents, self._ancestors)
        self.run_spread()
        if self._copied is not None:
            self._copied.record(current_stream())
        if newest is not None:
            self._input_ids[: len(newest)].copy_(newest)
        every = self._every_row[:total]
        inputs = every, logits_layout(every, num_drafts), int(num_rows.max())
        return LaunchedPass(trees, inputs, (self._metadata, self._common), self._forward())

    def _forward(self) -> Any:
        with set_forward_context(
            self._metadata,
            self.runner.vllm_config,
            num_tokens=self.shape.num_tokens,
            cudagraph_runtime_mode=CUDAGraphMode.FULL,
            batch_descriptor=self.shape,
            slot_mapping=self._slots_of,
            is_padding=self._is_padding,
        ):
            return self.runner._model_forward(input_ids=self._input_ids, positions=self._positions)

    def spread(self) -> None:
        """The staged arrays to their buffers, and the schedule; launches alone."""
        runner, staged = self.runner, self._staged.device
        self._staged.to_device()
        trees = self._builder.tree_rows
        buffers = {
            "positions": self._positions,
            "slots": self._slots,
            "ancestors": trees.ancestors[: self.shape.num_tokens],
            "token_ids": self._input_ids,
            "starts": runner.query_start_loc.gpu,
            "seq_lens": runner.seq_lens,
            "prefix_lens": trees.prefix_lens,
            "is_padding": self._is_padding,
        }
        # One launch for all buffers of a type.
        for dtype in (torch.int64, torch.int32, torch.bool):
            names = [name for name, tensor in staged.items() if tensor.dtype == dtype]
            torch._foreach_copy_([buffers[name] for name in names], [staged[n] for n in names])
        self._builder.reschedule(self._common, self._built)


def make_verify_graphs(
    runner: RunnerView,
    step_inputs: StepInputs,
    builder: TreeMetadataBuilder,
    shapes: Sequence[BatchDescriptor],
) -> dict[BatchDescriptor, VerifyGraph]:
    """Once, at start-up, when the runner's own graphs of these shapes have been captured.

    Args:
        runner: see :class:`VerifyGraph`.
        step_inputs: the runner's.
        builder: of its attention layers' metadata.
        shapes: those of its full graphs, the smallest first.
    """
    graphs = {shape: VerifyGraph(runner, step_inputs, builder, shape) for shape in shapes}
    spreads = captured([graph.spread for graph in graphs.values()], runner.device)
    for graph, run_spread in zip(graphs.values(), spreads, strict=True):
        graph.run_spread = run_spread
    return graphs
