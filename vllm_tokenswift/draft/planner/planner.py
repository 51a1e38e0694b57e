"""How much to draft, for every request of a batch at once.

The planner maximises the speed of the batch's requests: the expected tokens of each over the
milliseconds of the step that they share, in the geometric mean. With one request that is
tokens per millisecond. With several their sum would let one that repeats itself fill the step
with its drafts while the others wait: where rows cost time that is slower for them than plain
decoding. Nodes are taken over all requests in the order in which a given number of them can
bring the most; how many to take is then one walk along the measured cost curve. Taking none is
plain decoding.

Every decision follows from the requests' token histories and the shared cost model: no
clock, no randomness, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log
from typing import Literal, NamedTuple, get_args

import numpy as np

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.gumbel_noise import GumbelNoise
from vllm_tokenswift.draft.planner.back_off import may_skip_step
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.source_benefit import SourceBenefit, best_group
from vllm_tokenswift.draft.planner.step_cost import StepCost
from vllm_tokenswift.draft.planner.tree_size import (
    drop_unprofitable_branches,
    profitable_counts,
    profitable_counts_padded,
)
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.proposals.paper import paper_tree
from vllm_tokenswift.draft.tree_builder import NO_NODES, NOTHING_DRAFTED, DraftedNodes
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

PlanMode = Literal["auto", "paper", "fixed"]

# Paths less likely than this are not worth the host's time, however cheap the pass.
_MIN_PROBABILITY = 0.004
# Expected benefit below which an iteration is decoded plainly: the estimates are no better.
_LOG_MIN_IMPROVEMENT = log(1.05)
# Share of a step that a draft attempt may take of the host while the device works on the step:
# vLLM's own code needs the rest.
_ATTEMPT_SHARE = 0.25
# Share of the time that may go into sources which are only asked to see whether they pay again.
_PROBE_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the batch, as the planner sees it.

    Attributes:
        state: its text and what was learned about it.
        heads: what the draft pass or the free heads propose, None where there is nothing.
        context_len: tokens the bonus token attends to.
        limit: the most nodes it may draft.
        chain_only: its drafts must form a chain (structured output).
        noise: that will decide its coming samples, None where there is none to see.
    """

    state: DraftState
    heads: HeadProposals | None
    context_len: int
    limit: int
    chain_only: bool = False
    noise: GumbelNoise | None = None


class StepPlan(NamedTuple):
    """What is planned for the requests of a step (:meth:`Planner.plan_step`).

    Attributes:
        requests: the step's.
        num_other_tokens: query tokens of the batch besides theirs.
        begins: whether drafting was planned that only begins (:meth:`Planner.would_draft`).
        context_tokens: of the requests' prefixes, in all.
        drafted: of each request the likeliest nodes.
        counts: how many of them to verify.
        expected: tokens of each request with its tree.
        step_ms: of the batch.
        plain_ms: of the batch without drafts and what was spent.
    """

    requests: Sequence[PlannedRequest]
    num_other_tokens: int
    begins: bool
    context_tokens: int
    drafted: Sequence[DraftedNodes]
    counts: Sequence[int]
    expected: Sequence[float]
    step_ms: float
    plain_ms: float

    def tree(self, place: int) -> DraftTree:
        """The tree that is planned for a request of the step."""
        count = self.counts[place]
        return self.drafted[place].tree(count) if count else EMPTY_TREE

    def tokens_without_pass(self) -> list[float]:
        """Tokens to count on, by what iterations without a self-draft pass came to."""
        return [
            request.state.self_draft_benefit.expected_tokens(expected, with_source=False)
            for request, expected in zip(self.requests, self.expected, strict=True)
        ]


class Planner:
    """Plans the drafts of an engine's requests.

    :meth:`plan_step` plans a step without sources that cost time; asked with that plan, the
    ``wants_`` methods say for whom a source is worth its time. Where one was asked, the step is
    planned again with what it proposes. :meth:`trees` carries a plan out.

    Args:
        cost: the machine.
        budget: tokens of partial KV a self-draft pass reads (``|B|``).
        mode: "auto" plans; "paper" is the paper's fixed tree and n-grams with a self-draft pass
            every time; "fixed" drafts the likeliest nodes of all sources up to the limit every
            time.
        shapes_of: see :class:`StepCost`.

    Attributes:
        decisions: counts plans of requests by outcome ("drafted", "plain", "none": nothing
            allowed; "rested": nothing was planned), the decisions on sources that cost time
            ("self_draft", "self_draft_probe", "no_self_draft", and the same of "free_heads";
            "self_draft_again": one more pass in a row), and selections of blocks by reason
            ("select_early" by the planner, the others see
            :class:`~vllm_tokenswift.partial_kv.table.Due`).

    Raises:
        ValueError: where the mode is none of these.
    """

    def __init__(
        self,
        cost: CostModel,
        budget: int = 4096,
        mode: PlanMode = "auto",
        shapes_of: Callable[[int], Sequence[tuple[int, int]]] = lambda _: (),
    ) -> None:
        if mode not in get_args(PlanMode):
            raise ValueError(f"plan must be one of {', '.join(get_args(PlanMode))}, got {mode!r}")
        self.budget = budget
        self.mode = mode
        self._shapes_of = shapes_of
        self.cost = cost
        self.decisions: dict[str, int] = dict.fromkeys(
            (
                *("drafted", "plain", "none", "rested"),
                *("self_draft", "self_draft_probe", "no_self_draft", "self_draft_again"),
                *("free_heads", "free_heads_probe", "no_free_heads"),
                *("select_first", "select_used_up", "select_interval", "select_early"),
            ),
            0,
        )

    @property
    def cost(self) -> CostModel:
        """What passes take on the machine."""
        return self._step_cost.model

    @cost.setter
    def cost(self, cost: CostModel) -> None:
        self._step_cost = StepCost(cost, self.budget, self._shapes_of)

    def plan(
        self, requests: Sequence[PlannedRequest], num_other_tokens: int = 0
    ) -> list[DraftTree]:
        """Plans a step and carries it out: :meth:`plan_step`, then :meth:`trees`.

        Args:
            requests: of the step, with what was proposed for them.
            num_other_tokens: query tokens of the batch besides these requests' (prefill chunks).
        """
        return self.trees(self.plan_step(requests, num_other_tokens))

    def plan_step(
        self,
        requests: Sequence[PlannedRequest],
        num_other_tokens: int = 0,
        begins: bool = False,
    ) -> StepPlan:
        """How many nodes to draft for each request; with nothing in it unless the mode is "auto".

        Args:
            requests: of the step, one at least.
            num_other_tokens: query tokens of the batch besides these requests' (prefill chunks).
            begins: see :class:`StepPlan`.
        """
        if self.mode == "auto":
            return self._plan_auto(requests, num_other_tokens, begins)
        num_requests = len(requests)
        return StepPlan(
            requests,
            num_other_tokens,
            begins,
            context_tokens=0,
            drafted=[NOTHING_DRAFTED] * num_requests,
            counts=[0] * num_requests,
            expected=[1.0] * num_requests,
            step_ms=0.0,
            plain_ms=0.0,
        )

    def trees(self, plan: StepPlan) -> list[DraftTree]:
        """One tree for each request of a plan, empty where it decodes plainly."""
        if self.mode == "auto":
            trees = [plan.tree(place) for place in range(len(plan.requests))]
            for request in plan.requests:  # all wait for the drafts of each
                request.state.back_off.note_attempt(plan.plain_ms, plan.step_ms - plan.plain_ms)
        else:
            trees = [self._fixed_tree(request) for request in plan.requests]
        for request, tree in zip(plan.requests, trees, strict=True):
            request.state.self_draft_benefit.observe_drafted(len(tree))
            request.state.free_heads_benefit.observe_drafted(len(tree))
            if request.limit <= 0:
                self.decisions["none"] += 1
            else:
                self.decisions["drafted" if len(tree) else "plain"] += 1
        return trees

    def skip_step(self, states: Sequence[DraftState]) -> bool:
        """Whether this step goes by without an attempt for any of these requests.

        To be asked only where an attempt takes time from the step; what is answered is counted
        (``back_off.py``).
        """
        return self._skip(states, may_skip_step([state.back_off for state in states]))

    def skip_step_meanwhile(self, states: Sequence[DraftState], num_tokens: int) -> bool:
        """The same where the step is under way, and an attempt keeps the host from the next one.

        Where an attempt for many requests takes longer than the step itself, there is one every
        so many steps.

        Args:
            states: of the requests.
            num_tokens: query tokens of the batch.
        """
        attempt_ms = self.cost.host_drafting_ms(len(states))
        skipped = ceil(attempt_ms / (_ATTEMPT_SHARE * self.cost.verify_ms(num_tokens))) - 1
        return self._skip(states, all(state.back_off.may_skip(skipped) for state in states))

    def _skip(self, states: Sequence[DraftState], may: bool) -> bool:
        if self.mode != "auto" or not may:
            return False
        for state in states:
            state.back_off.note_skipped()
        self.decisions["rested"] += len(states)
        return True

    def _fixed_tree(self, request: PlannedRequest) -> DraftTree:
        if request.limit <= 0:
            return EMPTY_TREE
        state, heads = request.state, request.heads
        drafted = state.draft(heads, request.limit, chain_only=request.chain_only)
        if self.mode == "paper" and heads is not None and not heads.free:
            return paper_tree(state.ngrams, state.cells, heads, request.limit, request.chain_only)
        return drafted.tree(drafted.count) if drafted.count else EMPTY_TREE

    def _plan_auto(
        self, requests: Sequence[PlannedRequest], num_other_tokens: int, begins: bool
    ) -> StepPlan:
        context_tokens = sum([request.context_len for request in requests])
        step_cost = self._step_cost
        cost = step_cost.model
        limits = [max(request.limit, 0) for request in requests]
        num_plain = len(requests) + num_other_tokens
        host_ms = step_cost.host_ms(len(requests), begins)
        curve_ms, cheapest_ms = step_cost.curve(
            num_plain, sum(limits), host_ms, context_tokens, len(requests)
        )
        spent_ms = self._spent_ms(requests)
        fixed_ms = cost.context_ms(context_tokens) + spent_ms
        undrafted_ms = float(curve_ms[0]) + fixed_ms
        # In a step of at most twice that time no node pays which is less likely.
        least_chance = len(requests) * float(cheapest_ms[0]) / (2 * undrafted_ms)
        least_chance = max(_MIN_PROBABILITY, least_chance)
        drafted = [
            r.state.draft(r.heads, limit, least_chance, r.chain_only, r.noise)
            for r, limit in zip(requests, limits, strict=True)
        ]

        each = [nodes.probabilities[: nodes.count] for nodes in drafted]
        chances = each[0] if len(each) == 1 else np.concatenate(each)
        num_drafted = np.array([len(chances) for chances in each])
        widths, padded_ms, token_ms = step_cost.padded_steps(num_plain)
        if len(widths) > 1:
            ms = padded_ms + context_tokens * token_ms + fixed_ms
            ms[1:] += host_ms
            per_request, expected, step_ms = profitable_counts_padded(
                chances, num_drafted, widths, ms
            )
        else:
            per_request, expected, step_ms = profitable_counts(
                chances, num_drafted, curve_ms, cheapest_ms, fixed_ms
            )
        counts, tokens = per_request.tolist(), expected.tolist()
        if cost.chains_cost and any(counts):
            node_ms = (step_ms - undrafted_ms) / sum(counts)
            step_ms += self._drop_branches(requests, drafted, counts, tokens, step_ms, node_ms)
        faster = sum(map(log, tokens)) / len(requests) - log(step_ms / undrafted_ms)
        if faster < _LOG_MIN_IMPROVEMENT:
            counts, tokens = [0] * len(requests), [1.0] * len(requests)
            step_ms = undrafted_ms
        return StepPlan(
            requests,
            num_other_tokens,
            begins,
            context_tokens,
            drafted,
            counts,
            tokens,
            step_ms,
            plain_ms=undrafted_ms - spent_ms,
        )

    def _drop_branches(
        self,
        requests: Sequence[PlannedRequest],
        drafted: Sequence[DraftedNodes],
        counts: Sequence[int],
        tokens: list[float],
        step_ms: float,
        node_ms: float,
    ) -> float:
        """Drops branches that bring less than their own chain, and their tokens; what that adds
        to the step's ms.

        counts, tokens: nodes and expected tokens of each request. node_ms: of one node.
        """
        ms_worth = len(requests) / step_ms
        added_ms = 0.0
        for place, request in enumerate(requests):
            if counts[place]:
                lost, saved_ms = drop_unprofitable_branches(
                    drafted[place].nodes,
                    drafted[place].probabilities,
                    counts[place],
                    ms_worth * tokens[place],
                    node_ms,
                    self.cost.chain_cost_ms(request.context_len),
                )
                tokens[place] -= lost
                added_ms += saved_ms
        return added_ms

    def _spent_ms(self, requests: Sequence[PlannedRequest]) -> float:
        """What this step's draft pass and heads have cost already."""
        head_passes = [r.heads.num_passes for r in requests if r.heads is not None]
        if not head_passes:
            return 0.0
        heads_ms = self.cost.heads_pass_ms(len(head_passes)) * max(head_passes)
        passes = [
            r.heads.own_depths if r.heads is not None and not r.heads.free else 0 for r in requests
        ]
        return heads_ms + self.passes_ms(requests, passes)

    def nodes_ms(self, plan: StepPlan, more: float, besides: int = 0) -> float:
        """What further nodes add to a planned step.

        Args:
            plan: of the step.
            more: nodes, on average.
            besides: nodes that it has besides those of its plan.
        """
        num_requests = len(plan.requests)
        num_rows = num_requests + sum(plan.counts) + besides
        now_ms, then_ms = (
            self.cost.context_ms(plan.context_tokens, rows / num_requests)
            for rows in (num_rows, num_rows + more)
        )
        return self.cost.rows_ms(num_rows + plan.num_other_tokens, more) + then_ms - now_ms

    def passes_ms(self, requests: Sequence[PlannedRequest], passes: Sequence[int]) -> float:
        """Draft passes of a step.

        Args:
            requests: of the step.
            passes: ``[requests]``, how many in a row each has.
        """
        return self._step_cost.passes_ms([r.context_len for r in requests], passes)

    def wants_self_draft(self, plan: StepPlan, may: bool = True) -> list[bool]:
        """For which requests a draft pass is worth its time now.

        Never where the context fits into the budget (the pass would cost what plain
        decoding costs), nor where nothing may be drafted.

        Args:
            plan: of the step without passes.
            may: False asks for the answer alone: no pass will be run.
        """
        requests = plan.requests
        possible = bool(self.cost.draft_points)
        eligible = [possible and r.limit > 0 and r.context_len > self.budget for r in requests]
        if self.mode != "auto":
            return [r.limit > 0 for r in requests] if self.mode == "paper" else eligible
        return self._worth_it(
            plan,
            eligible,
            [request.state.self_draft_benefit for request in requests],
            lambda num: self.cost.draft_pass_ms(self.budget * num, num),
            "self_draft",
            may,
        )

    def wants_free_heads(self, plan: StepPlan, may: bool = True) -> list[bool]:
        """For which requests heads on the verify pass's hidden state are worth their time now.

        No pass of the model, but one of its LM head: not free on a small model.

        Args:
            plan: of the step without heads.
            may: see :meth:`wants_self_draft`.
        """
        requests = plan.requests
        eligible = [r.limit > 0 for r in requests]
        if self.mode != "auto":
            return eligible
        return self._worth_it(
            plan,
            eligible,
            [request.state.free_heads_benefit for request in requests],
            lambda num: self.cost.heads_pass_ms(num) * max(r.state.head_passes for r in requests),
            "free_heads",
            may,
        )

    def would_draft(
        self,
        requests: Sequence[PlannedRequest],
        num_other_tokens: int,
        self_draft: bool,
        free_heads: bool,
    ) -> bool:
        """Whether any request would be drafted for, where the step is decoded plainly anyhow.

        Args:
            requests: of the step.
            num_other_tokens: query tokens of the batch besides these requests'.
            self_draft, free_heads: whether there are such sources. They learn what the iteration
                emits without them, and when they would ask again.
        """
        if self.mode != "auto":
            return any(request.limit > 0 for request in requests)
        plan = self.plan_step(requests, num_other_tokens, begins=True)
        asks = [any(plan.counts)]
        if self_draft:
            asks += self.wants_self_draft(plan, may=False)
        if free_heads:
            asks += self.wants_free_heads(plan, may=False)
        for request in requests:
            request.state.back_off.note_free_attempt()
        self.decisions["plain"] += len(requests)
        return any(asks)

    def _worth_it(
        self,
        plan: StepPlan,
        eligible: Sequence[bool],
        benefits: Sequence[SourceBenefit],
        source_ms: Callable[[int], float],
        name: str,
        may: bool,
    ) -> list[bool]:
        """For which eligible requests a source that costs time pays, by what it brought so far.

        plan: of the step without the source. source_ms: what the source costs for that many
        requests together. may: see :meth:`wants_self_draft`.
        """
        num_requests, num_eligible = len(plan.requests), sum(eligible)
        if not num_eligible:
            return [False] * num_requests
        expected, step_ms = plan.expected, plan.step_ms
        without = [
            benefit.expected_tokens(planned, with_source=False)
            for benefit, planned in zip(benefits, expected, strict=True)
        ]
        extra = [
            benefit.expected_tokens(planned, with_source=True) - tokens if possible else 0.0
            for benefit, planned, tokens, possible in zip(
                benefits, expected, without, eligible, strict=True
            )
        ]
        nodes = [b.mean_nodes for b, possible in zip(benefits, eligible, strict=True) if possible]
        mean_nodes = sum(nodes) / num_eligible
        host_ms = 0.0 if any(plan.counts) else self._step_cost.host_ms(num_requests, plan.begins)
        extra_ms = [
            host_ms + source_ms(count) + self.nodes_ms(plan, mean_nodes * count)
            for count in range(1, num_eligible + 1)
        ]
        best = best_group(extra, eligible, without, step_ms, extra_ms)
        relative_cost = extra_ms[-1] / step_ms
        # While one of them asks once more the others wait: they ask together, or none does.
        due = [
            possible and benefit.wants_probe(relative_cost / _PROBE_SHARE)
            for benefit, possible in zip(benefits, eligible, strict=True)
        ]
        probes = not best and 2 * sum(due) >= num_eligible
        wanted = [possible and (probes or i in best) for i, possible in enumerate(eligible)]
        # What each of them has to bring so that the others' loss is made up for.
        to_pay = relative_cost * num_requests / num_eligible
        for place, benefit in enumerate(benefits):
            if not eligible[place]:
                continue
            asked = wanted[place] and may
            decision = f"{name}_probe" if probes else name
            self.decisions[decision if asked else f"no_{name}"] += 1
            nodes_without = plan.drafted[place].nodes[: plan.counts[place]] if asked else NO_NODES
            benefit.note_decision(expected[place], asked, to_pay * without[place], nodes_without)
        return wanted
