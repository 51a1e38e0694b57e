"""A verify pass of decodes, launched with vLLM's own calls and in their order.

From ``GPUModelRunner.execute_model`` (``vllm/v1/worker/gpu_model_runner.py``), alike in 0.32 and
0.33 here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context

from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.engine.step import LaunchedPass
from vllm_tokenswift.engine.step_inputs import StepInputs
from vllm_tokenswift.engine.step_trees import StepTrees


@dataclass(frozen=True)
class OrdinaryLauncher:
    """See :class:`~vllm_tokenswift.engine.runner_view.PassLauncher`: for steps of any shape.

    Attributes:
        runner: whose batch it is.
        step_inputs: which lays the step out.
        mode: the mode of the step's CUDA graph.
        shape: what the step is padded to.
    """

    runner: RunnerView
    step_inputs: StepInputs
    mode: CUDAGraphMode
    shape: BatchDescriptor

    def launch(
        self, num_rows: npt.NDArray[np.int32], trees: StepTrees, newest: torch.Tensor | None
    ) -> LaunchedPass:
        runner = self.runner
        num_reqs, total, most_rows = len(num_rows), int(num_rows.sum()), int(num_rows.max())
        inputs = self.step_inputs.fill(num_rows, trees)
        if newest is not None:
            runner.input_ids.gpu[:num_reqs].copy_(newest)
        is_full = self.mode is CUDAGraphMode.FULL
        padded, padded_reqs = self.shape.num_tokens, self.shape.num_reqs or num_reqs
        slots_by_group, slots = runner._get_slot_mappings(
            num_tokens_padded=padded, num_reqs_padded=padded_reqs, num_tokens_unpadded=total
        )
        req_ids = runner.input_batch.req_ids
        metadata, dead_nodes = runner.metadata_with_trees(
            trees,
            num_tokens=total,
            num_tokens_padded=padded if is_full else None,
            num_reqs=num_reqs,
            num_reqs_padded=padded_reqs if is_full else None,
            max_query_len=most_rows,
            logits_indices=inputs[0],
            max_num_sampled_tokens=inputs[2],
            use_spec_decode=True,
            num_scheduled_tokens=dict(zip(req_ids, num_rows.tolist(), strict=True)),
            slot_mappings=slots_by_group,
        )
        with set_forward_context(
            metadata[0],
            runner.vllm_config,
            num_tokens=padded,
            cudagraph_runtime_mode=self.mode,
            batch_descriptor=self.shape,
            slot_mapping=slots,
            is_padding=runner._prepare_padding_mask(total, padded),
        ):
            output = runner._model_forward(
                input_ids=runner.input_ids.gpu[:padded], positions=runner.positions[:padded]
            )
        return LaunchedPass(trees, inputs, metadata, output, dead_nodes)
