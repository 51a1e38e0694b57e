"""The draft block table says why it wants a selection, and how old the one it has is."""

from __future__ import annotations

import numpy as np

from vllm_tokenswift.partial_kv.table import DraftBlockTable, Due, Mode

BLOCK = 32


def table(mode: Mode = Mode.DYNAMIC, refresh_tokens: int | None = None) -> DraftBlockTable:
    return DraftBlockTable(mode, BLOCK, 8 * BLOCK, 16, refresh_tokens)


def select(made: DraftBlockTable, num_tokens: int, seed: int = 0) -> None:
    blocks = -(-num_tokens // BLOCK)
    masses = np.random.default_rng(seed).random((2, blocks), dtype=np.float32)
    made.select(masses, num_tokens)


def test_blocks_are_due_first_then_when_used_up_and_the_age_is_counted_from_there() -> None:
    made = table()
    assert made.due(100) is None  # within the budget
    assert made.due(1000) is Due.FIRST
    assert made.age(1000) == 0
    select(made, 1000)
    assert made.due(1001) is None
    assert made.age(1001) == 1
    used_up = next(n for n in range(1001, 2000) if made.due(n) is Due.USED_UP)
    assert made.age(used_up) == used_up - 1000
    select(made, used_up)
    assert made.age(used_up) == 0
    made.forget()
    assert made.due(used_up) is Due.FIRST
    assert made.age(used_up) == 0


def test_an_interval_is_kept_and_nobody_else_renews_the_selection() -> None:
    made = table(refresh_tokens=10)
    select(made, 1000)
    assert made.due(1009) is None
    assert made.due(1010) is Due.INTERVAL
    assert not made.may_be_early
    assert not table(Mode.STATIC).may_be_early
    assert not table(Mode.FULL).may_be_early
    assert table().may_be_early


def test_the_blocks_of_a_pass_are_those_of_the_newest_selection() -> None:
    made = table()
    select(made, 1000, seed=1)
    before = made.blocks(1001, 2)
    select(made, 1000, seed=2)
    assert (made.blocks(1001, 2) != before).any()
    for num_tokens in range(1001, 1100):
        once_made = table()
        select(once_made, 1000, seed=2)
        np.testing.assert_array_equal(made.blocks(num_tokens, 2), once_made.blocks(num_tokens, 2))
    made.forget()
    assert made.blocks(1001, 2).shape == (2, 32)
