"""TokenSwift on vLLM's V1 runner for CUDA (``vllm/v1/worker/gpu_model_runner.py``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_tokenswift.cuda.backend import tree_backends
from vllm_tokenswift.cuda.tree_scorer import CUDATreeScorer
from vllm_tokenswift.cuda.tree_verifier import CUDATreeAttention
from vllm_tokenswift.engine.runner import TokenSwiftRunnerMixin
from vllm_tokenswift.engine.tree_attention import TreeAttention
from vllm_tokenswift.engine.worker_mixin import TokenSwiftWorkerMixin


class TokenSwiftGPUModelRunner(TokenSwiftRunnerMixin, GPUModelRunner):
    scorer_cls = CUDATreeScorer

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with tree_backends(self.vllm_config):
            super().load_model(*args, **kwargs)

    def _make_tree_attention(self) -> TreeAttention:
        [[group]] = self.attn_groups
        context = self.compilation_config.static_forward_context
        layers = {name: context[name] for name in group.layer_names}
        return CUDATreeAttention(
            layers, group.get_metadata_builder(), self.max_num_reqs, self.num_spec_tokens
        )

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray,
        max_num_scheduled_tokens: int,
        **kwargs: Any,
    ) -> Any:
        """Steps of small trees take the full graph of the widest trees, where that costs no more.

        vLLM captures full graphs for requests that all have ``1 + num_spec_tokens`` rows. With
        fewer each, the rows that are missing are padding at the end: they write no KV, and no
        request's attention reaches them (:meth:`TreeRowBuffers.uniform_chains`).
        """
        width = self.uniform_decode_query_len
        padded = num_reqs * width
        if (
            kwargs.get("force_uniform_decode") is None
            and max_num_scheduled_tokens <= width
            and num_tokens < padded <= self.max_num_tokens
            and self.vllm_config.parallel_config.data_parallel_size == 1
            and self._pays_padding(num_tokens, padded)
        ):
            execution = super()._determine_batch_execution_and_padding(
                padded, num_reqs, num_scheduled_tokens_np, width, **kwargs
            )
            if execution[0] is CUDAGraphMode.FULL:
                return execution
        return super()._determine_batch_execution_and_padding(
            num_tokens, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, **kwargs
        )

    def _pays_padding(self, num_tokens: int, padded: int) -> bool:
        """By what passes cost without full graphs: where the host is slow, all cost the same."""
        drafting = getattr(self, "drafting", None)  # not there while graphs are captured
        if drafting is None:
            return False
        cost = drafting.planner.cost
        longest: float = cost.verify_ms(padded)
        return longest <= 1.05 * cost.verify_ms(num_tokens)

    def forward_rows(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """The pass runs through the piecewise CUDA graphs that vLLM captured for verify passes.

        These read the runner's own input buffers and run at captured sizes: the rows are put
        there, and what pads them is token 0 at position 0, whose KV goes nowhere and whose
        output is cut off.
        """
        num_rows = input_ids.shape[0]
        mode, descriptor = self.cudagraph_dispatcher.dispatch(
            num_rows, invalid_modes={CUDAGraphMode.FULL}
        )
        if mode is CUDAGraphMode.NONE:
            return super().forward_rows(input_ids, positions)
        padded = descriptor.num_tokens
        ids_buffer, positions_buffer = self.input_ids.gpu[:padded], self.positions[:padded]
        for buffer, values in ((ids_buffer, input_ids), (positions_buffer, positions)):
            if values.data_ptr() != buffer.data_ptr():
                buffer[:num_rows].copy_(values)
            buffer[num_rows:].zero_()
        context = get_forward_context()
        context.cudagraph_runtime_mode, context.batch_descriptor = mode, descriptor
        return _first_rows(super().forward_rows(ids_buffer, positions_buffer), num_rows)


def _first_rows(output: Any, num_rows: int) -> Any:
    """Hidden states of the first rows, and of the auxiliary ones beside them."""
    if isinstance(output, torch.Tensor):
        return output[:num_rows]
    hidden, auxiliary = output
    return hidden[:num_rows], [states[:num_rows] for states in auxiliary]


class TokenSwiftGPUWorker(TokenSwiftWorkerMixin, Worker):
    def _make_model_runner(self) -> GPUModelRunner:
        return TokenSwiftGPUModelRunner(self.vllm_config, self.device)
