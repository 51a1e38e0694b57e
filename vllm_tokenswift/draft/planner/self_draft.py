"""When self-draft passes go on, and when they get fresh blocks: tokens against time.

Time is priced by the *pace* of the batch's step, the tokens expected of it over its milliseconds.

*Another pass.* Of a request whose path came as far as it goes with chance ``r``, one more pass in
a row brings

    r * (q - max(t, (1 - q) * f))

tokens, where ``q`` is the chance that its token comes, ``t`` the chance that the tree planned
without passes goes on along the path anyway, and ``f`` the tokens that others (heads) bring
below the path's end, wherever that is: with the pass ``q * (1 + f)`` come, without it ``f``. It
is run for the requests with whom the step's pace becomes the fastest.

*Fresh blocks.* They are selected again when the tokens lost to their age
(:attr:`~vllm_tokenswift.draft.planner.self_draft_acceptance.SelfDraftAcceptance.lost`) come to

    pace * (V(1, context) - D(|B|))

``V`` being a pass over the whole cache, outside of CUDA graphs, and ``D`` the pass over the
budget in whose place it is run. Where the loss grows steadily with age, that is the age at
which loss and price together are least per token; where selecting does not help, it takes at
most as much time again as was lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tokenswift.draft.planner.planner import Planner, StepPlan
from vllm_tokenswift.draft.planner.self_draft_acceptance import SelfDraftAcceptance, SelfDraftPath
from vllm_tokenswift.draft.planner.source_benefit import best_group
from vllm_tokenswift.tree import DraftTree

# The first pass while nobody knows its token.
_SURE = SelfDraftPath(tokens=[], reach=[1.0], ages=[])


@dataclass(frozen=True)
class PathEnd:
    """Where the passes of one request stand.

    Attributes:
        path: their tokens so far.
        age: of the blocks that another pass reads, in tokens (``self_draft_acceptance.py``);
            None where there can be none.
    """

    path: SelfDraftPath
    age: int | None


class SelfDraftPlanner:
    """The planner's decisions on multi-step self-draft and on its blocks; they are plan "auto"'s.

    Args:
        planner: the engine's.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner

    @property
    def is_asked(self) -> bool:
        """Whether there is anything to decide."""
        return self._planner.mode == "auto" and bool(self._planner.cost.draft_points)

    def may_go_on(self, plan: StepPlan, ages: Sequence[int | None], passed: Sequence[bool]) -> bool:
        """Whether another pass might pay once the first is run, whatever its token.

        Args:
            plan: of the step without passes.
            ages: ``[requests]``, of the blocks another pass reads (:class:`PathEnd`).
            passed: ``[requests]``, who has a pass.
        """
        ends = [PathEnd(_SURE, age) if has else None for age, has in zip(ages, passed, strict=True)]
        return bool(self._best(plan, ends))

    def go_on(self, plan: StepPlan, ends: Sequence[PathEnd | None]) -> list[bool]:
        """For which requests one more pass in a row is worth its time.

        Args:
            plan: of the step without passes.
            ends: ``[requests]``, None where there was no pass.
        """
        chosen = self._best(plan, ends)
        wanted = [False] * len(ends)
        for place in chosen:
            wanted[place] = True
        self._planner.decisions["self_draft_again"] += len(chosen)
        return wanted

    def _best(self, plan: StepPlan, ends: Sequence[PathEnd | None]) -> list[int]:
        """Who goes on."""
        eligible = [
            end is not None and end.age is not None and request.limit > len(end.path.reach)
            for request, end in zip(plan.requests, ends, strict=True)
        ]
        if not self.is_asked or not any(eligible):
            return []
        planner = self._planner
        tokens, extra = [], []
        for place, (request, end, plain) in enumerate(
            zip(plan.requests, ends, plan.tokens_without_pass(), strict=True)
        ):
            acceptance = request.state.self_draft_acceptance
            if end is None:
                tokens.append(plain)
                extra.append(0.0)
            else:
                tokens.append(max(plain, expected_tokens(end.path, acceptance)))
                extra.append(tokens_of_another(end, acceptance, plan.tree(place)))
        passes = [0 if end is None else len(end.path.reach) for end in ends]
        num_passes = sum(passes)
        passes_ms = planner.passes_ms(plan.requests, passes) + planner.nodes_ms(plan, num_passes)

        pass_ms = [
            planner.cost.draft_pass_ms(planner.budget * count, count)
            + planner.nodes_ms(plan, count, besides=num_passes)
            for count in range(1, sum(eligible) + 1)
        ]
        step_ms = plan.step_ms + passes_ms
        return best_group(extra, eligible, tokens, step_ms, pass_ms)

    def wants_fresh_blocks(self, plan: StepPlan, selected: Sequence[bool]) -> list[bool]:
        """For which requests the next pass should select its blocks again.

        Args:
            plan: of the step without passes.
            selected: ``[requests]``, who has a pass and a selection that nothing else renews now.
        """
        lost = [
            request.state.self_draft_acceptance.lost if has else 0.0
            for request, has in zip(plan.requests, selected, strict=True)
        ]
        if not self.is_asked or not any(lost):
            return [False] * len(lost)
        planner = self._planner
        pace = sum(plan.tokens_without_pass()) / plan.step_ms
        wanted = []
        for request, tokens in zip(plan.requests, lost, strict=True):
            cost = planner.cost
            whole_ms = max(cost.verify_ms(1, request.context_len), cost.host_bound_ms)
            price = pace * (whole_ms + cost.drafting_ms - planner.passes_ms([request], [1]))
            wanted.append(tokens > 0.0 and tokens >= price)
        planner.decisions["select_early"] += sum(wanted)
        return wanted


def expected_tokens(path: SelfDraftPath, acceptance: SelfDraftAcceptance) -> float:
    """Tokens of an iteration whose passes end here.

    Args:
        path: of the passes.
        acceptance: what the request's paths taught.
    """
    return 1.0 + sum(path.reach) + path.reach[-1] * acceptance.after


def tokens_of_another(end: PathEnd, acceptance: SelfDraftAcceptance, tree: DraftTree) -> float:
    """Tokens that another pass adds.

    Args:
        end: where the passes stand.
        acceptance: what the request's paths taught.
        tree: planned without passes.
    """
    if end.age is None:
        return 0.0
    rate = acceptance.further_rate(end.age)
    others = max(_chance_below(tree, end.path.tokens), (1.0 - rate) * acceptance.after)
    return end.path.reach[-1] * max(0.0, rate - others)


def _chance_below(tree: DraftTree, path: Sequence[int]) -> float:
    """Chance that the likeliest node below the path is accepted, if the path is."""
    nodes = tree.follow(path)
    if not path or len(nodes) < len(path):
        return 0.0
    node = nodes[-1]
    below = [tree.probabilities[child - 1] for child in tree.children[node].values()]
    return float(max(below, default=0.0) / tree.probabilities[node - 1])
