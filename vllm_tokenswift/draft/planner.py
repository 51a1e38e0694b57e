"""How much to draft, for every request of a batch at once.

The planner maximises expected tokens per millisecond of the batch's step. Nodes are taken
over all requests in order of their path probability, the only order in which a given number
of nodes can bring the most; how many to take is then one walk along the measured cost curve.
Taking none is plain decoding.

Every decision follows from the requests' token histories and the shared cost model: no
clock, no randomness, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from vllm_tokenswift.draft.best_group import best_group
from vllm_tokenswift.draft.candidates import HeadCandidates
from vllm_tokenswift.draft.cost import CostModel
from vllm_tokenswift.draft.foresight import Foresight
from vllm_tokenswift.draft.source_gain import SourceGain
from vllm_tokenswift.draft.state import DraftState
from vllm_tokenswift.draft.trie import Trie, grow_tree, paper_tree, take_best_first
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

PlanMode = Literal["auto", "paper", "fixed"]

# Paths less likely than this are not worth the host's time, however cheap the pass.
_MIN_PROBABILITY = 0.004
# Expected gain below which an iteration is decoded plainly: the estimates are no better.
_MIN_IMPROVEMENT = 1.05
# A self-draft pass adds about this many nodes to what is verified.
_SELF_DRAFT_NODES = 4
# Share of the time that may go into self-draft passes which only ask whether they pay again.
_PROBE_SHARE = 0.01
# Curves kept by (tokens, nodes) of a step; a batch of changing size needs a few hundred.
_MAX_CURVES = 1024


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One request of the batch, as the planner sees it.

    heads: what the draft pass or the free heads offer, None where there is nothing.
    context_len: tokens the bonus token attends to. limit: the most nodes it may draft.
    chain_only: its drafts must form a chain (structured output).
    foresight: the noise of its coming samples, None where there is none to see.
    """

    state: DraftState
    heads: HeadCandidates | None
    context_len: int
    limit: int
    chain_only: bool = False
    foresight: Foresight | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What was planned for these requests without a source that costs time.

    expected: tokens of each request with its tree; step_ms: of the batch.
    """

    requests: tuple[DraftRequest, ...]
    num_other_tokens: int
    trees: list[DraftTree]
    expected: list[float]
    step_ms: float

    def tokens_without_pass(self) -> list[float]:
        """Tokens to count on, by what iterations without a self-draft pass came to."""
        return [
            request.state.self_draft.tokens(expected, with_pass=False)
            for request, expected in zip(self.requests, self.expected, strict=True)
        ]


class Planner:
    """Plans the drafts of an engine's requests.

    cost: the machine. budget: tokens of partial KV a self-draft pass reads (``|B|``).
    mode: "auto" plans; "paper" is the paper's fixed tree and n-grams with a self-draft pass
    every time; "fixed" drafts the likeliest nodes of all sources up to the limit every time.

    ``decisions`` counts plans of requests by outcome ("drafted", "plain", "none": nothing
    allowed), the decisions on sources that cost time ("self_draft", "self_draft_probe",
    "no_self_draft", and the same of "free_heads"; "self_draft_again": one more pass in a row),
    and selections of blocks by reason ("select_early" by the planner, the others see
    :class:`~vllm_tokenswift.partial_kv.table.Due`).
    """

    def __init__(self, cost: CostModel, budget: int = 4096, mode: PlanMode = "auto") -> None:
        if mode not in get_args(PlanMode):
            raise ValueError(f"plan must be one of {', '.join(get_args(PlanMode))}, got {mode!r}")
        self.cost = cost
        self.budget = budget
        self.mode = mode
        self._curves: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
        self._planned: StepPlan | None = None
        self.decisions: dict[str, int] = dict.fromkeys(
            (
                *("drafted", "plain", "none"),
                *("self_draft", "self_draft_probe", "no_self_draft", "self_draft_again"),
                *("free_heads", "free_heads_probe", "no_free_heads"),
                *("select_first", "select_used_up", "select_interval", "select_early"),
            ),
            0,
        )

    def plan(self, requests: Sequence[DraftRequest], num_other_tokens: int = 0) -> list[DraftTree]:
        """One tree for each request, empty where it decodes plainly.

        num_other_tokens: query tokens of the batch besides these requests' (prefill chunks).
        Where one of the ``wants_`` methods was just asked about these same request objects,
        what it planned is used.
        """
        if self.mode == "auto":
            trees = self.plan_once(requests, num_other_tokens).trees
            self._planned = None
        else:
            trees = [self._plan_fixed(request) for request in requests]
        for request, tree in zip(requests, trees, strict=True):
            if request.limit <= 0:
                self.decisions["none"] += 1
            else:
                self.decisions["drafted" if len(tree) else "plain"] += 1
        return trees

    def _plan_fixed(self, request: DraftRequest) -> DraftTree:
        if request.limit <= 0:
            return EMPTY_TREE
        state, heads = request.state, request.heads
        offers = state.candidates(heads, request.limit)
        if self.mode == "paper" and heads is not None and not heads.free:
            return paper_tree(heads, state.table, request.limit, chain_only=request.chain_only)
        return grow_tree(offers, request.limit, request.chain_only)

    def _plan_auto(
        self, requests: Sequence[DraftRequest], num_other_tokens: int
    ) -> tuple[list[DraftTree], list[float], float]:
        """Trees, expected tokens of each request, and the step's expected milliseconds."""
        limits = [max(request.limit, 0) for request in requests]
        tries = [
            Trie(
                request.state.candidates(request.heads, limit, request.foresight),
                request.chain_only,
                request.foresight,
                heads_foreseen=request.heads is not None and request.heads.foreseen,
            )
            for request, limit in zip(requests, limits, strict=True)
        ]
        num_plain = len(requests) + num_other_tokens
        curve_ms, cheapest_ms = self._curve(num_plain, sum(limits))
        context_tokens = sum(request.context_len for request in requests)
        fixed_ms = self.cost.context_ms(context_tokens) + self._spent_ms(requests)

        expected = float(len(requests))
        plain_rate = best_rate = expected / (curve_ms[0] + fixed_ms)
        best = 0
        taken: list[tuple[int, float]] = []
        for index, probability in take_best_first(tries, limits, _MIN_PROBABILITY):
            taken.append((index, probability))
            expected += probability
            rate = expected / (curve_ms[len(taken)] + fixed_ms)
            if rate > best_rate:
                best_rate, best = rate, len(taken)
            elif probability <= best_rate * cheapest_ms[len(taken)]:
                break  # no number of nodes this likely can catch up

        counts = [0] * len(tries)
        tokens = [1.0] * len(tries)
        for index, probability in taken[:best]:
            counts[index] += 1
            tokens[index] += probability
        node_ms = (curve_ms[best] - curve_ms[0]) / best if best else 0.0
        step_ms = curve_ms[best] + fixed_ms
        dropped: list[set[int]] = []
        for index, (request, trie) in enumerate(zip(requests, tries, strict=True)):
            chain_ms = self.cost.chain_cost_ms(request.context_len)
            without: set[int] = set()
            if chain_ms > 0 and counts[index]:
                without, lost, saved_ms = _dear_branches(
                    trie, counts[index], best_rate, node_ms, chain_ms
                )
                tokens[index] -= lost
                step_ms += saved_ms
            dropped.append(without)
        if sum(tokens) / step_ms < plain_rate * _MIN_IMPROVEMENT:
            return [EMPTY_TREE] * len(tries), [1.0] * len(tries), curve_ms[0] + fixed_ms
        trees = [
            trie.tree(count, without)
            for trie, count, without in zip(tries, counts, dropped, strict=True)
        ]
        return trees, tokens, step_ms

    def _curve(self, num_plain: int, most_nodes: int) -> tuple[list[float], list[float]]:
        """By number of nodes: the verify pass's ms, and the least that any further node adds."""
        key = (num_plain, most_nodes)
        if key not in self._curves:
            if len(self._curves) >= _MAX_CURVES:
                self._curves.clear()
            curve = self.cost.verify_curve_ms(num_plain, num_plain + most_nodes)
            steps = np.diff(curve, append=np.inf)
            cheapest = np.minimum.accumulate(steps[::-1])[::-1]
            self._curves[key] = (curve.tolist(), cheapest.tolist())
        return self._curves[key]

    def _spent_ms(self, requests: Sequence[DraftRequest]) -> float:
        """What this step's draft pass and heads have cost already."""
        passes = [
            r.heads.own_depths if r.heads is not None and not r.heads.free else 0 for r in requests
        ]
        head_passes = max((r.heads.num_passes for r in requests if r.heads is not None), default=0)
        return self.cost.heads_ms * head_passes + self.passes_ms(requests, passes)

    @property
    def node_ms(self) -> float:
        """What a node adds that is verified because of a self-draft pass."""
        nodes_ms = self.cost.verify_ms(1 + _SELF_DRAFT_NODES) - self.cost.verify_ms(1)
        return nodes_ms / _SELF_DRAFT_NODES

    def passes_ms(self, requests: Sequence[DraftRequest], passes: Sequence[int]) -> float:
        """Draft passes of a step; passes: in a row, of each request."""
        total_ms = 0.0
        for depth in range(max(passes, default=0)):
            together = [r for r, count in zip(requests, passes, strict=True) if count > depth]
            kv_tokens = sum(min(self.budget, request.context_len) for request in together)
            total_ms += self.cost.draft_pass_ms(kv_tokens, len(together))
        return total_ms

    def wants_self_draft(
        self, requests: Sequence[DraftRequest], num_other_tokens: int = 0
    ) -> list[bool]:
        """For which requests a draft pass is worth its time now.

        Never where the context fits into the budget (the pass would cost what plain
        decoding costs), nor where nothing may be drafted.
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
        )

    def wants_free_heads(
        self, requests: Sequence[DraftRequest], num_other_tokens: int = 0
    ) -> list[bool]:
        """For which requests heads on the verify pass's hidden state are worth their time now.

        No pass of the model, but one of its LM head: not free on a small model.
        """
        eligible = [r.limit > 0 for r in requests]
        if self.mode != "auto":
            return eligible
        return self._worth_it(
            requests,
            num_other_tokens,
            eligible,
            [request.state.free_heads for request in requests],
            lambda _: self.cost.heads_ms * max(r.state.head_passes for r in requests),
            "free_heads",
        )

    def _worth_it(
        self,
        requests: Sequence[DraftRequest],
        num_other_tokens: int,
        eligible: Sequence[bool],
        gains: Sequence[SourceGain],
        source_ms: Callable[[int], float],
        name: str,
    ) -> list[bool]:
        """For which eligible requests a source that costs time pays, by what it brought so far.

        source_ms: what the source costs for that many requests together.
        """
        if not any(eligible):
            return [False] * len(requests)
        planned = self.plan_once(requests, num_other_tokens)
        expected, step_ms = planned.expected, planned.step_ms
        without = [g.tokens(e, with_pass=False) for g, e in zip(gains, expected, strict=True)]
        extra = [
            g.tokens(e, with_pass=True) - w if may else 0.0
            for g, e, w, may in zip(gains, expected, without, eligible, strict=True)
        ]
        wanted = [False] * len(requests)
        node_ms = _SELF_DRAFT_NODES * self.node_ms

        def extra_ms(count: int) -> float:
            return source_ms(count) + node_ms * count

        best = best_group(extra, eligible, sum(without), step_ms, extra_ms)
        for index in best:
            wanted[index] = True
        num_eligible = sum(eligible)
        relative_cost = extra_ms(num_eligible) / step_ms
        tokens_for_source = relative_cost * sum(without) / num_eligible
        for index, gain in enumerate(gains):
            if not eligible[index]:
                continue
            decision = name if wanted[index] else f"no_{name}"
            if not best and gain.wants_probe(relative_cost / _PROBE_SHARE):
                wanted[index] = True
                decision = f"{name}_probe"
            self.decisions[decision] += 1
            baseline = without[index] - expected[index]
            gain.decided(expected[index], wanted[index], baseline + tokens_for_source)
        return wanted

    def plan_once(self, requests: Sequence[DraftRequest], num_other_tokens: int) -> StepPlan:
        """:meth:`_plan_auto`, done once for the same request objects of a step."""
        planned = self._planned
        if (
            planned is None
            or planned.num_other_tokens != num_other_tokens
            or len(planned.requests) != len(requests)
            or any(a is not b for a, b in zip(planned.requests, requests, strict=True))
        ):
            trees, expected, step_ms = self._plan_auto(requests, num_other_tokens)
            planned = StepPlan(tuple(requests), num_other_tokens, trees, expected, step_ms)
            self._planned = planned
        return planned


def _dear_branches(
    trie: Trie, count: int, rate: float, node_ms: float, chain_ms: float
) -> tuple[set[int], float, float]:
    """Side branches that bring less than their own chain costs.

    rate: tokens per ms that time is worth. Returns the nodes at which such branches begin,
    the expected tokens lost with them, and the change in ms (chains kept less nodes saved).
    """
    parents, probabilities = trie.parents, trie.probabilities
    tokens = [0.0, *probabilities[:count]]  # of the subtree as kept, by node
    nodes = [0] + [1] * count
    chains = [0] * (count + 1)
    first_child = [0] * (count + 1)
    for node in range(count, 0, -1):
        first_child[parents[node - 1]] = node
    without: set[int] = set()
    lost = 0.0
    saved_nodes = 0
    for node in range(count, 0, -1):
        parent = parents[node - 1]
        if first_child[parent] != node:
            cost_ms = nodes[node] * node_ms + (chains[node] + 1) * chain_ms
            if tokens[node] < rate * cost_ms:
                without.add(node)
                lost += tokens[node]
                saved_nodes += nodes[node]
                continue
            chains[parent] += 1
        tokens[parent] += tokens[node]
        nodes[parent] += nodes[node]
        chains[parent] += chains[node]
    return without, lost, chains[0] * chain_ms - saved_nodes * node_ms
