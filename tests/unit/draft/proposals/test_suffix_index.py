"""The suffix index against a search from scratch."""

import random

import numpy as np
import pytest

from vllm_tokenswift.draft.proposals.suffix_index import (
    Match,
    Suffixes,
    SuffixIndex,
    continuation,
    find_matches,
)


def longest_match(text: list[int], max_match: int) -> tuple[int, int] | None:
    """(length, start of the continuation) by trying every earlier end, the newest first."""
    best = None
    for end in range(len(text) - 1, 0, -1):
        length = 0
        while length < min(end, max_match) and text[end - 1 - length] == text[-1 - length]:
            length += 1
        if length and (best is None or length > best[0]):
            best = (length, end)
    return best


def index_of(text: list[int], max_match: int = 16) -> SuffixIndex:
    index = SuffixIndex(max_match)
    index.append_tokens(np.array(text, np.int32))
    return index


def texts() -> list[list[int]]:
    rng = random.Random(5)
    loop = [rng.randrange(50) for _ in range(13)]
    noisy: list[int] = []
    while len(noisy) < 300:
        noisy += [rng.randrange(50) if rng.random() < 0.08 else token for token in loop]
    return [
        [rng.randrange(2) for _ in range(300)],
        [rng.randrange(6) for _ in range(300)],
        [rng.randrange(1000) for _ in range(300)],
        [7] * 100,
        [0, 1] * 60,
        loop * 20,
        noisy,
    ]


@pytest.mark.parametrize("max_match", [1, 3, 16])
@pytest.mark.parametrize("text", texts())
def test_the_longest_most_recent_match_is_found(text: list[int], max_match: int) -> None:
    index = SuffixIndex(max_match)
    for done in range(1, len(text) + 1):
        index.append_tokens(np.array(text[done - 1 : done], np.int32))
        found = index.match()
        expected = longest_match(text[:done], max_match)
        if expected is None:
            assert found == []
        else:
            assert (min(found[0].length, max_match), found[0].start) == expected


@pytest.mark.parametrize("text", texts())
def test_matching_after_a_token_equals_appending_it(text: list[int]) -> None:
    rng = random.Random(1)
    for done in range(1, len(text), 17):
        token = rng.choice(text)
        if token == text[done - 1]:
            continue
        index, appended = index_of(text[:done]), index_of([*text[:done], token])
        before = index.match(3)
        suffixes = Suffixes(*index.arrays)
        suffixes.text[done + 1] = token  # behind the text
        found = find_matches(suffixes, done + 1, 3)
        assert [Match(*match) for match in found.tolist()] == appended.match(3)
        for match in appended.match(3):
            assert (
                continuation(suffixes.text, done + 1, match.start, 20).tolist()
                == appended.continuation(match, 20)
                == continued([*text[:done], token], match, 20)
            )
        assert index.match(3) == before
        assert len(index) == done


def continued(text: list[int], match: Match, length: int) -> list[int]:
    """Token after token: what followed the match, and then what was written that way."""
    written = list(text)
    for index in range(length):
        written.append(written[match.start + index])
    return written[len(text) :]


def test_all_matches_are_true_occurrences_with_different_continuations() -> None:
    for text in texts():
        index = index_of(text)
        matches = index.match(5)
        followers = [text[match.start] for match in matches]
        assert len(set(followers)) == len(followers)
        for match in matches:
            occurrence = text[match.start - match.length : match.start]
            assert occurrence == text[len(text) - match.length :]


def test_a_long_match_is_measured_beyond_the_exact_length() -> None:
    rng = random.Random(0)
    passage = [rng.randrange(1000) for _ in range(90)]
    index = index_of([*passage, 5000, *passage])
    assert index.match() == [Match(90, 90)]


def test_a_loop_is_continued_past_the_end_of_the_text() -> None:
    index = index_of([9, 9, 1, 2, 3, 1, 2, 3, 1])
    (match,) = index.match()
    assert index.continuation(match, 8) == [2, 3, 1, 2, 3, 1, 2, 3]


def test_a_single_repeated_token_is_continued() -> None:
    index = index_of([4, 4])
    assert index.continuation(index.match()[0], 5) == [4] * 5


def test_memory_is_linear_in_the_text() -> None:
    rng = random.Random(2)
    text = [rng.randrange(40) for _ in range(5000)]
    index = index_of(text, 16)
    assert index.num_edges <= 2 * len(text)
    assert len(Suffixes(*index.arrays).edges) <= 8 * len(text)


def test_a_match_of_no_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_match"):
        SuffixIndex(0)


def test_an_index_that_is_off_keeps_no_text_and_finds_nothing() -> None:
    index = SuffixIndex.off()
    index.append_tokens(np.array([1, 2, 3, 1, 2], np.int32))
    assert (len(index), index.num_edges, index.match(3)) == (0, 0, [])
