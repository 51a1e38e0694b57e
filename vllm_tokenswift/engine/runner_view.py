"""What those that work for the runner may read and call on it, and nothing else.

The runner makes its collaborators and hands them itself as a :class:`RunnerView`. So they do not
import the runner, and mypy keeps them to what is named here. Of vLLM's runner it is
:class:`VLLMRunnerView`, whose members the drift test looks for in vLLM's source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode, ModelConfig, VllmConfig
from vllm.forward_context import BatchDescriptor

from vllm_tokenswift.draft.gumbel_noise import GumbelNoise
from vllm_tokenswift.engine.head_beam import HeadBeam
from vllm_tokenswift.engine.profiling.pass_times import MakePass, Pass, Shape
from vllm_tokenswift.engine.recorder import Recorder
from vllm_tokenswift.engine.request_state import RequestState
from vllm_tokenswift.engine.step import LaunchedPass
from vllm_tokenswift.engine.step_trees import StepTrees
from vllm_tokenswift.engine.tree_attention import TreeAttention
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.metrics import Stats
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary
from vllm_tokenswift.sampling.tree_sampler import TreeSampler
from vllm_tokenswift.tree import DraftTree

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.utils import CpuGpuBuffer
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch


class VLLMRunnerView(Protocol):
    """Members of vLLM's own runner, ``vllm/v1/worker/gpu_model_runner.py``."""

    vllm_config: VllmConfig
    model_config: ModelConfig
    device: torch.device

    kv_cache_config: KVCacheConfig
    """Read for the number of its blocks."""
    max_num_reqs: int
    """Most requests of a batch."""
    max_num_tokens: int
    """Most query rows of a step."""
    max_model_len: int
    """Most tokens of a sequence."""
    num_spec_tokens: int
    """Most drafts of a request in a step: nodes of its tree, the root not counted."""

    model: Any
    """The target, as vLLM runs it: ``embed_input_ids``, ``compute_logits``."""
    use_aux_hidden_state_outputs: bool
    """Whether a pass returns auxiliary hidden states beside the last ones."""

    requests: dict[str, CachedRequestState]
    """By request id: tokens, parameters, blocks."""
    input_batch: InputBatch
    """The persistent batch, by batch row."""

    # Buffers of a step; tensors on the device keep their addresses.
    input_ids: CpuGpuBuffer
    """int32 ``[most query rows]``."""
    positions: torch.Tensor
    """int64 ``[most query rows]``, of RoPE."""
    seq_lens: torch.Tensor
    """int32 ``[most requests]``, tokens with the step's own."""
    optimistic_seq_lens_cpu: torch.Tensor
    """The same on the host."""
    query_start_loc: CpuGpuBuffer
    """int32 ``[most requests + 1]``, first query row of each request."""
    discard_request_mask: CpuGpuBuffer
    """bool ``[most requests]``: a prompt is not computed to its end, no sample counts."""

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """One pass of the target, inside a forward context."""

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: npt.NDArray[np.int32],
        max_num_scheduled_tokens: int,
        **kwargs: Any,
    ) -> Any:
        """How a step runs: the mode of its CUDA graph and its shape first."""

    def _get_slot_mappings(self, *args: Any, **kwargs: Any) -> Any:
        """KV slots of a step's query rows: by group, and by layer."""

    def _prepare_padding_mask(self, num_tokens: int, num_tokens_padded: int) -> Any:
        """Which query rows are padding, where the model asks for it."""


class PassLauncher(Protocol):
    """What the launch of a pass takes, made ready once for all steps of one shape."""

    def launch(
        self, num_rows: npt.NDArray[np.int32], trees: StepTrees, newest: torch.Tensor | None
    ) -> LaunchedPass:
        """Launches the pass of the runner's batch.

        Args:
            num_rows: int32 ``[requests]``, query rows of each: its drafts' and one.
            trees: the trees of these rows.
            newest: int64 ``[requests]`` on the device, the requests' newest tokens where the host
                does not know them.
        """


class RunnerView(VLLMRunnerView, Protocol):
    """TokenSwift's runner: vLLM's members, and what ours adds for its collaborators."""

    options: TokenSwiftOptions
    stats: Stats
    recorder: Recorder | None
    """Where the option ``record`` asks for it."""
    tree_sampler: TreeSampler
    tree_attention: TreeAttention
    """There from :meth:`~vllm_tokenswift.engine.runner.TokenSwiftRunnerMixin.start_drafting` on."""
    request_states: Mapping[str, RequestState]
    prelaunches: bool
    """Whether passes, once launched, run by themselves, and are launched ahead of their step."""
    prefix_lens: torch.Tensor | None
    """int32 ``[most requests]`` on the device, tokens before each request's rows; where attention
    reads it."""
    host_bound_pass: MakePass | None
    """Makes passes outside of full CUDA graphs, where others run in them."""

    top_k_is_cheap: bool
    """Whether reading the verify top-k of rows without drafts costs next to nothing in a batch."""

    @property
    def heads(self) -> DraftHeads | None:
        """The draft heads that the proposer owns."""

    def block_table(self) -> npt.NDArray[np.int32]:
        """int32 ``[batch rows, blocks]``: physical blocks of the one KV cache group."""

    def visible_noise(self, req_id: str) -> GumbelNoise | None:
        """What drafts may see of the noise of a request's coming samples."""

    def metadata_with_trees(
        self, trees: StepTrees, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, frozenset[int]]]:
        """What ``_build_attention_metadata`` returns for a step of these trees, and by request
        the nodes that attention had no room for."""

    # What differs by platform.

    def forward_rows(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """A pass of the target over some rows; call it inside a forward context."""

    def make_head_beam(
        self, heads: DraftHeads, part: DraftVocabulary, lm_rows: torch.Tensor, least_chance: float
    ) -> HeadBeam | None:
        """All sequential heads at once, where the platform has a way to run them so."""

    def most_drafts(self, num_reqs: int) -> int:
        """The most nodes of a tree in a batch of so many requests."""

    def padded_shapes(self, num_reqs: int) -> list[tuple[int, int]]:
        """What steps of so many requests with trees are padded to: rows of each and of all."""

    def verify_shapes(self) -> list[Shape]:
        """The verify passes whose costs are measured."""

    def trial_pass(self, query_lens: Sequence[int], context: int, tree: DraftTree | None) -> Pass:
        """A verify pass as a step runs it, of requests that have ``context`` tokens each."""

    def launches_at_once(self, mode: CUDAGraphMode) -> bool:
        """Whether a pass that runs so is launched in less time than vLLM takes for a step."""

    def verify_graph(self, shape: BatchDescriptor) -> PassLauncher | None:
        """What launches a pass of that shape with less work for the host, where there is one."""
