"""One request's drafting state: what it proposes and how it learns."""

import random

import numpy as np

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.proposals.ngram_table import Ngrams, NgramTable
from vllm_tokenswift.draft.proposals.suffix_index import Suffixes, SuffixIndex
from vllm_tokenswift.tree import DraftTree, Source


def drafted(state: DraftState, limit: int, heads: HeadProposals | None = None) -> DraftTree:
    nodes = state.draft(heads, limit)
    return nodes.tree(nodes.count)


def test_the_text_so_far_continues_itself() -> None:
    state = DraftState()
    state.append_tokens([1, 2, 3, 4, 5, 1, 2])
    assert drafted(state, 3).tokens.tolist() == [3, 4, 5]


def test_proposals_are_at_most_as_deep_as_allowed() -> None:
    state = DraftState()
    state.append_tokens([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    for depth in (1, 2, 5):
        assert max(drafted(state, depth).depths) == depth
        assert state.longest_proposal([4, 5, 6, 7, 8][:depth]) == depth
    assert len(drafted(state, 0)) == 0


def chance(state: DraftState) -> float:
    return float(drafted(state, 1).probabilities[0])


def test_acceptance_is_learned_without_drafting() -> None:
    rng = random.Random(0)
    passage = [rng.randrange(1000) for _ in range(30)]
    looping = DraftState()
    looping.append_tokens(passage * 3)
    before = chance(looping)
    for token in passage * 3:
        chance(looping)
        looping.append_tokens([token])
    assert before < chance(looping) > 0.97

    digits = DraftState()
    digits.append_tokens([rng.randrange(10) for _ in range(200)])
    chances = []
    for _ in range(300):
        chances.append(chance(digits))
        digits.append_tokens([rng.randrange(10)])
    assert sum(chances[:50]) / 50 > 0.15
    assert sum(chances[-100:]) / 100 < 0.2


def test_what_was_proposed_before_a_skipped_step_does_not_matter() -> None:
    once, twice = DraftState(), DraftState()
    for state in (once, twice):
        state.append_tokens([1, 2, 3, 1, 2])
        state.draft(None, 4)
    twice.draft(None, 4)
    for state in (once, twice):
        state.append_tokens([3, 1])
    assert (once.cells == twice.cells).all()
    assert (once.cells != DraftState().cells).any()


def test_heads_are_continued_by_the_text_after_their_first_token() -> None:
    state = DraftState()
    state.append_tokens([1, 7, 8, 9, 2])
    heads = HeadProposals([[7], [50]], [[0.9], [0.1]], free=False)
    tree = drafted(state, 20, heads)
    first = tree.children[0][7]
    below = tree.children[first]
    assert Source(int(tree.sources[first - 1])) is Source.SELF
    assert {8, 50} <= set(below)


def test_heads_on_a_text_that_proposes_nothing() -> None:
    state = DraftState()
    state.append_tokens([1])
    heads = HeadProposals([[7, 8], [9]], [[0.6, 0.2], [0.3]], free=True)
    tree = drafted(state, 3, heads)
    assert tree.children[0].keys() == {7, 8}


def test_sources_can_be_switched_off() -> None:
    text = [1, 2, 3, 4, 1, 2, 3, 4, 1]
    for state, expected in (
        (DraftState(k=0), {Source.SUFFIX}),
        (DraftState(max_match=0), {Source.NGRAM}),
        (DraftState(k=0, max_match=0), set()),
    ):
        state.append_tokens(text)
        tree = drafted(state, 3)
        assert set(tree.sources.tolist()) == expected


def test_the_callers_list_is_not_kept() -> None:
    tokens = [1, 2, 3, 1]
    state = DraftState()
    state.append_tokens(tokens)
    tokens[:] = [9, 9, 9, 9]
    assert drafted(state, 1).tokens.tolist() == [2]


def test_appending_nothing_changes_nothing() -> None:
    state = DraftState()
    state.append_tokens([1, 2, 1])
    before = drafted(state, 2).tokens.tolist()
    state.append_tokens([])
    assert drafted(state, 2).tokens.tolist() == before


def phrases(num: int) -> list[list[int]]:
    """Of a vocabulary of 200 tokens, from twelve of them in random order."""
    rng = random.Random(2)
    known = [[rng.randrange(200) for _ in range(rng.randrange(1, 7))] for _ in range(12)]
    return [rng.choice(known) for _ in range(num)]


def test_tokens_that_came_without_an_attempt_are_in_the_indexes_at_the_next_one() -> None:
    rng = random.Random(3)
    state, suffix, ngrams = DraftState(), SuffixIndex(16), NgramTable()
    attempts = 0
    for tokens in phrases(400):
        state.append_tokens(tokens)
        suffix.append_tokens(np.array(tokens, np.int32))
        ngrams.append_tokens(np.array(tokens, np.int32))
        if rng.random() < 0.3:
            attempts += state.draft(None, 8).count > 0
            kept_suffixes, expected_suffixes = (
                Suffixes(*index.arrays) for index in (state.suffix, suffix)
            )
            kept_ngrams, expected_ngrams = (
                Ngrams(*index.arrays) for index in (state.ngrams, ngrams)
            )
            num_ngrams, length = expected_ngrams.counts[0], state.num_tokens
            for kept, expected in (
                (kept_ngrams.counts, expected_ngrams.counts),
                (kept_ngrams.ngrams[:num_ngrams], expected_ngrams.ngrams[:num_ngrams]),
                (kept_ngrams.firsts, expected_ngrams.firsts),
                (kept_suffixes.counts, expected_suffixes.counts),
                (kept_suffixes.text[: length + 1], expected_suffixes.text[: length + 1]),
                (kept_suffixes.edges, expected_suffixes.edges),
            ):
                np.testing.assert_array_equal(kept, expected)
    assert attempts > 80


def test_a_text_is_continued_the_same_however_it_came() -> None:
    one_by_one, at_once = DraftState(), DraftState()
    text = [token for phrase in phrases(300) for token in phrase]
    for token in text:
        one_by_one.append_tokens([token])
    at_once.append_tokens(text)
    trees = [drafted(state, 12) for state in (one_by_one, at_once)]
    assert len(trees[0]) > 0
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert trees[0].probabilities.tolist() == trees[1].probabilities.tolist()
    for state in (one_by_one, at_once):
        state.append_tokens(text[-3:])
    assert (one_by_one.cells == at_once.cells).all()
