"""One request's drafting state: what it offers and how it learns."""

import random

import numpy as np

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.proposals.ngram_table import NgramTable
from vllm_tokenswift.draft.proposals.suffix_index import SuffixIndex
from vllm_tokenswift.tree import DraftTree, Source


def drafted(state: DraftState, limit: int, heads: HeadProposals | None = None) -> DraftTree:
    return state.tree(state.draft(heads, limit))


def test_the_text_so_far_continues_itself() -> None:
    state = DraftState()
    state.extend([1, 2, 3, 4, 5, 1, 2])
    assert drafted(state, 3).tokens.tolist() == [3, 4, 5]


def test_offers_are_at_most_as_deep_as_allowed() -> None:
    state = DraftState()
    state.extend([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3])
    for depth in (1, 2, 5):
        assert max(drafted(state, depth).depths) == depth
        assert state.longest_offer([4, 5, 6, 7, 8][:depth]) == depth
    assert len(drafted(state, 0)) == 0


def chance(state: DraftState) -> float:
    return float(drafted(state, 1).probabilities[0])


def test_acceptance_is_learned_without_drafting() -> None:
    rng = random.Random(0)
    passage = [rng.randrange(1000) for _ in range(30)]
    looping = DraftState()
    looping.extend(passage * 3)
    before = chance(looping)
    for token in passage * 3:
        chance(looping)
        looping.extend([token])
    assert before < chance(looping) > 0.97

    digits = DraftState()
    digits.extend([rng.randrange(10) for _ in range(200)])
    chances = []
    for _ in range(300):
        chances.append(chance(digits))
        digits.extend([rng.randrange(10)])
    assert sum(chances[:50]) / 50 > 0.15
    assert sum(chances[-100:]) / 100 < 0.2


def test_what_was_offered_before_a_skipped_step_does_not_matter() -> None:
    once, twice = DraftState(), DraftState()
    for state in (once, twice):
        state.extend([1, 2, 3, 1, 2])
        state.draft(None, 4)
    twice.draft(None, 4)
    for state in (once, twice):
        state.extend([3, 1])
    assert (once.cells == twice.cells).all()
    assert (once.cells != DraftState().cells).any()


def test_heads_are_continued_by_the_text_after_their_first_token() -> None:
    state = DraftState()
    state.extend([1, 7, 8, 9, 2])
    heads = HeadProposals([[7], [50]], [[0.9], [0.1]], free=False)
    tree = drafted(state, 20, heads)
    first = tree.children[0][7]
    below = tree.children[first]
    assert Source(int(tree.sources[first - 1])) is Source.SELF
    assert {8, 50} <= set(below)


def test_heads_on_a_text_that_offers_nothing() -> None:
    state = DraftState()
    state.extend([1])
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
        state.extend(text)
        tree = drafted(state, 3)
        assert set(tree.sources.tolist()) == expected


def test_the_callers_list_is_not_kept() -> None:
    tokens = [1, 2, 3, 1]
    state = DraftState()
    state.extend(tokens)
    tokens[:] = [9, 9, 9, 9]
    assert drafted(state, 1).tokens.tolist() == [2]


def test_extending_by_nothing_changes_nothing() -> None:
    state = DraftState()
    state.extend([1, 2, 1])
    before = drafted(state, 2).tokens.tolist()
    state.extend([])
    assert drafted(state, 2).tokens.tolist() == before


def phrases(num: int) -> list[list[int]]:
    """Of a vocabulary of 200 tokens, from twelve of them in random order."""
    rng = random.Random(2)
    known = [[rng.randrange(200) for _ in range(rng.randrange(1, 7))] for _ in range(12)]
    return [rng.choice(known) for _ in range(num)]


def test_tokens_that_came_unlooked_at_are_in_the_indexes_at_the_next_look() -> None:
    rng = random.Random(3)
    state, suffix, table = DraftState(), SuffixIndex(16), NgramTable()
    looks = 0
    for tokens in phrases(400):
        state.extend(tokens)
        suffix.extend(np.array(tokens, np.int32))
        table.extend(np.array(tokens, np.int32))
        if rng.random() < 0.3:
            looks += state.draft(None, 8) > 0
            num_ngrams, length = table.counts[0], state.num_tokens
            for kept, expected in (
                (state.table.counts, table.counts),
                (state.table.ngrams[:num_ngrams], table.ngrams[:num_ngrams]),
                (state.table.firsts, table.firsts),
                (state.suffix.counts, suffix.counts),
                (state.suffix.text[: length + 1], suffix.text[: length + 1]),
                (state.suffix.edges, suffix.edges),
            ):
                np.testing.assert_array_equal(kept, expected)
    assert looks > 80


def test_a_text_is_continued_the_same_however_it_came() -> None:
    one_by_one, at_once = DraftState(), DraftState()
    text = [token for phrase in phrases(300) for token in phrase]
    for token in text:
        one_by_one.extend([token])
    at_once.extend(text)
    trees = [drafted(state, 12) for state in (one_by_one, at_once)]
    assert len(trees[0]) > 0
    assert trees[0].tokens.tolist() == trees[1].tokens.tolist()
    assert trees[0].probabilities.tolist() == trees[1].probabilities.tolist()
    for state in (one_by_one, at_once):
        state.extend(text[-3:])
    assert (one_by_one.cells == at_once.cells).all()
