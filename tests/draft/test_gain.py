"""Acceptance learned per cell."""

import pytest

from vllm_tokenswift.draft.gain import GainModel
from vllm_tokenswift.tree import Source


def test_longer_matches_are_trusted_more_from_the_start() -> None:
    gains = GainModel()
    rates = [gains.rates[cell] for cell in gains.continued_match_cells()[1:]]
    assert rates == sorted(rates)
    assert rates[0] < 0.5 < rates[-1]


@pytest.mark.parametrize(("length", "accepted"), [(2, 1.2), (3, 4.4), (5, 7.4), (8, 12.3)])
def test_priors_give_the_measured_accepted_lengths(length: int, accepted: float) -> None:
    gains = GainModel()
    cells = gains.continued_match_cells()
    expected, path = 0.0, 1.0
    for depth in range(200):
        path *= gains.rates[cells[min(length + depth, len(cells) - 1)]]
        expected += path
    assert expected == pytest.approx(accepted, rel=0.25)


def test_matches_of_sampled_text_are_trusted_less_until_they_prove_themselves() -> None:
    likeliest, sampled = GainModel(), GainModel(sampled=True)
    cell = likeliest.continued_match_cells()[5]
    assert sampled.rates[cell] < 0.75 * likeliest.rates[cell]
    for _ in range(12):
        sampled.observe(cell, True)
    assert sampled.rates[cell] > likeliest.rates[cell]
    ngram = likeliest.ngram_cell(3, 0.5, 1)
    assert sampled.rates[ngram] == likeliest.rates[ngram]


def test_a_cell_follows_what_is_observed_and_forgets_within_a_hundred_observations() -> None:
    gains = GainModel()
    cell = gains.continued_match_cells()[2]
    for _ in range(1000):
        gains.observe(cell, True)
    assert gains.rates[cell] > 0.95
    for _ in range(100):
        gains.observe(cell, False)
    assert gains.rates[cell] < 0.05


def test_cells_of_other_features_are_not_touched() -> None:
    gains = GainModel()
    before = list(gains.rates)
    cell = gains.ngram_cell(frequency=3, share=0.5, depth=1)
    gains.observe(cell, True)
    assert [i for i, rate in enumerate(gains.rates) if rate != before[i]] == [cell]


def test_every_feature_has_a_cell_of_its_own() -> None:
    gains = GainModel()
    cells = {gains.continued_match_cells()[length] for length in (1, 128)}
    for alternative in (False, True):
        cells |= {gains.match_cell(2, s, alternative) for s in (0.0, 0.1, 0.5, 1.0)}
    for depth in (1, 2, 3):
        cells |= {gains.ngram_cell(f, s, depth) for f in (1, 2, 4, 9) for s in (0.01, 0.5, 1.0)}
        for source in (Source.SELF, Source.HEADS, Source.FREE_HEADS):
            cells |= {gains.head_cell(source, p, depth) for p in (0.0, 0.3, 1.0)}
    assert len(cells) == 2 + 8 + 3 * 12 + 9 * 3


def test_the_draft_pass_is_trusted_more_than_heads() -> None:
    gains = GainModel()
    self_rate = gains.rates[gains.head_cell(Source.SELF, 0.9, 1)]
    assert self_rate > gains.rates[gains.head_cell(Source.HEADS, 0.9, 2)]


def test_a_match_that_the_ngrams_support_is_trusted_more() -> None:
    gains = GainModel()
    rates = [gains.rates[gains.match_cell(3, s, False)] for s in (0.0, 0.1, 0.5, 1.0)]
    assert rates == sorted(rates)
    assert gains.rates[gains.match_cell(3, 0.5, True)] < rates[2]
