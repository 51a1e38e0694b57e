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
from typing import Literal, get_args

import numpy as np

from vllm_tokenswift.draft.acceptance import Floats
from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.gumbel_noise import GumbelNoise
from vllm_tokenswift.draft.planner.back_off import rests
from vllm_tokenswift.draft.planner.best_group import best_group
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.source_benefit import NO_NODES, SourceBenefit
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.tree_builder import Ints, drop_dear_branches, pay_off, pay_off_padded
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

PlanMode = Literal["auto", "paper", "fixed"]

# Paths less likely than this are not worth the host's time, however cheap the pass.
_MIN_PROBABILITY = 0.004
# Expected gain below which an iteration is decoded plainly: the estimates are no better.
_LOG_MIN_IMPROVEMENT = log(1.05)
# How often the host's time for drafting counts against beginning with it, where steps are launched
# before their samples are read: in the step that drafts, in the one that finds nothing more, and
# as often again because what is seen may be over when drafting begins. In a replay of 24,000
# tokens at an 8B model's costs 1, 2 and 4 times came to .98, .985 and .997 of plain decoding's
# speed where the text hardly repeats itself, and to 1.92, 1.92 and 1.91 where it does.
_TIMES_TO_BEGIN = 4.0
# Share of a step that a look may take of the host while the device works on the step: vLLM's own
# code needs the rest.
_LOOK_SHARE = 0.25
# Share of the time that may go into self-draft passes which only ask whether they pay again.
_PROBE_SHARE = 0.01
# Curves kept of steps; a batch of changing size, or whose texts grow, needs a few hundred.
_MAX_CURVES = 1024
# Tokens of a request's prefix for which steps have one curve. Ten rows of as many more took a CPU
# half a millisecond of thirty.
_CURVE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of the batch, as the planner sees it.

    heads: what the draft pass or the free heads offer, None where there is nothing.
    context_len: tokens the bonus token attends to. limit: the most nodes it may draft.
    chain_only: its drafts must form a chain (structured output).
    noise: the noise of its coming samples, None where there is none to see.
    """

    state: DraftState
    heads: HeadProposals | None
    context_len: int
    limit: int
    chain_only: bool = False
    noise: GumbelNoise | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What was planned for these requests without a source that costs time.

    begins: whether drafting was planned that only begins (:meth:`Planner.would_draft`).
    context_tokens: of the requests' prefixes, in all. counts: nodes to draft, of those that the
    requests' states have taken. expected: tokens of each request with its tree; step_ms: of the
    batch, plain_ms: without drafts and what was spent.
    """

    requests: tuple[PlannedRequest, ...]
    num_other_tokens: int
    begins: bool
    context_tokens: int
    counts: list[int]
    expected: list[float]
    step_ms: float
    plain_ms: float

    def tokens_without_pass(self) -> list[float]:
        """Tokens to count on, by what iterations without a self-draft pass came to."""
        return [
            request.state.self_draft.tokens(expected, with_pass=False)
            for request, expected in zip(self.requests, self.expected, strict=True)
        ]


class Planner:
    """Plans the drafts of an engine's requests.

    cost: the machine. budget: tokens of partial KV a self-draft pass reads (``|B|``).
    shapes_of: for a batch of so many requests, the shapes that its steps with trees are padded
        to: rows of each request and of the batch, ascending; none where steps are not padded.
    mode: "auto" plans; "paper" is the paper's fixed tree and n-grams with a self-draft pass
    every time; "fixed" drafts the likeliest nodes of all sources up to the limit every time.

    ``decisions`` counts plans of requests by outcome ("drafted", "plain", "none": nothing
    allowed; "rested": nothing was planned), the decisions on sources that cost time
    ("self_draft", "self_draft_probe", "no_self_draft", and the same of "free_heads";
    "self_draft_again": one more pass in a row), and selections of blocks by reason
    ("select_early" by the planner, the others see
    :class:`~vllm_tokenswift.partial_kv.table.Due`).
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
        self.cost = cost
        self.budget = budget
        self.mode = mode
        self._shapes_of = shapes_of
        self._padded: dict[int, tuple[Ints, Floats, Floats]] = {}
        self._curves: dict[tuple[float, ...], tuple[Floats, Floats]] = {}
        self._planned: StepPlan | None = None
        self.decisions: dict[str, int] = dict.fromkeys(
            (
                *("drafted", "plain", "none", "rested"),
                *("self_draft", "self_draft_probe", "no_self_draft", "self_draft_again"),
                *("free_heads", "free_heads_probe", "no_free_heads"),
                *("select_first", "select_used_up", "select_interval", "select_early"),
            ),
            0,
        )

    def plan(
        self, requests: Sequence[PlannedRequest], num_other_tokens: int = 0
    ) -> list[DraftTree]:
        """One tree for each request, empty where it decodes plainly.

        num_other_tokens: query tokens of the batch besides these requests' (prefill chunks).
        Where one of the ``wants_`` methods was just asked about these same request objects,
        what it planned is used.
        """
        if self.mode == "auto":
            plan = self.plan_once(requests, num_other_tokens)
            trees = [r.state.tree(count) for r, count in zip(requests, plan.counts, strict=True)]
            self._planned = None
            for request in requests:  # all wait for the drafts of each
                request.state.rest.looked(plan.plain_ms, plan.step_ms - plan.plain_ms)
        else:
            trees = [self._plan_fixed(request) for request in requests]
        for request, tree in zip(requests, trees, strict=True):
            request.state.self_draft.drafted(len(tree))
            request.state.free_heads.drafted(len(tree))
            if request.limit <= 0:
                self.decisions["none"] += 1
            else:
                self.decisions["drafted" if len(tree) else "plain"] += 1
        return trees

    def rest(self, states: Sequence[DraftState]) -> bool:
        """Whether this step goes by without a look at any of these requests (``back_off.py``).

        To be asked only where a look takes time from the step; what is answered is counted.
        """
        return self._goes_by(states, rests([state.rest for state in states]))

    def rests_meanwhile(self, states: Sequence[DraftState], num_tokens: int) -> bool:
        """The same where the step is under way, and a look keeps the host from the next one.

        Where many requests are looked at that takes longer than the step itself: there is a look
        every so many steps. num_tokens: of the batch.
        """
        look_ms = self.cost.host_drafting_ms(len(states))
        skipped = ceil(look_ms / (_LOOK_SHARE * self.cost.verify_ms(num_tokens))) - 1
        return self._goes_by(states, all(state.rest.may_skip(skipped) for state in states))

    def _goes_by(self, states: Sequence[DraftState], may: bool) -> bool:
        if self.mode != "auto" or not may:
            return False
        for state in states:
            state.rest.skipped()
        self.decisions["rested"] += len(states)
        return True

    def _plan_fixed(self, request: PlannedRequest) -> DraftTree:
        if request.limit <= 0:
            return EMPTY_TREE
        state, heads = request.state, request.heads
        count = state.draft(heads, request.limit, chain_only=request.chain_only)
        if self.mode == "paper" and heads is not None and not heads.free:
            return state.paper_tree(heads, request.limit, request.chain_only)
        return state.tree(count)

    def _plan_auto(
        self,
        requests: Sequence[PlannedRequest],
        num_other_tokens: int,
        begins: bool,
        context_tokens: int,
    ) -> tuple[list[int], list[float], float, float]:
        """What a :class:`StepPlan` holds, from ``counts`` on."""
        limits = [max(request.limit, 0) for request in requests]
        num_plain = len(requests) + num_other_tokens
        host_ms = self._host_ms(len(requests), begins)
        curve_ms, cheapest_ms = self._curve(
            num_plain, sum(limits), host_ms, context_tokens, len(requests)
        )
        spent_ms = self._spent_ms(requests)
        fixed_ms = self.cost.context_ms(context_tokens) + spent_ms
        undrafted_ms = float(curve_ms[0]) + fixed_ms
        # In a step of at most twice that time no node pays which is less likely.
        least_chance = len(requests) * float(cheapest_ms[0]) / (2 * undrafted_ms)
        least_chance = max(_MIN_PROBABILITY, least_chance)
        offered = [
            r.state.draft(r.heads, limit, least_chance, r.chain_only, r.noise)
            for r, limit in zip(requests, limits, strict=True)
        ]

        each = [r.state.probabilities[:n] for r, n in zip(requests, offered, strict=True)]
        chances = each[0] if len(each) == 1 else np.concatenate(each)
        numbers = np.array(offered)
        widths, padded_ms, token_ms = self._padded_steps(num_plain)
        if len(widths) > 1:
            ms = padded_ms + context_tokens * token_ms + fixed_ms
            ms[1:] += host_ms
            per_request, expected, step_ms = pay_off_padded(chances, numbers, widths, ms)
        else:
            per_request, expected, step_ms = pay_off(
                chances, numbers, curve_ms, cheapest_ms, fixed_ms
            )
        counts, tokens = per_request.tolist(), expected.tolist()
        if self.cost.chains_cost and any(counts):
            node_ms = (step_ms - undrafted_ms) / sum(counts)
            step_ms += self._without_dear_branches(requests, counts, tokens, step_ms, node_ms)
        plain_ms = undrafted_ms - spent_ms
        faster = sum(map(log, tokens)) / len(requests) - log(step_ms / undrafted_ms)
        if faster < _LOG_MIN_IMPROVEMENT:
            return [0] * len(requests), [1.0] * len(requests), undrafted_ms, plain_ms
        return counts, tokens, step_ms, plain_ms

    def _without_dear_branches(
        self,
        requests: Sequence[PlannedRequest],
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
        for index, request in enumerate(requests):
            if counts[index]:
                state, chain_ms = request.state, self.cost.chain_cost_ms(request.context_len)
                lost, saved_ms = drop_dear_branches(
                    *(state.taken, state.probabilities, counts[index]),
                    *(ms_worth * tokens[index], node_ms, chain_ms),
                )
                tokens[index] -= lost
                added_ms += saved_ms
        return added_ms

    def _padded_steps(self, num_requests: int) -> tuple[Ints, Floats, Floats]:
        """Rows of each request, 1 at first, what a step of that many takes, and what each token
        of prefix adds to it besides what it adds to one row. One request's are in the curve."""
        found = self._padded.get(num_requests)
        if found is None:
            shapes = [(1, num_requests)]
            if num_requests > 1:
                shapes += self._shapes_of(num_requests)
            widths, rows = zip(*shapes, strict=True)
            ms = np.array([self.cost.verify_ms(number) for number in rows])
            token_ms = np.array([self.cost.context_ms(1, width) for width in widths])
            found = np.array(widths, np.int32), ms, token_ms - token_ms[0]
            self._padded[num_requests] = found
        return found

    def _host_ms(self, num_requests: int, begins: bool) -> float:
        """The host's time that counts against drafts; begins: see :class:`StepPlan`."""
        return (_TIMES_TO_BEGIN if begins else 1.0) * self.cost.host_drafting_ms(num_requests)

    def _curve(
        self,
        num_plain: int,
        most_nodes: int,
        drafting_ms: float,
        context_tokens: int,
        num_requests: int,
    ) -> tuple[Floats, Floats]:
        """By number of nodes: the step's ms but for what prefixes cost a plain decode, and the
        least that any further node adds."""
        tokens = _CURVE_TOKENS * num_requests
        context_tokens = (context_tokens + tokens // 2) // tokens * tokens
        key = (num_plain, most_nodes, drafting_ms, context_tokens, num_requests)
        if key not in self._curves:
            if len(self._curves) >= _MAX_CURVES:
                self._curves.clear()
            curve = self.cost.step_curve_ms(
                num_plain, most_nodes, drafting_ms, context_tokens, num_requests
            )
            curve -= self.cost.context_ms(context_tokens)
            steps = np.diff(curve, append=np.inf)
            cheapest = np.minimum.accumulate(steps[::-1])[::-1]
            self._curves[key] = (curve, cheapest.copy())
        return self._curves[key]

    def _spent_ms(self, requests: Sequence[PlannedRequest]) -> float:
        """What this step's draft pass and heads have cost already."""
        if all(r.heads is None for r in requests):
            return 0.0
        passes = [
            r.heads.own_depths if r.heads is not None and not r.heads.free else 0 for r in requests
        ]
        head_passes = [r.heads.num_passes for r in requests if r.heads is not None]
        heads_ms = (
            self.cost.heads_pass_ms(len(head_passes)) * max(head_passes) if head_passes else 0.0
        )
        return heads_ms + self.passes_ms(requests, passes)

    def nodes_ms(self, plan: StepPlan, more: float, besides: int = 0) -> float:
        """What nodes (on average) add to a step that has those of its plan, and some besides."""
        num_requests = len(plan.requests)
        num_rows = num_requests + sum(plan.counts) + besides
        now_ms, then_ms = (
            self.cost.context_ms(plan.context_tokens, rows / num_requests)
            for rows in (num_rows, num_rows + more)
        )
        return self.cost.rows_ms(num_rows + plan.num_other_tokens, more) + then_ms - now_ms

    def passes_ms(self, requests: Sequence[PlannedRequest], passes: Sequence[int]) -> float:
        """Draft passes of a step; passes: in a row, of each request."""
        total_ms = 0.0
        for depth in range(max(passes, default=0)):
            together = [r for r, count in zip(requests, passes, strict=True) if count > depth]
            kv_tokens = sum(min(self.budget, request.context_len) for request in together)
            total_ms += self.cost.draft_pass_ms(kv_tokens, len(together))
        return total_ms

    def wants_self_draft(
        self, requests: Sequence[PlannedRequest], num_other_tokens: int = 0, may: bool = True
    ) -> list[bool]:
        """For which requests a draft pass is worth its time now.

        Never where the context fits into the budget (the pass would cost what plain
        decoding costs), nor where nothing may be drafted. may: False asks for the answer
        alone: no pass will be run.
        """
        possible = bool(self.cost.draft_points)
        eligible = [possible and r.limit > 0 and r.context_len > self.budget for r in requests]
        if self.mode != "auto":
            return [r.limit > 0 for r in requests] if self.mode == "paper" else eligible
        return self._worth_it(
            requests,
            num_other_tokens,
            eligible,
            [request.state.self_draft for request in requests],
            lambda num: self.cost.draft_pass_ms(self.budget * num, num),
            "self_draft",
            may,
        )

    def wants_free_heads(
        self, requests: Sequence[PlannedRequest], num_other_tokens: int = 0, may: bool = True
    ) -> list[bool]:
        """For which requests heads on the verify pass's hidden state are worth their time now.

        No pass of the model, but one of its LM head: not free on a small model. may: see
        :meth:`wants_self_draft`.
        """
        eligible = [r.limit > 0 for r in requests]
        if self.mode != "auto":
            return eligible
        return self._worth_it(
            requests,
            num_other_tokens,
            eligible,
            [request.state.free_heads for request in requests],
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

        self_draft, free_heads: whether there are such sources. They learn what the iteration
        emits without them, and when they would ask again.
        """
        if self.mode != "auto":
            return any(request.limit > 0 for request in requests)
        asks = [any(self.plan_once(requests, num_other_tokens, begins=True).counts)]
        if self_draft:
            asks += self.wants_self_draft(requests, num_other_tokens, may=False)
        if free_heads:
            asks += self.wants_free_heads(requests, num_other_tokens, may=False)
        self._planned = None
        for request in requests:
            request.state.rest.looked_meanwhile()
        self.decisions["plain"] += len(requests)
        return any(asks)

    def _worth_it(
        self,
        requests: Sequence[PlannedRequest],
        num_other_tokens: int,
        eligible: Sequence[bool],
        gains: Sequence[SourceBenefit],
        source_ms: Callable[[int], float],
        name: str,
        may: bool,
    ) -> list[bool]:
        """For which eligible requests a source that costs time pays, by what it brought so far.

        source_ms: what the source costs for that many requests together. may: see
        :meth:`wants_self_draft`.
        """
        if not any(eligible):
            return [False] * len(requests)
        planned = self.plan_once(requests, num_other_tokens, begins=not may)
        expected, step_ms = planned.expected, planned.step_ms
        without = [g.tokens(e, with_pass=False) for g, e in zip(gains, expected, strict=True)]
        extra = [
            g.tokens(e, with_pass=True) - w if possible else 0.0
            for g, e, w, possible in zip(gains, expected, without, eligible, strict=True)
        ]
        num_eligible = sum(eligible)
        nodes = sum(g.nodes for g, ok in zip(gains, eligible, strict=True) if ok) / num_eligible
        host_ms = 0.0 if any(planned.counts) else self._host_ms(len(requests), planned.begins)
        extra_ms = [
            host_ms + source_ms(count) + self.nodes_ms(planned, nodes * count)
            for count in range(1, num_eligible + 1)
        ]
        best = best_group(extra, eligible, without, step_ms, extra_ms)
        relative_cost = extra_ms[-1] / step_ms
        # While one of them asks once more the others wait: they ask together, or none does.
        due = [
            possible and gain.wants_probe(relative_cost / _PROBE_SHARE)
            for gain, possible in zip(gains, eligible, strict=True)
        ]
        probes = not best and 2 * sum(due) >= num_eligible
        wanted = [possible and (probes or i in best) for i, possible in enumerate(eligible)]
        # What each of them has to gain so that the others' loss is made up for.
        gain_for_source = relative_cost * len(requests) / num_eligible
        for index, gain in enumerate(gains):
            if not eligible[index]:
                continue
            asked = wanted[index] and may
            decision = f"{name}_probe" if probes else name
            self.decisions[decision if asked else f"no_{name}"] += 1
            nodes_without = requests[index].state.taken[: planned.counts[index]]
            gain.decided(
                expected[index],
                asked,
                gain_for_source * without[index],
                nodes_without.copy() if asked else NO_NODES,
            )
        return wanted

    def plan_once(
        self, requests: Sequence[PlannedRequest], num_other_tokens: int, begins: bool = False
    ) -> StepPlan:
        """:meth:`_plan_auto`, done once for the same request objects of a step.

        begins: see :class:`StepPlan`.
        """
        planned = self._planned
        if (
            planned is None
            or planned.num_other_tokens != num_other_tokens
            or planned.begins != begins
            or len(planned.requests) != len(requests)
            or any(a is not b for a, b in zip(planned.requests, requests, strict=True))
        ):
            context_tokens = sum(request.context_len for request in requests)
            plan = self._plan_auto(requests, num_other_tokens, begins, context_tokens)
            planned = StepPlan(tuple(requests), num_other_tokens, begins, context_tokens, *plan)
            self._planned = planned
        return planned
