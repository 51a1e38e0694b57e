"""Acceptance learned per cell."""

import pytest

from vllm_tokenswift.draft.acceptance import (
    RATE,
    continued_match_cell,
    head_cell,
    match_cell,
    new_cells,
    ngram_cell,
    observe_candidate,
)
from vllm_tokenswift.tree import Source


def test_longer_matches_are_trusted_more_from_the_start() -> None:
    cells = new_cells()
    rates = [cells[continued_match_cell(length), RATE] for length in range(1, 200)]
    assert rates == sorted(rates)
    assert rates[0] < 0.5 < rates[-1]


@pytest.mark.parametrize(("length", "accepted"), [(2, 1.2), (3, 4.4), (5, 7.4), (8, 12.3)])
def test_priors_give_the_measured_accepted_lengths(length: int, accepted: float) -> None:
    cells = new_cells()
    expected, path = 0.0, 1.0
    for depth in range(200):
        path *= cells[continued_match_cell(length + depth), RATE]
        expected += path
    assert expected == pytest.approx(accepted, rel=0.25)


def test_matches_of_sampled_text_are_trusted_less_until_they_prove_themselves() -> None:
    likeliest, sampled = new_cells(), new_cells(sampled=True)
    cell = continued_match_cell(5)
    assert sampled[cell, RATE] < 0.75 * likeliest[cell, RATE]
    for _ in range(12):
        observe_candidate(sampled, cell, True)
    assert sampled[cell, RATE] > likeliest[cell, RATE]
    ngram = ngram_cell(3, 0.5, 1)
    assert sampled[ngram, RATE] == likeliest[ngram, RATE]


def test_a_cell_follows_what_is_observed_and_forgets_within_a_hundred_observations() -> None:
    cells = new_cells()
    cell = continued_match_cell(2)
    for _ in range(1000):
        observe_candidate(cells, cell, True)
    assert cells[cell, RATE] > 0.95
    for _ in range(100):
        observe_candidate(cells, cell, False)
    assert cells[cell, RATE] < 0.05


def test_cells_of_other_features_are_not_touched() -> None:
    cells = new_cells()
    before = cells[:, RATE].tolist()
    cell = ngram_cell(3, 0.5, 1)
    observe_candidate(cells, cell, True)
    assert [i for i, rate in enumerate(cells[:, RATE]) if rate != before[i]] == [cell]


def test_every_feature_has_a_cell_of_its_own() -> None:
    cells = {continued_match_cell(length) for length in (1, 128)}
    for alternative in (False, True):
        cells |= {match_cell(2, s, alternative) for s in (0.0, 0.1, 0.5, 1.0)}
    for depth in (1, 2, 3):
        cells |= {ngram_cell(f, s, depth) for f in (1, 2, 4, 9) for s in (0.01, 0.5, 1.0)}
        for source in (Source.SELF, Source.HEADS, Source.FREE_HEADS):
            cells |= {head_cell(int(source), p, depth) for p in (0.0, 0.3, 1.0)}
    assert len(cells) == 2 + 8 + 3 * 12 + 9 * 3
    assert max(cells) < len(new_cells())


def test_the_draft_pass_is_trusted_more_than_heads() -> None:
    cells = new_cells()
    self_rate = cells[head_cell(int(Source.SELF), 0.9, 1), RATE]
    assert self_rate > cells[head_cell(int(Source.HEADS), 0.9, 2), RATE]


def test_a_match_that_the_ngrams_support_is_trusted_more() -> None:
    cells = new_cells()
    rates = [cells[match_cell(3, s, False), RATE] for s in (0.0, 0.1, 0.5, 1.0)]
    assert rates == sorted(rates)
    assert cells[match_cell(3, 0.5, True), RATE] < rates[2]
