"""What passes say is compared with what came, as far as that is known, by the blocks' age."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_tokenswift.draft.acceptance import new_cells
from vllm_tokenswift.draft.gumbel_noise import SPLITMIX, GumbelNoise
from vllm_tokenswift.draft.planner.self_draft_acceptance import SelfDraftAcceptance, SelfDraftPath


def path_of(tokens: list[int], age: int = 1) -> SelfDraftPath:
    return SelfDraftPath(tokens, [0.9] * len(tokens), [age + depth for depth in range(len(tokens))])


def follow_and_see(
    acceptance: SelfDraftAcceptance, tokens: list[int], came: list[int], age: int = 1
) -> None:
    acceptance.note_path(path_of(tokens, age))
    acceptance.observe_tokens(came)


def test_a_path_follows_the_likeliest_token_and_its_chance_falls_on_the_way() -> None:
    path, cells = SelfDraftPath(), new_cells()
    assert path.follow([7, 8], [0.6, 0.3], 4, cells, None) == 0
    assert path.follow([9, 5], [0.3, 0.6], 5, cells, None) == 1
    assert (path.tokens, path.ages) == ([7, 5], [4, 5])
    assert path.reach[0] == pytest.approx(0.95 * 0.6)
    assert path.reach[1] == pytest.approx((0.95 * 0.6) ** 2)


def test_a_path_follows_the_token_that_the_noise_will_draw() -> None:
    gumbel_noise = GumbelNoise(
        SPLITMIX, lambda positions: np.arange(5, 5 + positions, dtype=np.uint64)
    )
    path, cells = SelfDraftPath(), new_cells()
    for depth in (0, 1):
        # The likelier token has bad luck at this position, the other good luck.
        by_noise = sorted(range(100), key=lambda token, d=depth: gumbel_noise.noise(d, token))
        assert path.follow([by_noise[-1], by_noise[0]], [0.6, 0.3], 1, cells, gumbel_noise) == 1


def test_rates_are_learned_as_far_as_tokens_are_known() -> None:
    acceptance = SelfDraftAcceptance()
    for _ in range(300):
        follow_and_see(acceptance, [1, 2, 3], [1, 9])  # the third is not known to be right or wrong
    assert acceptance.first_rate(1) > 0.99
    assert acceptance.further_rate(1) < 0.03
    assert acceptance.after == 0.0


def test_tokens_of_further_passes_are_told_from_the_first_one_s() -> None:
    acceptance = SelfDraftAcceptance()
    for path, came, further in (
        ([1], [1, 9], 0),
        ([1, 2, 3], [9], 0),
        ([1, 2, 3], [1, 9], 0),
        ([1, 2, 3], [1, 2, 9], 1),
        ([1, 2, 3], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2, 3, 4, 9], 2),
    ):
        acceptance.note_path(path_of(path))
        assert acceptance.observe_tokens(came) == further
    assert acceptance.observe_tokens([1, 2, 3]) == 0  # no pass


def test_a_further_pass_is_trusted_like_the_first_until_it_is_known() -> None:
    acceptance = SelfDraftAcceptance()
    for _ in range(50):
        follow_and_see(acceptance, [1], [2])
    assert acceptance.further_rate(1) == pytest.approx(acceptance.first_rate(1))
    assert acceptance.first_rate(1) < 0.1


def test_what_further_passes_said_is_forgotten_while_there_are_none() -> None:
    acceptance = SelfDraftAcceptance()
    for _ in range(20):
        follow_and_see(acceptance, [1, 2], [1, 9])
    assert acceptance.further_rate(1) < 0.2
    for _ in range(800):
        follow_and_see(acceptance, [1], [1, 9])
    assert acceptance.further_rate(1) > 0.9


def test_old_blocks_are_taken_to_be_as_good_as_younger_ones_until_known() -> None:
    acceptance = SelfDraftAcceptance()
    for _ in range(100):
        follow_and_see(acceptance, [1], [2], age=10)
    assert acceptance.first_rate(1000) == pytest.approx(acceptance.first_rate(10))
    assert acceptance.first_rate(0) == pytest.approx(0.9)


def test_tokens_are_lost_from_the_selection_on_and_no_longer() -> None:
    acceptance = SelfDraftAcceptance()
    for _ in range(60):
        follow_and_see(acceptance, [1], [1], age=5)
        follow_and_see(acceptance, [1], [2], age=50)
    follow_and_see(acceptance, [1], [1], age=0)
    assert acceptance.lost == 0.0
    for count in range(1, 5):
        follow_and_see(acceptance, [1], [2], age=50)
        assert acceptance.lost == pytest.approx(count, rel=0.05)
    follow_and_see(acceptance, [1], [1], age=0)  # selected again
    assert acceptance.lost == 0.0


def test_a_difference_within_its_error_is_no_loss() -> None:
    acceptance = SelfDraftAcceptance()
    for number in range(20):
        follow_and_see(acceptance, [1], [1 if number % 10 else 2], age=5)
        follow_and_see(acceptance, [1], [1 if number % 7 else 2], age=50)
    for _ in range(100):
        acceptance.note_path(SelfDraftPath([1], [0.9], [50]))
    assert acceptance.lost == 0.0
