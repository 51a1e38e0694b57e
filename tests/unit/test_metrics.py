"""Counters of what was drafted and accepted, by source."""

from vllm_tokenswift.metrics import Stats
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree, Source

TREE = DraftTree.build([1, 2, 3], [0, 1, 0], [Source.SUFFIX] * 2 + [Source.NGRAM])


def test_counters_tell_what_was_drafted_and_accepted() -> None:
    stats = Stats()
    stats.count_iteration(TREE, [1], 2)
    assert stats.drafted_by_source == {"suffix": 2, "ngram": 1}
    assert stats.accepted_by_source == {"suffix": 1}
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 1)


def test_a_plain_step_is_an_iteration_that_drafted_nothing() -> None:
    stats = Stats()
    stats.count_iteration(EMPTY_TREE, [], 1)
    stats.count_iteration(TREE, [1, 2], 3)
    assert (stats.num_iterations, stats.num_drafting_iterations) == (2, 1)
    assert stats.num_emitted_tokens == 4
    assert stats.drafted_by_source == {"suffix": 2, "ngram": 1}


def test_what_is_handed_out_does_not_change_later() -> None:
    stats = Stats()
    stats.count_iteration(TREE, [1], 2)
    before = stats.as_dict()
    stats.count_iteration(TREE, [1], 2)
    assert before["drafted_by_source"] == {"suffix": 2, "ngram": 1}
