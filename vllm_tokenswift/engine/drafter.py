"""From what a step accepted to the next step's draft trees: passes, heads, planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from vllm_tokenswift.common.staging import Staging
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlanMode, PlannedRequest, Planner, StepPlan
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.warm_up import warm_up
from vllm_tokenswift.engine.draft_pass import DraftPass
from vllm_tokenswift.engine.draft_request import DraftRequest, Drafts
from vllm_tokenswift.engine.head_drafter import HeadDrafter
from vllm_tokenswift.engine.profiling.cache import cost_key, measured_once
from vllm_tokenswift.engine.profiling.pass_times import PassTimes
from vllm_tokenswift.engine.request_state import RequestState
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.engine.self_drafter import SelfDrafter


class Drafter:
    """Drafts for the requests of a batch; owns the planner.

    Args:
        runner: whose requests they are.
        draft_pass: the runner's, which serves every drafter that it makes.
        host_ms: measures, for the cost model, milliseconds that the device waits for drafts of the
            text: of one request, and for each further one.
    """

    def __init__(
        self,
        runner: RunnerView,
        draft_pass: DraftPass,
        host_ms: Callable[[Drafter], tuple[float, float]],
    ) -> None:
        self.runner = runner
        self.draft_pass = draft_pass
        self.options = runner.options
        self.heads = runner.heads
        self.head_drafter = HeadDrafter(runner)
        # Heads on the verify pass's own states.
        self._asks_free_heads = self.heads is not None and self.options.head_source != "draft"
        self._staging = Staging(runner.device)
        curve = PassTimes(
            runner.tree_attention,
            runner.trial_pass,
            lambda output: runner.model.compute_logits(self._post_norm(output)),
            self.head_drafter.dummy_run if self.heads is not None else None,
            runner.host_bound_pass,
            runner.device,
        )
        # There once costs are known: while they are measured, drafts are of the text.
        self.self_drafter: SelfDrafter | None = None

        def completed(cost: CostModel) -> CostModel:
            self.planner = Planner(cost, self.options.budget_tokens, shapes_of=runner.padded_shapes)
            first_ms, further_ms = host_ms(self)
            cost = replace(cost, drafting_ms=first_ms, drafting_request_ms=further_ms)
            if runner.device.type == "cpu":  # rows do not share the time to read the weights
                return replace(cost, heads_request_ms=cost.heads_ms)
            # The device's work is shared; the host reads what they say, and plans once more.
            return replace(cost, heads_request_ms=further_ms)

        mode = cast(PlanMode, self.options.plan)
        warm_up(mode)
        shapes = runner.verify_shapes()
        contexts = curve.contexts(shapes, runner.kv_cache_config.num_blocks, runner.max_model_len)
        key = cost_key(runner.vllm_config, curve, self.heads, shapes, contexts)
        cost = measured_once(
            key,
            lambda: completed(curve.measure(shapes, contexts)),
            lambda: curve.plain_ms(shapes, contexts.short),
        )
        self.planner = Planner(cost, self.options.budget_tokens, mode, runner.padded_shapes)
        with_heads = self.heads is not None and self.options.head_source != "free"
        self.self_drafter = SelfDrafter(
            runner,
            draft_pass,
            self.head_drafter,
            self.planner,
            self._post_norm,
            self._read_by_heads if with_heads else None,
        )

    def launch_heads(self, requests: Sequence[DraftRequest], hidden_states: torch.Tensor) -> None:
        """To be called for the requests of a step before :meth:`draft`, with the same states.

        Heads begin where they can do so by themselves and were asked last time, for all requests
        where most of them asked.

        Args:
            requests: the step's; the same objects are given to :meth:`draft`.
            hidden_states: ``[query rows, hidden]``, in the form that the heads read.
        """
        if self.heads is None or not self.head_drafter.runs_ahead:
            return
        possible = [
            i
            for i, request in enumerate(requests)
            if not request.state.draft.self_draft_benefit.asked_last
            and self.head_drafter.may_begin(request.req_id)
        ]
        likely = [i for i in possible if requests[i].state.draft.free_heads_benefit.asked_last]
        # Another request costs the device next to nothing, and who asks changes from step to step.
        chosen = possible if 2 * len(likely) >= len(possible) else likely
        if likely:
            rows = self._rows_of([requests[i] for i in chosen], hidden_states)
            self.head_drafter.launch_free([requests[i] for i in chosen], rows)

    def skips_attempt(
        self, states: Sequence[RequestState], num_requests: int, is_launched: bool
    ) -> bool:
        """Whether nothing is to be drafted for these requests in a step, by back-off.

        Args:
            states: of the requests that might be drafted for.
            num_requests: requests of the batch.
            is_launched: the step's pass runs already, without drafts.
        """
        drafts = [state.draft for state in states]
        if self.options.self_draft == "always":
            return False
        if is_launched:
            return self.planner.skip_step_meanwhile(drafts, num_requests)
        return not self.runner.prelaunches and self.planner.skip_step(drafts)

    def would_draft(self, requests: Sequence[DraftRequest], num_undrafted: int) -> bool:
        """Whether any of these would be drafted for now; their next pass runs, without drafts.

        What is learned without drafting is learned, and nothing is spent.

        Args:
            requests: those that might be drafted for.
            num_undrafted: requests of the batch that draft nothing.
        """
        planned = [self._planned(request) for request in requests]
        return bool(planned) and self.planner.would_draft(
            planned,
            num_undrafted,
            self_draft=self.options.self_draft != "off",
            free_heads=self._asks_free_heads,
        )

    def draft(
        self,
        requests: Sequence[DraftRequest],
        hidden_states: torch.Tensor,
        num_undrafted: int,
    ) -> list[Drafts]:
        """What is drafted for each request.

        Args:
            requests: those to draft for.
            hidden_states: ``[query rows, hidden]``, in the form that the heads read.
            num_undrafted: requests of the batch that draft nothing.
        """
        if not requests:
            return []
        planned = [self._planned(request) for request in requests]
        plan = self.planner.plan_step(planned, num_undrafted)
        passes = self._wants_pass(plan)
        if any(passes) and not all(passes):
            # CUDA graphs share their memory: a draft pass may run over the verify pass's states.
            hidden_states = hidden_states.clone()
        with_pass = [place for place, wants in enumerate(passes) if wants]
        if with_pass and self.self_drafter is not None:
            chosen = [requests[place] for place in with_pass]
            _add_heads(planned, with_pass, self.self_drafter.propose(chosen, plan, passes))
        with_heads = self._wants_free_heads(plan, passes)
        if with_heads:
            chosen = [requests[place] for place in with_heads]
            rows = self._rows_of(chosen, hidden_states)
            _add_heads(planned, with_heads, self.head_drafter.candidates(chosen, None, rows))
        if with_pass or with_heads:
            plan = self.planner.plan_step(planned, num_undrafted)
        trees = self.planner.trees(plan)
        return [Drafts(tree, request.heads) for tree, request in zip(trees, planned, strict=True)]

    def _planned(self, request: DraftRequest) -> PlannedRequest:
        return PlannedRequest(
            state=request.state.draft,
            heads=None,
            context_len=request.num_tokens,
            limit=request.max_nodes,
            chain_only=request.state.chain_only,
            noise=request.noise,
        )

    def _wants_pass(self, plan: StepPlan) -> list[bool]:
        wanted = [False] * len(plan.requests)
        if self.options.self_draft == "always":
            wanted = [request.limit > 0 for request in plan.requests]
        elif self.options.self_draft == "auto":
            wanted = self.planner.wants_self_draft(plan)
        return wanted if self.self_drafter is not None else [False] * len(wanted)

    def _wants_free_heads(self, plan: StepPlan, passes: Sequence[bool]) -> list[int]:
        """Places of the requests that free heads are asked for, of those without a pass."""
        others = [place for place, has_pass in enumerate(passes) if not has_pass]
        if not self._asks_free_heads or not others:
            return []
        if len(others) < len(passes):
            requests = [plan.requests[place] for place in others]
            plan = self.planner.plan_step(requests, plan.num_other_tokens)
        wanted = self.planner.wants_free_heads(plan)
        return [place for place, wants in zip(others, wanted, strict=True) if wants]

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
        assert self.heads is not None
        if self.heads.reads == "post_norm":
            return self._post_norm(output)
        hidden: torch.Tensor = output[1][0]
        return hidden


def _add_heads(
    planned: list[PlannedRequest], places: Sequence[int], proposals: Sequence[HeadProposals]
) -> None:
    """Gives what a source proposes to the requests that it was asked for."""
    for place, heads in zip(places, proposals, strict=True):
        planned[place] = replace(planned[place], heads=heads)
