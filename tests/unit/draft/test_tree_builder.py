"""Merging and cutting against building every path and sorting."""

import itertools
import math
import random

import numpy as np
import pytest

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.proposals.head_proposals import NO_ROW, HeadProposals
from vllm_tokenswift.draft.proposals.paper import paper_tree
from vllm_tokenswift.draft.proposals.table import (
    BELOW,
    CANDIDATE_COLUMNS,
    CELL,
    NO_CELL,
    NUM_BELOW,
    SOURCE,
    TOKEN,
)
from vllm_tokenswift.draft.tree_builder import DraftedNodes, drafted_nodes
from vllm_tokenswift.tree import DraftTree, Source

Rates = dict[tuple[int, ...], dict[int, float]]
"""Chances of the tokens below each prefix."""
Proposal = tuple[Source, Rates]


def random_proposal(rng: random.Random, source: Source) -> Proposal:
    rates: Rates = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(3):
        below = []
        for prefix in level:
            tokens = rng.sample(range(5), rng.randrange(1, 4))
            shares = [rng.random() for _ in tokens]
            rates[prefix] = {t: 0.95 * s / sum(shares) for t, s in zip(tokens, shares, strict=True)}
            below += [(*prefix, token) for token in tokens if rng.random() < 0.7]
        level = below
    return source, rates


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    return {(*prefix, token) for prefix, row in proposal[1].items() for token in row}


def grow_tree(proposals: list[Proposal], budget: int, chain_only: bool = False) -> DraftTree:
    """The ``budget`` likeliest nodes that the proposals hold, merged."""
    rows: list[list[int]] = []
    chances: list[float] = []
    roots: list[list[int]] = []
    for source, rates in proposals:
        first: dict[tuple[int, ...], int] = {}  # of each prefix's group
        for prefix, group in rates.items():
            first[prefix] = len(rows)
            for token, rate in group.items():
                row = [0] * CANDIDATE_COLUMNS
                row[TOKEN], row[SOURCE], row[CELL] = token, source, NO_CELL
                rows.append(row)
                chances.append(rate)
        for prefix, group in rates.items():
            for place, token in enumerate(group):
                if (below := (*prefix, token)) in rates:
                    row = rows[first[prefix] + place]
                    row[BELOW], row[NUM_BELOW] = first[below], len(rates[below])
        roots.append([first[()], len(rates[()])])
    counts = np.array([len(rows), len(roots), 0, 0], np.int32)
    table = np.array(rows, np.int32), np.array(chances), np.array(roots, np.int32), counts
    return tree_of(drafted_nodes(table, budget, chain_only=chain_only))


def tree_of(drafted: DraftedNodes) -> DraftTree:
    return drafted.tree(drafted.count)


def tree_paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {
        tuple(int(tree.tokens[i - 1]) for i in tree.path(node)): float(tree.probabilities[node - 1])
        for node in range(1, len(tree) + 1)
    }


@pytest.mark.parametrize("seed", range(20))
def test_only_proposed_paths_are_drafted_and_none_twice(seed: int) -> None:
    rng = random.Random(seed)
    proposals = [
        random_proposal(rng, source) for source in (Source.SELF, Source.NGRAM, Source.SUFFIX)
    ]
    tree = grow_tree(proposals, budget=1000)
    drafted = tree_paths(tree)
    assert len(drafted) == len(tree)
    assert set(drafted) == set.union(*map(paths, proposals))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("budget", [0, 1, 3, 8, 20])
def test_a_budget_keeps_the_likeliest_nodes(seed: int, budget: int) -> None:
    rng = random.Random(seed)
    proposals = [random_proposal(rng, source) for source in (Source.NGRAM, Source.SUFFIX)]
    everything = sorted(tree_paths(grow_tree(proposals, 1000)).values(), reverse=True)
    kept = sorted(tree_paths(grow_tree(proposals, budget)).values(), reverse=True)
    assert kept == everything[:budget]


@pytest.mark.parametrize("seed", range(10))
def test_one_source_is_taken_at_its_word(seed: int) -> None:
    proposal = random_proposal(random.Random(seed), Source.NGRAM)
    for path, probability in tree_paths(grow_tree([proposal], 1000)).items():
        expected = math.prod(proposal[1][path[:i]][path[i]] for i in range(len(path)))
        assert probability == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_children_never_promise_more_than_their_parent(seed: int) -> None:
    rng = random.Random(seed)
    tree = grow_tree([random_proposal(rng, source) for source in list(Source)[1:]], 1000)
    probability = [1.0, *tree.probabilities.tolist()]
    for node, children in enumerate(tree.children):
        total = sum(probability[child] for child in children.values())
        assert total <= probability[node] * 1.000001


def test_of_sources_that_agree_the_surest_counts() -> None:
    proposals: list[Proposal] = [
        (Source.NGRAM, {(): {1: 0.3, 2: 0.35}}),
        (Source.SUFFIX, {(): {1: 0.5}}),
    ]
    tree = grow_tree(proposals, 10)
    assert tree.tokens.tolist() == [1, 2]
    assert tree.probabilities.tolist() == pytest.approx([0.5, 0.35])
    assert tree.sources.tolist() == [Source.SUFFIX, Source.NGRAM]


def test_a_sure_candidate_is_not_pulled_down_by_unlikely_ones() -> None:
    proposals: list[Proposal] = [
        (Source.SUFFIX, {(): {1: 0.98}}),
        (Source.NGRAM, {(): {2: 0.4, 3: 0.4}}),
    ]
    assert grow_tree(proposals, 1).probabilities.tolist() == pytest.approx([0.98])


@pytest.mark.parametrize("seed", range(10))
def test_nodes_stand_depth_first_with_the_likeliest_child_first(seed: int) -> None:
    rng = random.Random(seed)
    tree = grow_tree([random_proposal(rng, s) for s in (Source.NGRAM, Source.SUFFIX)], 12)
    for children in tree.children:
        nodes = list(children.values())
        probabilities = [tree.probabilities[node - 1] for node in nodes]
        assert probabilities == sorted(probabilities, reverse=True)
    # Depth-first: a node's parent is its predecessor or one of that node's ancestors.
    for node in range(2, len(tree) + 1):
        assert tree.parents[node - 1] in [0, *tree.path(node - 1)]


@pytest.mark.parametrize("seed", range(10))
def test_a_chain_is_a_chain_of_likeliest_children(seed: int) -> None:
    rng = random.Random(seed)
    proposals = [random_proposal(rng, s) for s in (Source.NGRAM, Source.SUFFIX)]
    tree = grow_tree(proposals, 10, chain_only=True)
    assert tree.is_chain
    assert len(tree) >= 1
    assert tree.tokens[0] == grow_tree(proposals, 1).tokens[0]


def heads() -> HeadProposals:
    return HeadProposals(
        [[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42]],
        [[0.9, 0.05, 0.02], [0.3, 0.2, 0.1], [0.2, 0.15, 0.1], [0.2, 0.1, 0.05]],
        free=False,
    )


def state_of(text: list[int], **switches: int) -> DraftState:
    state = DraftState(**switches)
    state.append_tokens(text)
    return state


def test_the_paper_tree_is_the_cartesian_tree_and_the_ngrams_after_the_first_token() -> None:
    state = state_of([10, 20, 7, 8, 10, 20, 7, 9, 11, 1, 2, 3])
    tree = paper_tree_of(state, heads(), budget=1000)
    cartesian = {
        path[:depth]
        for path in itertools.product([10], [20, 21, 22], [30, 31, 32], [40, 41, 42])
        for depth in range(1, 5)
    }
    ngrams = {(10, 20, 7), (10, 20, 7, 8), (10, 20, 7, 9)}
    assert set(tree_paths(tree)) == cartesian | ngrams
    assert len(tree) == 40 + 3
    assert set(tree.sources.tolist()) == {Source.SELF, Source.HEADS, Source.NGRAM}


def test_the_paper_takes_chances_at_face_value_and_ngrams_add_up() -> None:
    """Four times (10, 1, 2, 3), twice (10, 1, 2, 4), twice (10, 5, 6, 7)."""
    text = [10, 1, 2, 3] * 4 + [10, 1, 2, 4] * 2 + [10, 5, 6, 7] * 2
    first = HeadProposals([[10]], [[0.9]], free=False)
    drafted = tree_paths(paper_tree_of(state_of(text), first, budget=1000))
    assert drafted[(10,)] == pytest.approx(0.9)
    assert drafted[(10, 1)] == pytest.approx(0.9 * 6 / 8)
    assert drafted[(10, 1, 2)] == pytest.approx(0.9 * 6 / 8)
    assert drafted[(10, 1, 2, 3)] == pytest.approx(0.9 * 4 / 8)
    assert drafted[(10, 5, 6, 7)] == pytest.approx(0.9 * 2 / 8)
    assert len(drafted) == 1 + 7


def test_the_paper_tree_cut_to_a_budget_keeps_its_likeliest_path() -> None:
    tree = paper_tree_of(DraftState(), heads(), budget=4)
    assert len(tree) == 4
    assert tree.tokens[:2].tolist() == [10, 20]


def paper_tree_of(state: DraftState, heads: HeadProposals, budget: int) -> DraftTree:
    state.index_text()
    return paper_tree(state.ngrams, state.cells, heads, budget)


def heads_tree(candidates: HeadProposals, limit: int = 100) -> DraftTree:
    """What is drafted where there are only heads."""
    state = state_of([1], k=0, max_match=0)
    return tree_of(state.draft(candidates, limit))


def test_heads_name_their_sources_by_depth() -> None:
    narrow = HeadProposals([[10], [20], [30], [40]], [[0.9], [0.3], [0.2], [0.2]], free=False)
    sources = heads_tree(narrow).sources.tolist()
    assert sources == [Source.SELF, Source.HEADS, Source.HEADS, Source.HEADS]
    free = HeadProposals([[1]], [[0.5]], free=True)
    assert heads_tree(free).sources.tolist() == [Source.FREE_HEADS]


def test_rows_of_heads_follow_only_the_tokens_they_were_asked_behind() -> None:
    along_paths = HeadProposals(
        [[1, 2, 3], [10, 11], [20, 21]],
        [[0.5, 0.3, 0.1], [0.6, 0.2], [0.4, 0.3]],
        free=True,
        below=[[1, NO_ROW, 2], [NO_ROW, NO_ROW], [NO_ROW, NO_ROW]],
    )
    expected = {(1,), (2,), (3,), (1, 10), (1, 11), (3, 20), (3, 21)}
    assert set(tree_paths(heads_tree(along_paths))) == expected


def test_heads_of_all_paths_form_every_combination() -> None:
    wide = HeadProposals([[1, 2], [3, 4, 5]], [[0.4, 0.4], [0.3, 0.3, 0.3]], free=True)
    combinations = {(a,) for a in (1, 2)} | set(itertools.product((1, 2), (3, 4, 5)))
    assert set(tree_paths(heads_tree(wide))) == combinations


def test_heads_of_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        HeadProposals([[1, 2]], [[0.5]], free=True)


def test_trees_hold_the_promised_types() -> None:
    tree = heads_tree(heads())
    assert tree.tokens.dtype == tree.parents.dtype == np.int32
    assert tree.sources.dtype == np.int8
    assert tree.probabilities.dtype == np.float32


def test_more_children_than_there_is_room_for_at_first_are_merged() -> None:
    wide: Proposal = (Source.NGRAM, {(): dict.fromkeys(range(300), 0.001)})
    deep: Proposal = (Source.SUFFIX, {(): {7: 0.5}, (7,): dict.fromkeys(range(400), 0.002)})
    tree = grow_tree([wide, deep], 1000)
    assert set(tree_paths(tree)) == paths(wide) | paths(deep)
