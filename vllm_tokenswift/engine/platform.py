"""What differs by platform, as it is where nothing runs ahead of the host and no graph is captured.

A platform's runner overrides what it does in its own way (``cuda/runner.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from vllm_tokenswift.engine.draft_pass import DraftPass
from vllm_tokenswift.engine.head_beam import HeadBeam
from vllm_tokenswift.engine.profiling.pass_times import (
    MakePass,
    Pass,
    Shape,
    attention_pass,
    single_request_shapes,
)
from vllm_tokenswift.engine.runner_view import PassLauncher
from vllm_tokenswift.engine.tree_attention import TreeAttention
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary
from vllm_tokenswift.sampling.tree_sampler import TreeSampler
from vllm_tokenswift.tree import DraftTree

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Runner
else:
    _Runner = object


class Platform(_Runner):
    """The part of a runner that a platform may bring along.

    Attributes:
        tree_sampler_cls: what samples at the nodes of trees.
        tree_attention: made by :meth:`_make_tree_attention`, which every platform supplies.
        prefix_lens: int32 ``[most requests]`` on the device, tokens before each request's rows;
            where attention reads it.
        prelaunches: whether passes, once launched, run by themselves, and are launched ahead of
            their step.
        top_k_is_cheap: whether reading the verify top-k of rows without drafts costs next to
            nothing in a batch.
        host_bound_pass: makes passes outside of full CUDA graphs, where others run in them.
    """

    tree_sampler_cls: type[TreeSampler] = TreeSampler
    tree_attention: TreeAttention
    prefix_lens: torch.Tensor | None = None
    prelaunches: bool = False
    top_k_is_cheap: bool = True
    host_bound_pass: MakePass | None = None

    def _make_tree_attention(self) -> TreeAttention:
        raise NotImplementedError

    def forward_rows(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """A pass of the target over some rows; call it inside a forward context.

        Args:
            input_ids: int32 ``[rows]``.
            positions: int64 ``[rows]``.

        Returns:
            What the model returns: hidden states ``[rows, hidden]``, and auxiliary ones.
        """
        return self._model_forward(input_ids=input_ids, positions=positions)

    # -- what drafts ----------------------------------------------------------------

    def make_draft_pass(self) -> DraftPass:
        """Called once: the runner has one draft pass, whatever drafters it makes."""
        return DraftPass(self)

    def make_head_beam(
        self, heads: DraftHeads, part: DraftVocabulary, lm_rows: torch.Tensor, least_chance: float
    ) -> HeadBeam | None:
        """All sequential heads at once, where the platform has a way to run them so.

        Args:
            heads: of the sequential form.
            part: the vocabulary that they propose.
            lm_rows: ``[part, hidden]``, the LM head's rows of it.
            least_chance: of a path that heads go on with.
        """
        return None

    def most_drafts(self, num_reqs: int) -> int:
        """The most nodes of a tree in a batch of so many requests."""
        most: int = self.num_spec_tokens
        return most

    def padded_shapes(self, num_reqs: int) -> list[tuple[int, int]]:
        """What steps of so many requests with trees are padded to.

        Returns:
            Rows of each request and of all, ascending; empty where nothing is padded.
        """
        return []

    # -- what is timed for the cost model -------------------------------------------

    def verify_shapes(self) -> list[Shape]:
        """The verify passes that are timed, ascending, the first a plain decode."""
        return single_request_shapes(self.num_spec_tokens)

    def trial_pass(self, query_lens: Sequence[int], context: int, tree: DraftTree | None) -> Pass:
        """A verify pass as a step runs it.

        Args:
            query_lens: query rows of each request.
            context: tokens of each before these rows.
            tree: what the one request's rows are; None for chains.
        """
        return attention_pass(
            self.vllm_config,
            self.tree_attention,
            self.forward_rows,
            query_lens,
            context,
            tree,
            self.device,
        )

    # -- passes launched ahead of their step ------------------------------------------

    def make_verify_graphs(self) -> None:
        """Makes what :meth:`verify_graph` hands out, once, before any pass is prelaunched."""

    def verify_graph(self, shape: BatchDescriptor) -> PassLauncher | None:
        """What launches a pass of that shape with less work for the host, where there is one."""
        return None

    def launches_at_once(self, mode: CUDAGraphMode) -> bool:
        """Whether a pass that runs so is launched in less time than vLLM takes for a step."""
        return True
