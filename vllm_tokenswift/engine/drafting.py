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
from vllm_tokenswift.engine.head_drafts import HeadDrafts, HeadRequest
from vllm_tokenswift.engine.requests import RequestState
from vllm_tokenswift.engine.self_draft import SelfDraft
from vllm_tokenswift.engine.staging import Staging
from vllm_tokenswift.tree import DraftTree

if TYPE_CHECKING:
    from vllm_tokenswift.engine.runner import TokenSwiftRunnerMixin


@dataclass(frozen=True)
class DraftRequest:
    """One request to draft for.

    num_tokens: tokens of the sequence, the bonus token included; blocks: int32,
    physical blocks in logical order; hidden_row: the query row that the bonus token was
    sampled from; max_nodes: drafts that still fit the model's length and are wanted.
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
        self.head_drafts = HeadDrafts(runner)
        self._staging = Staging(runner.device)
        self.draft_pass = runner.make_draft_pass()
        curve = CostCurve(
            runner.tree_attention,
            runner.trial_pass,
            lambda output: runner.model.compute_logits(self._post_norm(output)),
            self.head_drafts.alone if self.heads is not None else None,
            runner.host_bound_pass,
            runner.device,
        )
        cost = cached_cost(runner, curve)
        self.planner = Planner(cost, self.options.budget_tokens, cast(PlanMode, self.options.plan))
        with_heads = self.heads is not None and self.options.head_source != "free"
        self.self_draft = SelfDraft(
            self, self._post_norm, self._read_by_heads if with_heads else None
        )

    def draft(
        self,
        requests: Sequence[DraftRequest],
        hidden_states: torch.Tensor,
        num_undrafted: int,
    ) -> list[DraftTree]:
        """One tree for each request, empty where plain decoding is better.

        hidden_states: ``[query rows, hidden]``, in the form that the heads read.
        num_undrafted: requests of the batch that draft nothing.
        """
        if not requests:
            return []
        planned = [self._planned(request) for request in requests]
        passes = self._wants_pass(planned, num_undrafted)
        if any(passes) and not all(passes):
            # CUDA graphs share their memory: a draft pass may run over the verify pass's states.
            hidden_states = hidden_states.clone()
        asked = [
            HeadRequest(request.req_id, request.bonus_token, plan.foresight)
            for request, plan in zip(requests, planned, strict=True)
        ]
        self._draft_with(
            planned,
            requests,
            asked,
            passes,
            lambda some, of: self.self_draft.candidates(some, of, planned, passes, num_undrafted),
        )
        if self.heads is not None and self.options.head_source != "draft":
            others = [i for i, wanted in enumerate(passes) if not wanted]
            likely = [i for i in others if planned[i].state.free_heads.asked_last]
            if likely and self.head_drafts.runs_ahead:
                rows = self._rows_of([requests[i] for i in likely], hidden_states)
                self.head_drafts.launch_free([asked[i] for i in likely], rows)
            free = self.planner.wants_free_heads([planned[i] for i in others], num_undrafted)
            wanted = [False] * len(requests)
            for i, want in zip(others, free, strict=True):
                wanted[i] = want
            self._draft_with(
                planned,
                requests,
                asked,
                wanted,
                lambda some, of: self.head_drafts.candidates(
                    of, None, self._rows_of(some, hidden_states)
                ),
            )
        return self.planner.plan(planned, num_undrafted)

    def _draft_with(
        self,
        planned: list[PlannedRequest],
        requests: Sequence[DraftRequest],
        asked: Sequence[HeadRequest],
        wanted: Sequence[bool],
        source: Callable[[list[DraftRequest], list[HeadRequest]], list[HeadCandidates]],
    ) -> None:
        """Adds what a source says to the requests that want it."""
        chosen = [i for i, want in enumerate(wanted) if want]
        if not chosen:
            return
        found = source([requests[i] for i in chosen], [asked[i] for i in chosen])
        for i, candidates in zip(chosen, found, strict=True):
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

    def _rows_of(
        self, requests: Sequence[DraftRequest], hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """The verify pass's states that free heads start from: ``[requests, hidden]``."""
        if len(requests) == 1:
            row = requests[0].hidden_row
            return hidden_states[row : row + 1]
        [rows] = self._staging.to_device(np.array([r.hidden_row for r in requests], np.int64))
        return hidden_states.index_select(0, rows)

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
