"""Draft passes as full CUDA graphs.

A draft pass reads another block table in each layer, so vLLM's graphs of one row a request do
not serve it. These read tables, lengths and slots from buffers of their own, whose
addresses never change. A pass that ranks blocks, or reads more than the budget, goes the
ordinary way; there is one only now and then.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from vllm.compilation.monitor import set_cudagraph_capturing_enabled
from vllm.config import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_tokenswift.cuda.attention.tree_attention import CUDATreeAttention
from vllm_tokenswift.engine.draft_pass import DraftPass, PassInputs
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.engine.tree_attention import LayerMetadata

_COUNTS = (1, 2, 4, 8, 16)  # requests of a captured pass
# vLLM keeps a model's full graphs by shape alone: captured for a second draft pass they would be
# the first one's, which read the first one's buffers.
_captured_models: WeakSet[Any] = WeakSet()


class GraphedDraftPass(DraftPass):
    """:class:`DraftPass` that replays a captured pass where there is one; a model has only one.

    Args:
        runner: whose target it runs; its tree attention is CUDA's.
        budget_blocks: the most blocks that a pass over the partial cache reads.
    """

    def __init__(self, runner: RunnerView, budget_blocks: int) -> None:
        super().__init__(runner)
        self.runner = runner
        self._is_captured = False
        assert isinstance(runner.tree_attention, CUDATreeAttention)
        self.trees = runner.tree_attention
        self.counts = [count for count in _COUNTS if count <= runner.max_num_reqs]
        num_layers, most = len(self.attention.layer_names), self.counts[-1]
        device = runner.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tables = zeros(num_layers, most, budget_blocks)
        self.seq_lens = zeros(most)
        self.slots = zeros(most, dtype=torch.int64)
        self.starts = torch.arange(most + 1, dtype=torch.int32, device=device)
        self.starts_cpu = torch.arange(most + 1, dtype=torch.int32)

    def capture(self) -> None:
        """Captures a pass for every number of requests; once, at start-up.

        Raises:
            RuntimeError: where the model's draft passes are captured already.
        """
        if self.runner.model in _captured_models:
            raise RuntimeError(
                "the draft passes of this model are captured already: graphs would be replayed "
                "that read the buffers of another GraphedDraftPass"
            )
        self.seq_lens.fill_(1)
        self.slots.fill_(-1)
        set_cudagraph_capturing_enabled(True)
        with freeze_gc_for_cudagraph_capture(), graph_capture(self.runner.device):
            for count in reversed(self.counts):
                for mode in (CUDAGraphMode.NONE, CUDAGraphMode.FULL):
                    self._run(count, mode)
                torch.cuda.synchronize()
        set_cudagraph_capturing_enabled(False)
        _captured_models.add(self.runner.model)
        self._is_captured = True

    def forward(self, inputs: PassInputs) -> tuple[Any, LayerMetadata]:
        """See :meth:`DraftPass.forward`; replays where the pass fits a captured one.

        Raises:
            RuntimeError: where it fits and nothing was captured.
        """
        _, n, width = inputs.tables.shape
        if inputs.ranking or n > self.counts[-1] or width > self.tables.shape[2]:
            return super().forward(inputs)
        if not self._is_captured:
            raise RuntimeError("a draft pass was asked for before GraphedDraftPass.capture()")
        count = next(count for count in self.counts if count >= n)
        given = self._staging.to_device(
            inputs.tables, inputs.seq_lens, inputs.slots, inputs.token_ids, inputs.positions
        )
        buffers = (
            self.tables[:, :n, :width],
            self.seq_lens[:n],
            self.slots[:n],
            self.input_ids[:n],
            self.positions[:n],
        )
        for buffer, values in zip(buffers, given, strict=True):
            buffer.copy_(values)
        if n < count:  # rows that read nothing and write nothing
            self.seq_lens[n:count].zero_()
            self.slots[n:count].fill_(-1)
        output, metadata = self._run(count, CUDAGraphMode.FULL)
        return first_rows(output, n), metadata

    def _run(self, count: int, mode: CUDAGraphMode) -> tuple[Any, LayerMetadata]:
        tables, slots = self.tables[:, :count], self.slots[:count]
        common = CommonAttentionMetadata(
            query_start_loc=self.starts[: count + 1],
            query_start_loc_cpu=self.starts_cpu[: count + 1],
            seq_lens=self.seq_lens[:count],
            num_reqs=count,
            num_actual_tokens=count,
            max_query_len=1,
            max_seq_len=tables.shape[2] * self.attention.block_size,
            block_table_tensor=tables[0],
            slot_mapping=slots,
        )
        metadata = self.trees.by_layer(common, tables)
        with set_forward_context(
            metadata,
            self.vllm_config,
            num_tokens=count,
            # vLLM's own full graphs are all of uniform batches: this key is nobody else's.
            cudagraph_runtime_mode=mode,
            batch_descriptor=BatchDescriptor(count, count, uniform=False),
            slot_mapping=dict.fromkeys(self.attention.layer_names, slots),
        ):
            output = self.runner._model_forward(
                input_ids=self.input_ids[:count], positions=self.positions[:count]
            )
        return output, metadata


def first_rows(output: Any, num_rows: int) -> Any:
    """The first rows of what a pass returned.

    Args:
        output: hidden states ``[rows, hidden]``, or these and a list of auxiliary ones.
        num_rows: how many rows are wanted.
    """
    if isinstance(output, torch.Tensor):
        return output[:num_rows]
    hidden, auxiliary = output
    return hidden[:num_rows], [states[:num_rows] for states in auxiliary]
