"""Chances with the noise in view, and trees that look at it."""

from collections.abc import Callable
from math import log

import numpy as np
import pytest

from vllm_tokenswift.draft.candidates import HeadCandidates, PathOffer
from vllm_tokenswift.draft.cost import CostModel
from vllm_tokenswift.draft.foresight import Foresight
from vllm_tokenswift.draft.gain import GainModel
from vllm_tokenswift.draft.planner import DraftRequest, Planner
from vllm_tokenswift.draft.state import DraftState
from vllm_tokenswift.draft.trie import Trie, take_best_first


def foresight_of(noise: dict[tuple[int, int], float], otherwise: float = 1.0) -> Foresight:
    """Noise by (depth, token)."""

    def noise_at(depth: int) -> Callable[[int], float]:
        return lambda token: noise.get((depth, token), otherwise)

    return Foresight(noise_at)


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.9])
def test_over_all_noise_the_chance_is_the_probability(probability: float) -> None:
    quantiles = (np.arange(20_000) + 0.5) / 20_000
    chances = [foresight_of({(0, 7): -log(1 - q)}).chance(probability, 0, 7) for q in quantiles]
    assert np.mean(chances) == pytest.approx(probability, rel=0.01)


def test_the_chance_is_how_often_the_token_is_drawn_with_that_noise() -> None:
    rng = np.random.default_rng(0)
    p, noise = np.array([0.2, 0.5, 0.3]), 0.25
    others = rng.exponential(size=(50_000, 2)) / p[1:]
    drawn = (noise / p[0] < others.min(axis=1)).mean()
    assert foresight_of({(2, 5): noise}).chance(0.2, 2, 5) == pytest.approx(drawn, abs=0.01)


def test_the_smaller_the_noise_the_likelier_an_offer() -> None:
    chances = [foresight_of({}, noise).weighed(0.1, 0, 3) for noise in (0.01, 0.1, 0.4, 0.8, 3.0)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.3
    assert chances[-1] < 0.05


def test_a_sure_offer_does_not_depend_on_luck() -> None:
    unlucky = foresight_of({}, 5.0)
    assert unlucky.weighed(0.99, 0, 3) > 0.985
    assert unlucky.weighed(1.0, 0, 3) == pytest.approx(1.0)


def test_each_depth_has_its_own_noise() -> None:
    """Two equally likely continuations: the lucky one is taken, deeper down as at the root."""
    offers = [PathOffer(GainModel(), path, 2, 0.0) for path in ([1, 2, 3], [4, 5, 6])]
    foresight = foresight_of({(0, 4): 0.01, (1, 5): 0.01, (1, 2): 0.02})
    trie = Trie(offers, foresight=foresight)
    list(take_best_first([trie], [2]))
    assert trie.tokens == [4, 5]
    trie = Trie(offers, foresight=foresight_of({(0, 1): 0.01}))
    list(take_best_first([trie], [1]))
    assert trie.tokens == [1]


def test_a_draft_pass_and_its_noise_leave_little_doubt() -> None:
    """Of four tokens as likely as each other the noise singles out the one to draft."""
    state = DraftState()
    state.extend([11, 12, 13])
    heads = HeadCandidates([[1, 2, 3, 4]], [[0.25] * 4], free=False)
    planner = Planner(
        CostModel(verify_points=((1, 10.0), (2, 15.0), (5, 30.0)), draft_points=((0, 10.0),))
    )
    noise = {(0, 1): 2.0, (0, 2): 0.05, (0, 3): 1.0, (0, 4): 0.9}
    for foresight, drafted in ((None, []), (foresight_of(noise), [2])):
        request = DraftRequest(state, heads, context_len=3, limit=4, foresight=foresight)
        [tree] = planner.plan([request])
        assert tree.tokens.tolist() == drafted
