"""The n-gram table against counting from scratch."""

import random
from collections import Counter

import numpy as np
import pytest

from vllm_tokenswift.draft.proposals.ngram_table import Ngrams, NgramTable, times_first


def brute_force(text: list[int], n: int, k: int, first: int) -> list[tuple[tuple[int, ...], int]]:
    counts: Counter[tuple[int, ...]] = Counter()
    newest: dict[tuple[int, ...], int] = {}
    for start in range(len(text) - n + 1):
        if text[start] == first:
            tail = tuple(text[start + 1 : start + n])
            counts[tail] += 1
            newest[tail] = start
    ranked = sorted(counts, key=lambda tail: (-counts[tail], -newest[tail]))
    return [(tail, counts[tail]) for tail in ranked[:k]]


def extended(table: NgramTable, text: list[int]) -> NgramTable:
    table.append_tokens(np.array(text, np.int32))
    return table


def total(table: NgramTable, first: int) -> int:
    return times_first(Ngrams(*table.arrays).firsts, first)


@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize("vocabulary", [2, 5, 300])
def test_lookups_equal_counting_from_scratch_at_every_length(n: int, vocabulary: int) -> None:
    rng = random.Random(n * 1000 + vocabulary)
    text = [rng.randrange(vocabulary) for _ in range(400)]
    table = NgramTable(n, k=5)
    done = 0
    while done < len(text):
        step = rng.randrange(1, 8)
        extended(table, text[done : done + step])
        done = min(done + step, len(text))
        first = rng.choice(text[:done])
        assert table.lookup(first) == brute_force(text[:done], n, 5, first)
        assert total(table, first) == text[: max(done - n + 1, 0)].count(first)


def test_the_newest_tokens_are_included() -> None:
    table = NgramTable(n=4, k=20)
    extended(table, [1, 2, 3, 4])
    assert table.lookup(1) == [((2, 3, 4), 1)]


def test_an_ngram_that_fell_out_of_the_ranking_comes_back_with_its_count() -> None:
    table = NgramTable(n=2, k=1)
    extended(table, [1, 2, 1, 3, 1, 3, 1, 2, 1, 2])
    assert table.lookup(1) == [((2,), 3)]


@pytest.mark.parametrize("k", [1, 2, 20])
def test_a_long_text_appended_at_once_is_counted_as_one_token_after_another(k: int) -> None:
    rng = random.Random(k)
    text = [rng.randrange(3000) if rng.random() < 0.5 else rng.randrange(4) for _ in range(20_000)]
    table = extended(NgramTable(n=3, k=k), text)
    for first in (*range(4), *text[:20], *text[-20:], 3000):
        assert table.lookup(first) == brute_force(text, 3, k, first)


def test_k_zero_switches_the_table_off() -> None:
    table = NgramTable(k=0)
    extended(table, [1, 2, 3, 4, 1, 2, 3, 4])
    assert table.lookup(1) == []


@pytest.mark.parametrize(("n", "k", "word"), [(1, 20, "n must"), (4, -1, "k must")])
def test_senseless_sizes_are_refused(n: int, k: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        NgramTable(n, k)
