"""Which tree a scheduled list of drafts is."""

from __future__ import annotations

import numpy as np

from vllm_tokenswift.engine.drafted_trees import DraftedTrees
from vllm_tokenswift.engine.step_trees import NO_TREES, StepTrees
from vllm_tokenswift.tree import DraftTree

TREE = DraftTree.build([4, 5, 6], [0, 0, 1])


def scheduled(
    drafted: DraftedTrees, drafts: dict[str, list[int]], rows: dict[str, int]
) -> StepTrees:
    """A step in which each request has ten tokens computed before its rows."""
    num_rows = np.array(list(rows.values()), np.int32)
    return drafted.take_scheduled(drafts, list(rows), num_rows, np.full(len(rows), 10, np.int32))


def drafted_for(*req_ids: str) -> DraftedTrees:
    drafted = DraftedTrees({"a", "b"})
    drafted.expect(dict.fromkeys(req_ids, TREE))
    return drafted


def test_a_tree_comes_back_once_with_the_tokens_that_it_was_drafted_with() -> None:
    drafted = drafted_for("b")
    [rows] = scheduled(drafted, {"b": [4, 5, 6]}, {"a": 1, "b": 4}).trees
    assert rows.tree == TREE
    assert (rows.batch_row, rows.query_start, rows.root_row, rows.root_position) == (1, 1, 1, 10)
    [again] = scheduled(drafted, {"b": [4, 5, 6]}, {"a": 1, "b": 4}).trees
    assert again.tree.is_chain


def test_a_list_that_was_cut_short_is_the_tree_s_beginning() -> None:
    [rows] = scheduled(drafted_for("a"), {"a": [4, 5]}, {"a": 3}).trees
    assert (rows.tree.tokens.tolist(), rows.tree.parents.tolist()) == ([4, 5], [0, 0])


def test_other_tokens_are_a_chain() -> None:
    [rows] = scheduled(drafted_for("a"), {"a": [4, 9, 6]}, {"a": 4}).trees
    assert rows.tree.tokens.tolist() == [4, 9, 6]
    assert rows.tree.is_chain


def test_drafts_are_the_last_rows_of_a_request_that_catches_up() -> None:
    [rows] = scheduled(drafted_for("a"), {"a": [4, 5, 6]}, {"a": 9}).trees
    assert (rows.query_start, rows.root_row, rows.root_position) == (0, 5, 15)


def test_trees_of_requests_that_are_gone_are_forgotten() -> None:
    drafted = drafted_for("a", "nobody")
    drafted.forget("a")
    drafted.forget("nobody")
    drafts = {"a": [4, 5, 6], "nobody": [4, 5, 6]}
    rows, other = scheduled(drafted, drafts, {"a": 4, "nobody": 4}).trees
    assert rows.tree.is_chain
    assert other.tree.is_chain


def test_a_step_without_drafts_leaves_them_for_another() -> None:
    drafted = drafted_for("a")
    assert scheduled(drafted, {}, {"a": 1}) is NO_TREES
    [rows] = scheduled(drafted, {"a": [4, 5, 6]}, {"a": 4}).trees
    assert rows.tree == TREE
