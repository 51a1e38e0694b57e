"""How long a plan takes to follow a text that changes kind."""

from __future__ import annotations

from benchmarks import change
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import Planner


def test_what_comes_at_its_later_speed_at_once_was_followed_at_once() -> None:
    steps = [(1, 1.0)] * 100 + [(4, 1.0)] * 100
    assert change.tokens_until_followed(steps, 100) == 0


def test_a_slow_stretch_after_the_change_is_counted() -> None:
    steps = [(5, 1.0)] * 20 + [(1, 1.0)] * 120 + [(4, 1.0)] * 200
    # The window may begin a little before the stretch ends: 0.9 is enough.
    assert 115 <= change.tokens_until_followed(steps, 100) <= 120


def test_drafts_in_vain_are_seen_in_time_and_not_in_iterations() -> None:
    steps = [(5, 1.0)] * 20 + [(1, 2.0)] * 60 + [(1, 1.0)] * 300
    assert change.tokens_until_followed([(n, 1.0) for n, _ in steps], 100) == 0
    assert 50 <= change.tokens_until_followed(steps, 100) <= 60


def test_a_replay_gives_every_token_to_a_step() -> None:
    cost = CostModel(((1, 10.0), (9, 11.0)))
    steps = change.steps_of([1, 2, 3, 4] * 50, Planner(cost), 8)
    # Two tokens are there before the first iteration.
    assert sum(tokens for tokens, _ in steps) == 198
    assert len(steps) < 100
    assert all(ms >= 10.0 for _, ms in steps)


def test_the_table_says_where_the_goal_is_missed() -> None:
    results = [
        {"from": "loop", "to": to, "plan": plan, "by_iterations": 10, "by_time": time}
        for to, time in (("code", 150), ("prose", 201))
        for plan in ("auto", "fixed")
    ]
    code, prose = change.table(results).splitlines()[2:]
    assert code.endswith("| yes |")
    assert prose.endswith("| **no** |")
