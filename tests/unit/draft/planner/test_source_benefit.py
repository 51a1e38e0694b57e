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
    state.extend(text[:200])
    depths = set()
    for position in range(200, 590):
        count = state.draft(None, 12)
        coming = text[position : position + 10]
        depth = num_followed(state.taken[:count], np.array(coming, np.int32))
        assert depth == len(state.tree(count).follow(coming))
        depths.add(depth)
        state.extend(text[position : position + 1])
    assert {0, 1, 2, 3} < depths


def test_a_source_that_is_always_asked_and_adds_nothing_is_found_out() -> None:
    """The text brings twice what is expected of it, with heads or without."""
    rng = random.Random(1)
    gain = SourceBenefit(prior=0.4)
    for _ in range(200):
        gain.decided(1.5, with_pass=True, to_pay=0.2)
        emitted = rng.choice((1, 1, 2, 8))
        gain.observe(emitted, num_without=emitted)
    without = gain.tokens(1.5, with_pass=False)
    assert without > 2.0
    assert gain.tokens(1.5, with_pass=True) - without == pytest.approx(0.0, abs=0.02)


def test_what_is_added_is_known_to_a_tenth_in_a_few_dozen_iterations() -> None:
    rng = random.Random(2)
    gain = SourceBenefit(prior=0.4)
    for number in range(60):
        gain.decided(1.5, with_pass=True, to_pay=0.2)
        by_text = rng.choice((1, 1, 2, 8))
        gain.observe(by_text + number % 2, num_without=by_text)
    added = gain.tokens(1.5, with_pass=True) - gain.tokens(1.5, with_pass=False)
    assert added == pytest.approx(0.5, abs=0.1)


def test_where_nobody_knows_what_would_have_come_other_iterations_tell() -> None:
    gain = SourceBenefit(prior=0.0)
    for _ in range(60):
        gain.decided(1.5, with_pass=False, to_pay=0.2)
        gain.observe(2)
        gain.decided(1.5, with_pass=True, to_pay=0.2)
        gain.observe(3)
    assert gain.tokens(1.5, with_pass=False) == pytest.approx(2.0, abs=0.1)
    assert gain.tokens(1.5, with_pass=True) == pytest.approx(3.0, abs=0.2)


@pytest.mark.parametrize("are_right", [True, False])
def test_heads_are_asked_where_they_are_right_and_not_where_the_text_knows_as_much(
    are_right: bool,
) -> None:
    """The text brings about two tokens more an iteration; right heads know the next four."""
    text = phrases(3000)
    cost = CostModel(verify_points=((1, 5.0), (33, 5.2)), heads_ms=0.8)
    planner, state = Planner(cost), DraftState()
    state.extend(text[:200])
    position, late = 200, 0
    while position < len(text) - 20:
        request = PlannedRequest(state, None, position, 16)
        [asks] = planner.wants_free_heads([request])
        late += asks and position > 1500
        if asks:
            said = [[token if are_right else 40] for token in text[position : position + 4]]
            heads = HeadProposals(said, [[0.9]] * 4, free=True)
            request = PlannedRequest(state, heads, position, 16)
        [tree] = planner.plan([request])
        emitted = len(tree.follow(text[position:])) + 1
        state.extend(text[position : position + emitted])
        position += emitted
    iterations = planner.decisions["drafted"] + planner.decisions["plain"]
    assert late > 0.2 * iterations if are_right else late < 0.03 * iterations
