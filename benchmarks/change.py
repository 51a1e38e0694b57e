"""A text that changes kind half-way: after how many tokens has the planner followed?

    python -m benchmarks.change [--tokens 3000] [--cost cpu] [--limit 16]

Replays (explain/replay.py), under a cost model: no engine, the same on every machine. The plan
has followed once the tokens after the change come at 0.9 of the speed at which the rest of the
text comes, over ``WINDOW_TOKENS``. Speed is said in two ways: tokens per iteration, and tokens
per modelled millisecond, which is what a planner that keeps drafting in vain loses. "fixed"
drafts alike all the time: what it needs too is the text's own doing (a loop can be copied only
once it has been written).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import record
from benchmarks.replay import COSTS, texts
from vllm_tokenswift.draft.planner.planner import PlanMode, Planner
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.explain.replay import replay
from vllm_tokenswift.tree import DraftTree

WINDOW_TOKENS = 50
REACHED = 0.9
GOAL_TOKENS = 200
_KINDS = ("loop", "code", "prose", "numbers")
_PLANS: tuple[PlanMode, ...] = ("auto", "fixed")

Step = tuple[int, float]
"""Tokens that an iteration emitted, and what it cost."""


def tokens_until_followed(steps: Sequence[Step], change: int) -> int:
    """Tokens after ``change`` until they come at ``REACHED`` of the later speed, or faster.

    steps: of the whole text, in order; speed is tokens over cost. The later speed is that of
    the last half of what follows the change.
    """
    after: list[Step] = []
    before = 0
    for tokens, cost in steps:
        if before >= change:
            after.append((tokens, cost))
        before += tokens
    later = _speed(after[_first_at(after, sum(n for n, _ in after) // 2) :])
    begun = 0
    for i, (tokens, _) in enumerate(after):
        window = after[i : i + 1 + _first_at(after[i:], WINDOW_TOKENS)]
        if _speed(window) >= REACHED * later:
            return begun
        begun += tokens
    raise AssertionError("one of the windows is as fast as all of them together")


def _first_at(steps: Sequence[Step], num_tokens: int) -> int:
    """Index of the step that brings the tokens to ``num_tokens``; of the last if none does."""
    reached = 0
    for i, (tokens, _) in enumerate(steps):
        reached += tokens
        if reached >= num_tokens:
            return i
    return len(steps) - 1


def _speed(steps: Sequence[Step]) -> float:
    return sum(tokens for tokens, _ in steps) / sum(cost for _, cost in steps)


def steps_of(tokens: Sequence[int], planner: Planner, limit: int) -> list[tuple[int, float]]:
    """(tokens, modelled ms) of every iteration, look-up sources only."""
    steps: list[tuple[int, float]] = []

    def note(done: int, tree: DraftTree, accepted: list[int], _: HeadProposals | None) -> None:
        ms = planner.cost.tree_ms(len(tree), len(tree.chains) - 1, done)
        steps.append((min(len(accepted) + 1, len(tokens) - done), ms))

    replay(tokens, planner, limit, on_iteration=note)
    return steps


def measure(num_tokens: int = 3000, cost: str = "cpu", limit: int = 16) -> list[dict[str, Any]]:
    """Every change between two kinds of text, each half ``num_tokens`` long, by each plan."""
    kinds = {name: tokens for name, tokens in texts(num_tokens).items() if name in _KINDS}
    results = []
    for first, before in kinds.items():
        for second, after in kinds.items():
            if first == second:
                continue
            for plan in _PLANS:
                steps = steps_of(before + after, Planner(COSTS[cost], mode=plan), limit)
                per_iteration = [(tokens, 1.0) for tokens, _ in steps]
                results.append(
                    {
                        "from": first,
                        "to": second,
                        "plan": plan,
                        "by_iterations": tokens_until_followed(per_iteration, len(before)),
                        "by_time": tokens_until_followed(steps, len(before)),
                    }
                )
    return results


def table(results: Sequence[dict[str, Any]]) -> str:
    rows = []
    for auto, fixed in zip(results[::2], results[1::2], strict=True):
        reached = max(auto["by_iterations"], auto["by_time"]) <= GOAL_TOKENS
        cells = [str(r[by]) for by in ("by_iterations", "by_time") for r in (auto, fixed)]
        rows.append([auto["from"], auto["to"], *cells, "yes" if reached else "**no**"])
    header = [
        *("from", "to"),
        *("auto, tokens until 0.9 of the later tokens/iteration", "fixed"),
        *("auto, tokens until 0.9 of the later tokens/ms (modelled)", "fixed"),
        f"auto within {GOAL_TOKENS}",
    ]
    return record.markdown(header, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=3000, help="of each half")
    parser.add_argument("--cost", choices=sorted(COSTS), default="cpu")
    parser.add_argument("--limit", type=int, default=16, help="most draft nodes a step")
    arguments = parser.parse_args()
    print(table(measure(arguments.tokens, arguments.cost, arguments.limit)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
