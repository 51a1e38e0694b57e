"""Chances with the noise in view, and trees that look at it."""

from math import log

import numpy as np
import pytest

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.gumbel_noise import MURMUR, SPLITMIX, GumbelNoise, chance, weighed
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlannedRequest, Planner
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals


def gumbel_noise_of(kind: int) -> GumbelNoise:
    return GumbelNoise(kind, lambda positions: np.arange(5, 7 + positions, dtype=np.uint64))


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.9])
def test_over_all_noise_the_chance_is_the_probability(probability: float) -> None:
    quantiles = (np.arange(20_000) + 0.5) / 20_000
    chances = [chance(probability, -log(1 - q)) for q in quantiles]
    assert np.mean(chances) == pytest.approx(probability, rel=0.01)


def test_the_chance_is_how_often_the_token_is_drawn_with_that_noise() -> None:
    rng = np.random.default_rng(0)
    p, noise = np.array([0.2, 0.5, 0.3]), 0.25
    others = rng.exponential(size=(50_000, 2)) / p[1:]
    drawn = (noise / p[0] < others.min(axis=1)).mean()
    assert chance(0.2, noise) == pytest.approx(drawn, abs=0.01)


def test_the_smaller_the_noise_the_likelier_a_candidate() -> None:
    chances = [weighed(0.1, noise) for noise in (0.01, 0.1, 0.4, 0.8, 3.0)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.3
    assert chances[-1] < 0.05


def test_a_sure_candidate_does_not_depend_on_luck() -> None:
    assert weighed(0.99, 5.0) > 0.985
    assert weighed(1.0, 5.0) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", [SPLITMIX, MURMUR])
def test_the_noise_is_exponential_and_every_position_has_its_own(kind: int) -> None:
    gumbel_noise = gumbel_noise_of(kind)
    noise = np.array([[gumbel_noise.noise(depth, t) for t in range(20_000)] for depth in range(3)])
    # The standard errors are 0.007 (mean), 0.016 (variance) and 0.007 (correlation).
    assert noise.mean(axis=1) == pytest.approx(1.0, abs=0.03)
    assert noise.var(axis=1) == pytest.approx(1.0, abs=0.07)
    assert np.corrcoef(noise) == pytest.approx(np.eye(3), abs=0.03)


@pytest.mark.parametrize("kind", [SPLITMIX, MURMUR])
def test_a_candidate_is_weighed_by_the_noise_of_its_token_and_depth(kind: int) -> None:
    gumbel_noise = gumbel_noise_of(kind)
    for depth in range(3):
        for token in range(20):
            expected = weighed(0.3, gumbel_noise.noise(depth, token))
            assert gumbel_noise.weighed(0.3, depth, token) == expected


def by_luck(gumbel_noise: GumbelNoise, depth: int) -> list[int]:
    """Tokens, that of the smallest noise first."""
    return sorted(range(100), key=lambda token: gumbel_noise.noise(depth, token))


@pytest.mark.parametrize("kind", [SPLITMIX, MURMUR])
def test_of_equally_likely_continuations_the_lucky_one_is_taken_at_every_depth(kind: int) -> None:
    gumbel_noise = gumbel_noise_of(kind)
    rows, lucky = [], []
    for depth in range(3):
        tokens = by_luck(gumbel_noise, depth)
        rows.append([tokens[-1], tokens[0]])
        lucky.append(tokens[0])
    heads = HeadProposals(rows, [[0.3, 0.3]] * 3, free=True)
    state = DraftState()
    state.append_tokens([1])
    drafted = state.draft(heads, 3, chain_only=True)
    assert drafted.nodes[:, 0].tolist() == [row[0] for row in rows]
    drafted = state.draft(heads, 3, chain_only=True, noise=gumbel_noise)
    assert drafted.nodes[:, 0].tolist() == lucky


def test_heads_that_know_the_noise_are_not_weighed_again() -> None:
    gumbel_noise = gumbel_noise_of(SPLITMIX)
    tokens = by_luck(gumbel_noise, 0)
    state = DraftState()
    state.append_tokens([1])
    for sees_noise, taken in ((True, tokens[-1]), (False, tokens[0])):
        heads = HeadProposals([[tokens[-1], tokens[0]]], [[0.3, 0.3]], True, sees_noise=sees_noise)
        drafted = state.draft(heads, 1, noise=gumbel_noise)
        assert drafted.nodes[0, 0] == taken


def test_a_draft_pass_and_its_noise_leave_little_doubt() -> None:
    """Of four tokens as likely as each other the noise singles out the one to draft."""
    state = DraftState()
    state.append_tokens([111, 112, 113])
    gumbel_noise = gumbel_noise_of(MURMUR)
    lucky, *_, second, third, fourth = by_luck(gumbel_noise, 0)
    heads = HeadProposals([[second, lucky, third, fourth]], [[0.25] * 4], free=False)
    planner = Planner(
        CostModel(verify_points=((1, 10.0), (2, 15.0), (5, 30.0)), draft_points=((0, 10.0),))
    )
    for seen, drafted in ((None, []), (gumbel_noise, [lucky])):
        request = PlannedRequest(state, heads, context_len=3, limit=4, noise=seen)
        [tree] = planner.plan([request])
        assert tree.tokens.tolist() == drafted
