"""From what a step accepted to the next step's draft trees: passes, heads, planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from vllm_tokenswift.draft.candidates import HeadCandidates
from vllm_tokenswift.draft.foresight import Foresight, NoiseOf
from vllm_tokenswift.draft.planner import DraftRequest as PlannedRequest
from vllm_tokenswift.draft.planner import PlanMode, Planner
from vllm_tokenswift.engine.cost_cache import cached_cost
from vllm_tokenswift.engine.cost_curve import CostCurve
from vllm_tokenswift.engine.draft_pass import DraftRow
from vllm_tokenswift.engine.requests import RequestState
from vllm_tokenswift.engine.staging import Staging
from vllm_tokenswift.tree import DraftTree

if TYPE_CHECKING:
    from vllm_tokenswift.engine.runner import TokenSwiftRunnerMixin

# Likeliest tokens of a head that are offered to the planner, which takes a few.
_OFFERED_TOKENS = 8


@dataclass(frozen=True)
class DraftRequest:
    """One request to draft for.

    num_tokens: tokens of the sequence, the bonus token included; blocks: int32,
    physical blocks in logical order; hidden_row: the logits row that the bonus token
    was sampled from; max_nodes: drafts that still fit the model's length and are wanted.
    """

    req_id: str
    state: RequestState
    bonus_token: int
    num_tokens: int
    blocks: np.ndarray
    hidden_row: int
    max_nodes: int


class Drafter:
    """Drafts for the requests of a batch; owns the planner and the draft pass."""

    def __init__(self, runner: TokenSwiftRunnerMixin) -> None:
        self.runner = runner
        self.options = runner.options
        self.heads = runner.drafter.heads
        self._staging = Staging(runner.device)
        self.draft_pass = runner.make_draft_pass()
        curve = CostCurve(
            runner.tree_attention,
            runner.trial_pass,
            lambda output: runner.model.compute_logits(self._post_norm(output)),
            self._heads_alone if self.heads is not None else None,
            runner.host_bound_pass,
            runner.device,
        )
        cost = cached_cost(runner, curve)
        self.planner = Planner(cost, self.options.budget_tokens, cast(PlanMode, self.options.plan))

    def draft(
        self,
        requests: Sequence[DraftRequest],
        sample_hidden_states: torch.Tensor,
        num_undrafted: int,
    ) -> list[DraftTree]:
        """One tree for each request, empty where plain decoding is better.

        sample_hidden_states: ``[logits rows, hidden]``, in the form that the heads read.
        num_undrafted: requests of the batch that draft nothing.
        """
        if not requests:
            return []
        planned = [self._planned(request) for request in requests]
        passes = self._wants_pass(planned, num_undrafted)
        self._draft_with(planned, requests, passes, self._self_draft)
        if self.heads is not None and self.options.head_source != "draft":
            others = [i for i, wanted in enumerate(passes) if not wanted]
            free = self.planner.wants_free_heads([planned[i] for i in others], num_undrafted)
            wanted = [False] * len(requests)
            for i, want in zip(others, free, strict=True):
                wanted[i] = want
            self._draft_with(
                planned, requests, wanted, lambda some: self._free_heads(some, sample_hidden_states)
            )
        return self.planner.plan(planned, num_undrafted)

    def _draft_with(
        self,
        planned: list[PlannedRequest],
        requests: Sequence[DraftRequest],
        wanted: Sequence[bool],
        source: Callable[[list[DraftRequest]], list[HeadCandidates]],
    ) -> None:
        """Adds what a source says to the requests that want it."""
        chosen = [i for i, want in enumerate(wanted) if want]
        if not chosen:
            return
        for i, candidates in zip(chosen, source([requests[i] for i in chosen]), strict=True):
            planned[i] = replace(planned[i], heads=candidates)

    def _planned(self, request: DraftRequest) -> PlannedRequest:
        return PlannedRequest(
            state=request.state.draft,
            heads=None,
            context_len=request.num_tokens,
            limit=request.max_nodes,
            chain_only=request.state.chain_only,
            foresight=self._foresight(request.req_id),
        )

    def _foresight(self, req_id: str) -> Foresight | None:
        scorer = self.runner.scorer
        if self.options.plan != "auto" or scorer.noise_at(req_id, 0) is None:
            return None

        def noise_at(depth: int) -> NoiseOf:
            noise = scorer.noise_at(req_id, depth)
            assert noise is not None
            return noise

        return Foresight(noise_at)

    def _wants_pass(self, planned: list[PlannedRequest], num_undrafted: int) -> list[bool]:
        if self.options.self_draft == "off":
            return [False] * len(planned)
        if self.options.self_draft == "always":
            return [request.limit > 0 for request in planned]
        return self.planner.wants_self_draft(planned, num_undrafted)

    def _self_draft(self, requests: list[DraftRequest]) -> list[HeadCandidates]:
        """Depth 1 from the pass itself (``l0``), deeper ones from the heads on its hidden state."""
        output = self.draft_pass.run(
            [
                DraftRow(r.req_id, r.bonus_token, r.num_tokens, r.blocks, r.state.table)
                for r in requests
            ]
        )
        self.runner.stats.num_draft_passes += 1
        assert self.draft_pass.last is not None
        self.runner.stats.num_selections += len(self.draft_pass.last.refreshed)
        states = [self._post_norm(output)]
        if self.heads is not None and self.options.head_source != "free":
            states += self.heads(self._read_by_heads(output))
        return self._candidates(requests, states, free=False)

    def _free_heads(
        self, requests: list[DraftRequest], sample_hidden_states: torch.Tensor
    ) -> list[HeadCandidates]:
        """Heads on the verify pass's own hidden state: depth 1 is head 0, and no extra pass."""
        [rows] = self._staging.to_device(np.array([r.hidden_row for r in requests], np.int64))
        return self._candidates(requests, self.heads(sample_hidden_states[rows]), free=True)

    def _heads_alone(self) -> torch.Tensor:
        """What free heads cost, apart from the requests' constraints."""
        hidden_size = self.runner.model_config.get_hidden_size()
        dtype, device = self.runner.model_config.dtype, self.runner.device
        states = self.heads(torch.ones(1, hidden_size, dtype=dtype, device=device))
        logits: torch.Tensor = self.runner.model.compute_logits(torch.cat(states))
        return logits.float().softmax(dim=-1)

    def _candidates(
        self, requests: list[DraftRequest], states: list[torch.Tensor], free: bool
    ) -> list[HeadCandidates]:
        """Top tokens of every depth, under the requests' own sampling constraints.

        states: per depth ``[len(requests), hidden]``, what the LM head reads.
        """
        widths = list(self.options.head_tree[1:] if free else self.options.head_tree)
        states = states[: len(widths)]
        if self.options.plan == "auto":
            # The noise picks among many what deserves a node.
            widths = [max(width, _OFFERED_TOKENS) for width in widths]
        logits = self.runner.model.compute_logits(torch.cat(states))
        req_ids = [request.req_id for request in requests] * len(states)
        probabilities = self.runner.scorer.constrain(logits, req_ids)
        top = probabilities.topk(max(widths), dim=-1)
        # [depths, requests, width]
        shape = (len(states), len(requests), -1)
        tokens = top.indices.view(shape).tolist()
        values = top.values.view(shape).tolist()
        return [
            HeadCandidates(
                [tokens[d][i][: widths[d]] for d in range(len(states))],
                [values[d][i][: widths[d]] for d in range(len(states))],
                free=free,
            )
            for i in range(len(requests))
        ]

    def _post_norm(self, output: Any) -> torch.Tensor:
        """Hidden states after the final norm, of what a pass of the model returned."""
        hidden: torch.Tensor = output[0] if self.runner.use_aux_hidden_state_outputs else output
        return hidden

    def _read_by_heads(self, output: Any) -> torch.Tensor:
        """Hidden states in the form that the heads read."""
        if self.heads.reads == "post_norm":
            return self._post_norm(output)
        hidden: torch.Tensor = output[1][0]
        return hidden
