"""What a source adds is told from what an iteration would have emitted without it."""

import random

import numpy as np
import pytest

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlannedRequest, Planner
from vllm_tokenswift.draft.planner.source_benefit import SourceBenefit
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.tree_builder import num_followed


def phrases(num_tokens: int, seed: int = 5) -> list[int]:
    """Phrases of a small vocabulary, in random order: trees branch."""
    rng = random.Random(seed)
    known = [[rng.randrange(30) for _ in range(rng.randrange(2, 6))] for _ in range(20)]
    text: list[int] = []
    while len(text) < num_tokens:
        text += rng.choice(known)
    return text[:num_tokens]


def test_the_nodes_taken_are_followed_as_their_tree_is() -> None:
    text, state = phrases(600), DraftState()
    state.append_tokens(text[:200])
    depths = set()
    for position in range(200, 590):
        drafted = state.draft(None, 12)
        coming = text[position : position + 10]
        depth = num_followed(drafted.nodes[: drafted.count], np.array(coming, np.int32))
        assert depth == len(drafted.tree(drafted.count).follow(coming))
        depths.add(depth)
        state.append_tokens(text[position : position + 1])
    assert {0, 1, 2, 3} < depths


def test_a_source_that_is_always_asked_and_adds_nothing_is_found_out() -> None:
    """The text brings twice what is expected of it, with heads or without."""
    rng = random.Random(1)
    benefit = SourceBenefit(prior=0.4)
    for _ in range(200):
        benefit.note_decision(1.5, with_source=True, to_pay=0.2)
        emitted = rng.choice((1, 1, 2, 8))
        benefit.observe_emitted(emitted, num_without=emitted)
    without = benefit.expected_tokens(1.5, with_source=False)
    assert without > 2.0
    assert benefit.expected_tokens(1.5, with_source=True) - without == pytest.approx(0.0, abs=0.02)


def test_what_is_added_is_known_to_a_tenth_in_a_few_dozen_iterations() -> None:
    rng = random.Random(2)
    benefit = SourceBenefit(prior=0.4)
    for number in range(60):
        benefit.note_decision(1.5, with_source=True, to_pay=0.2)
        by_text = rng.choice((1, 1, 2, 8))
        benefit.observe_emitted(by_text + number % 2, num_without=by_text)
    added = benefit.expected_tokens(1.5, with_source=True) - benefit.expected_tokens(
        1.5, with_source=False
    )
    assert added == pytest.approx(0.5, abs=0.1)


def test_where_nobody_knows_what_would_have_come_other_iterations_tell() -> None:
    benefit = SourceBenefit(prior=0.0)
    for _ in range(60):
        benefit.note_decision(1.5, with_source=False, to_pay=0.2)
        benefit.observe_emitted(2)
        benefit.note_decision(1.5, with_source=True, to_pay=0.2)
        benefit.observe_emitted(3)
    assert benefit.expected_tokens(1.5, with_source=False) == pytest.approx(2.0, abs=0.1)
    assert benefit.expected_tokens(1.5, with_source=True) == pytest.approx(3.0, abs=0.2)


@pytest.mark.parametrize("are_right", [True, False])
def test_heads_are_asked_where_they_are_right_and_not_where_the_text_knows_as_much(
    are_right: bool,
) -> None:
    """The text brings about two tokens more an iteration; right heads know the next four."""
    text = phrases(3000)
    cost = CostModel(verify_points=((1, 5.0), (33, 5.2)), heads_ms=0.8)
    planner, state = Planner(cost), DraftState()
    state.append_tokens(text[:200])
    position, late = 200, 0
    while position < len(text) - 20:
        request = PlannedRequest(state, None, position, 16)
        plan = planner.plan_step([request])
        [asks] = planner.wants_free_heads(plan)
        late += asks and position > 1500
        if asks:
            said = [[token if are_right else 40] for token in text[position : position + 4]]
            heads = HeadProposals(said, [[0.9]] * 4, free=True)
            plan = planner.plan_step([PlannedRequest(state, heads, position, 16)])
        [tree] = planner.trees(plan)
        emitted = len(tree.follow(text[position:])) + 1
        state.append_tokens(text[position : position + emitted])
        position += emitted
    iterations = planner.decisions["drafted"] + planner.decisions["plain"]
    assert late > 0.2 * iterations if are_right else late < 0.03 * iterations
