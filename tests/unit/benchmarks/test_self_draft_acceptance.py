"""What the benchmark of self-draft passes counts, and the options that leave nothing else."""

from __future__ import annotations

import pytest

from benchmarks.self_draft_acceptance import engines, self_draft_counts, source_code, table
from vllm_tokenswift.metrics import Stats
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.tree import DraftTree, Source


def stats(drafts: int, accepted: int, passes: int) -> dict:
    counted = Stats(num_draft_passes=passes)
    for number in range(drafts):
        tree = DraftTree.chain([7], Source.SELF)
        counted.count_iteration(tree, [1] if number < accepted else [], 1 + (number < accepted))
    return counted.as_dict()


def test_counters_of_a_request_are_what_has_grown() -> None:
    counts = self_draft_counts(stats(2, 1, 2), stats(7, 5, 8))
    assert counts == {
        "iterations": 5,
        "passes": 6,
        "selections": 0,
        "drafted": 5,
        "accepted": 4,
    }


def test_a_drafter_that_has_not_drafted_yet_counts_from_nothing() -> None:
    assert self_draft_counts(Stats().as_dict(), stats(3, 3, 3))["accepted"] == 3


@pytest.mark.parametrize("place", [0, 1])
def test_nothing_but_passes_drafts(place: int) -> None:
    given = dict(engines(512)[place][1]["speculative_config"])
    options = TokenSwiftOptions.from_dict(given)
    assert (options.plan, options.self_draft) == ("fixed", "always")
    assert (options.heads, options.ngram_k, options.suffix_max_match) == (None, 0, 0)


def test_the_context_is_long_enough_for_long_contexts() -> None:
    assert len(source_code()) > 200_000  # characters


def test_a_row_says_what_share_was_accepted() -> None:
    rows = [
        {"reads": "full", "context": 9, "passes": 4, "selections": 0, "drafted": 4, "accepted": 3},
        {"reads": "full", "context": 9, "passes": 0, "selections": 0, "drafted": 0, "accepted": 0},
    ]
    shares = [line.rstrip(" |").rpartition(" ")[2] for line in table(rows).splitlines()[-2:]]
    assert shares == ["0.750", "-"]
