"""Replaying a text that is already written: what would this plan have cost?

The text is fixed, as if the target wrote it whatever was drafted (which is what lossless
means), so plans can be compared in seconds and without a model.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.planner.planner import PlannedRequest, Planner, StepPlan
from vllm_tokenswift.draft.planner.self_draft import PathEnd, SelfDraftPlanner
from vllm_tokenswift.draft.planner.self_draft_acceptance import SelfDraftPath
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.tree import DraftTree

Heads = Callable[[int], HeadProposals | None]
"""For a number of committed tokens, what heads propose to follow."""
OnIteration = Callable[[int, DraftTree, list[int], HeadProposals | None], None]
"""(tokens before the iteration, its tree, accepted nodes, what heads were drafted with)"""


@dataclass(frozen=True)
class Replay:
    """What replaying one text came to.

    Attributes:
        iterations: of the replay.
        tokens: written in them.
        drafted: nodes that were verified.
        accepted: of these.
        self_drafts: passes.
        step_ms: of all iterations, under the cost model.
        plain_ms: that plain decoding would have taken, under the cost model.
        planning_us: host time per iteration.
    """

    iterations: int
    tokens: int
    drafted: int
    accepted: int
    self_drafts: int
    step_ms: float
    plain_ms: float
    planning_us: float

    @property
    def tokens_per_iteration(self) -> float:
        """Tokens written in an iteration, on average."""
        return self.tokens / self.iterations

    @property
    def speed_up(self) -> float:
        """Plain decoding's time over the replay's."""
        return self.plain_ms / self.step_ms


def replay(
    tokens: Sequence[int],
    planner: Planner,
    limit: int,
    prompt_len: int = 1,
    self_heads: Heads | None = None,
    free_heads: Heads | None = None,
    state: DraftState | None = None,
    on_iteration: OnIteration | None = None,
    most_passes: int = 1,
) -> Replay:
    """Decodes a text with the planner.

    Args:
        tokens: the prompt and what is decoded, one at least.
        planner: that decides.
        limit: the most nodes of a tree.
        prompt_len: tokens that are there at first.
        self_heads: what draft passes and heads on them would propose.
        free_heads: what free heads would propose; they are always asked.
        state: to go on with, a new one unless given.
        on_iteration: called after each.
        most_passes: self-draft passes in a row; with more than one the rows of ``self_heads`` are
            what each of them proposes, and there are no heads below.

    Returns:
        What it came to.
    """
    cost = planner.cost
    state = state or DraftState()
    state.append_tokens(tokens[: prompt_len + 1])
    done = prompt_len + 1
    passes = SelfDraftPlanner(planner)
    iterations = drafted = accepted_total = self_drafts = 0
    step_ms = plain_ms = planning_s = 0.0
    while done < len(tokens):
        heads = free_heads(done) if free_heads else None
        began = time.process_time()
        plan = planner.plan_step([PlannedRequest(state, heads, done, limit)])
        if self_heads is not None and planner.wants_self_draft(plan)[0]:
            heads = self_heads(done)
            num_passes = 1
            if heads is not None and most_passes > 1:
                heads = _pass_by_pass(heads, plan, passes, most_passes)
                num_passes = heads.own_depths
            plan = planner.plan_step([PlannedRequest(state, heads, done, limit)])
            self_drafts += num_passes
            step_ms += num_passes * cost.draft_pass_ms(min(planner.budget, done))
        (tree,) = planner.trees(plan)
        planning_s += time.process_time() - began

        accepted = tree.follow(tokens[done : done + len(tree)])
        if on_iteration is not None:
            on_iteration(done, tree, accepted, heads)
        emitted = tokens[done : done + len(accepted) + 1]
        step_ms += cost.tree_ms(len(tree), len(tree.chains) - 1, done)
        plain_ms += sum(cost.verify_ms(1, done + i) for i in range(len(emitted)))
        began = time.process_time()
        state.append_tokens(emitted)
        planning_s += time.process_time() - began
        done += len(emitted)
        iterations += 1
        drafted += len(tree)
        accepted_total += len(accepted)
    return Replay(
        iterations,
        done - prompt_len - 1,
        drafted,
        accepted_total,
        self_drafts,
        step_ms,
        plain_ms,
        planning_s / iterations * 1e6,
    )


def _pass_by_pass(
    of_all: HeadProposals, plan: StepPlan, passes: SelfDraftPlanner, most_passes: int
) -> HeadProposals:
    """What as many passes propose as the planner wants; of_all: what all would, a row each."""
    [request] = plan.requests
    path = SelfDraftPath()
    while True:
        depth = len(path.tokens)
        row, chances = of_all.tokens[depth], of_all.probabilities[depth]
        path.follow(row, chances, depth, request.state.cells, request.noise)
        end = PathEnd(path, depth + 1 if depth + 1 < most_passes else None)
        if not passes.go_on(plan, [end])[0]:
            break
    request.state.self_draft_acceptance.note_path(path)
    num_passes = len(path.tokens)
    return HeadProposals(
        of_all.tokens[:num_passes],
        of_all.probabilities[:num_passes],
        free=False,
        own_depths=num_passes,
    )


def noisy_heads(
    tokens: Sequence[int], hit_rates: Sequence[Sequence[float]], free: bool, seed: int = 0
) -> Heads:
    """Heads that know the text.

    Args:
        tokens: the text.
        hit_rates: ``[depths][ranks]``, how often the token of a rank is the true one. Depth d is
            the d-th token after the committed ones.
        free: see :class:`HeadProposals`.
        seed: of what the others are.

    Returns:
        What they propose, by number of committed tokens.
    """

    def heads(done: int) -> HeadProposals | None:
        rng = random.Random(seed * 1_000_003 + done)
        rows: list[list[int]] = []
        for depth, rates in enumerate(hit_rates):
            row = [rng.randrange(1_000_000, 2_000_000) for _ in rates]
            draw = rng.random()
            for rank, rate in enumerate(rates):
                if draw < rate:
                    if done + depth < len(tokens):
                        row[rank] = tokens[done + depth]
                    break
                draw -= rate
            rows.append(row)
        return HeadProposals(rows, hit_rates, free)

    return heads
