"""What is read off the times at which tokens came."""

from __future__ import annotations

import pytest

from vllm_tokenswift.demo.texts import Written, WrittenBatch


def test_a_text_s_first_token_is_the_prompt_s_and_not_counted() -> None:
    text = Written("a", [0] * 5, [1, 3, 5], [2.0, 2.5, 3.0])
    assert text.tokens_per_second == pytest.approx(4.0)


def test_a_batch_is_timed_from_its_last_first_token_to_its_last_token() -> None:
    early = Written("a", [0] * 6, [1, 2, 6], [1.0, 2.0, 3.0])
    late = Written("b", [0] * 5, [1, 5], [2.0, 4.0])
    # At 2.0 there are 2 + 1 tokens, at 4.0 there are 11.
    assert WrittenBatch("both", [early, late]).tokens_per_second == pytest.approx(8 / 2.0)
