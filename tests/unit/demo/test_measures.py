from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tokenswift.demo.measures import Comparison, distinct, first_difference, table
from vllm_tokenswift.demo.plot import time_against_tokens
from vllm_tokenswift.demo.texts import Written

STATS = {
    "num_iterations": 10,
    "num_emitted_tokens": 25,
    "num_accepted_tokens": 16,
    "num_ngram_tokens": 8,
}


def comparison(ours: list[int]) -> Comparison:
    plain = Written("greedy", [1, 2, 1, 2], [1, 2, 3, 4], [1.0, 2.0, 3.0, 4.0])
    return Comparison(plain, Written("greedy", ours, [1, 4], [1.0, 2.0], dict(STATS)), 4)


def test_distinct_is_the_share_of_ngrams_that_differ() -> None:
    assert distinct([1, 2, 1, 2], 1) == 0.5
    assert distinct([1, 2, 1, 2], 2) == pytest.approx(2 / 3)
    assert distinct([1, 2], 3) == 0.0


def test_the_first_difference_may_be_an_end() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_rates_are_the_paper_s_and_speed_leaves_the_prompt_s_pass_out() -> None:
    compared = comparison([1, 2, 1, 2])
    assert compared.alpha == pytest.approx(16 / (4 * 10))
    assert compared.beta == pytest.approx(8 / (4 * 10))
    assert compared.tokens_per_iteration == 2.5
    assert compared.plain.tokens_per_second == 1.0
    assert compared.speed_up == 3.0


def test_the_table_says_where_texts_part() -> None:
    assert "yes" in table(comparison([1, 2, 1, 2])).splitlines()[-1]
    assert "up to token 2" in table(comparison([1, 2, 9, 2])).splitlines()[-1]


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    time_against_tokens([comparison([1, 2, 1, 2])] * 2, "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
