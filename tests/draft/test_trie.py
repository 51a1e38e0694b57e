"""Merging and cutting against building every path and sorting."""

import itertools
import math
import random

import numpy as np
import pytest

from vllm_tokenswift.draft.candidates import (
    NO_CELL,
    NO_ROW,
    Handle,
    HeadCandidates,
    HeadOffer,
    NgramOffer,
    Offer,
    Step,
)
from vllm_tokenswift.draft.ngrams import NgramTable
from vllm_tokenswift.draft.trie import grow_tree, paper_tree
from vllm_tokenswift.tree import DraftTree, Source


class TableOfPaths(Offer):
    """Offers given paths; ``rates`` of the tokens below each prefix."""

    root = ()

    def __init__(self, source: Source, rates: dict[tuple[int, ...], dict[int, float]]) -> None:
        self.source = source
        self.rates = rates

    def steps(self, handle: Handle) -> list[Step]:
        return [
            (
                token,
                rate,
                int(self.source),
                NO_CELL,
                (*handle, token) if (*handle, token) in self.rates else None,
            )
            for token, rate in self.rates[handle].items()
        ]

    def paths(self) -> set[tuple[int, ...]]:
        return {(*prefix, token) for prefix, row in self.rates.items() for token in row}


def random_offer(rng: random.Random, source: Source) -> TableOfPaths:
    rates: dict[tuple[int, ...], dict[int, float]] = {}
    level: list[tuple[int, ...]] = [()]
    for _ in range(3):
        below = []
        for prefix in level:
            tokens = rng.sample(range(5), rng.randrange(1, 4))
            shares = [rng.random() for _ in tokens]
            rates[prefix] = {t: 0.95 * s / sum(shares) for t, s in zip(tokens, shares, strict=True)}
            below += [(*prefix, token) for token in tokens if rng.random() < 0.7]
        level = below
    return TableOfPaths(source, rates)


def tree_paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    return {
        tuple(int(tree.tokens[i - 1]) for i in tree.path(node)): float(tree.probabilities[node - 1])
        for node in range(1, len(tree) + 1)
    }


@pytest.mark.parametrize("seed", range(20))
def test_only_offered_paths_are_drafted_and_none_twice(seed: int) -> None:
    rng = random.Random(seed)
    offers = [random_offer(rng, source) for source in (Source.SELF, Source.NGRAM, Source.SUFFIX)]
    tree = grow_tree(offers, budget=1000)
    paths = tree_paths(tree)
    assert len(paths) == len(tree)
    assert set(paths) == set.union(*(offer.paths() for offer in offers))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("budget", [0, 1, 3, 8, 20])
def test_a_budget_keeps_the_likeliest_nodes(seed: int, budget: int) -> None:
    rng = random.Random(seed)
    offers = [random_offer(rng, source) for source in (Source.NGRAM, Source.SUFFIX)]
    everything = sorted(tree_paths(grow_tree(offers, 1000)).values(), reverse=True)
    kept = sorted(tree_paths(grow_tree(offers, budget)).values(), reverse=True)
    assert kept == everything[:budget]


@pytest.mark.parametrize("seed", range(10))
def test_one_source_is_taken_at_its_word(seed: int) -> None:
    offer = random_offer(random.Random(seed), Source.NGRAM)
    for path, probability in tree_paths(grow_tree([offer], 1000)).items():
        expected = math.prod(offer.rates[path[:i]][path[i]] for i in range(len(path)))
        assert probability == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_children_never_promise_more_than_their_parent(seed: int) -> None:
    rng = random.Random(seed)
    tree = grow_tree([random_offer(rng, source) for source in list(Source)[1:]], 1000)
    probability = [1.0, *tree.probabilities.tolist()]
    for node, children in enumerate(tree.children):
        total = sum(probability[child] for child in children.values())
        assert total <= probability[node] * 1.000001


def test_of_sources_that_agree_the_surest_counts() -> None:
    offers = [
        TableOfPaths(Source.NGRAM, {(): {1: 0.3, 2: 0.35}}),
        TableOfPaths(Source.SUFFIX, {(): {1: 0.5}}),
    ]
    tree = grow_tree(offers, 10)
    assert tree.tokens.tolist() == [1, 2]
    assert tree.probabilities.tolist() == pytest.approx([0.5, 0.35])
    assert tree.sources.tolist() == [Source.SUFFIX, Source.NGRAM]


def test_a_sure_candidate_is_not_pulled_down_by_unlikely_ones() -> None:
    offers = [
        TableOfPaths(Source.SUFFIX, {(): {1: 0.98}}),
        TableOfPaths(Source.NGRAM, {(): {2: 0.4, 3: 0.4}}),
    ]
    assert grow_tree(offers, 1).probabilities.tolist() == pytest.approx([0.98])


@pytest.mark.parametrize("seed", range(10))
def test_nodes_stand_depth_first_with_the_likeliest_child_first(seed: int) -> None:
    rng = random.Random(seed)
    tree = grow_tree([random_offer(rng, s) for s in (Source.NGRAM, Source.SUFFIX)], 12)
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
    offers = [random_offer(rng, s) for s in (Source.NGRAM, Source.SUFFIX)]
    tree = grow_tree(offers, 10, chain_only=True)
    assert tree.is_chain
    assert len(tree) >= 1
    assert tree.tokens[0] == grow_tree(offers, 1).tokens[0]


def heads() -> HeadCandidates:
    return HeadCandidates(
        [[10, 11, 12], [20, 21, 22], [30, 31, 32], [40, 41, 42]],
        [[0.9, 0.05, 0.02], [0.3, 0.2, 0.1], [0.2, 0.15, 0.1], [0.2, 0.1, 0.05]],
        free=False,
    )


def test_the_paper_tree_is_the_cartesian_tree_and_the_ngrams_after_the_first_token() -> None:
    table = NgramTable(n=4, k=20)
    table.extend([10, 20, 7, 8, 10, 20, 7, 9, 11, 1, 2, 3])
    tree = paper_tree(heads(), table, budget=1000)
    cartesian = {
        path[:depth]
        for path in itertools.product([10], [20, 21, 22], [30, 31, 32], [40, 41, 42])
        for depth in range(1, 5)
    }
    ngrams = {(10, 20, 7), (10, 20, 7, 8), (10, 20, 7, 9)}
    assert set(tree_paths(tree)) == cartesian | ngrams
    assert len(tree) == 40 + 3
    assert set(tree.sources.tolist()) == {Source.SELF, Source.HEADS, Source.NGRAM}


def test_the_paper_tree_cut_to_a_budget_keeps_its_likeliest_path() -> None:
    tree = paper_tree(heads(), NgramTable(), budget=4)
    assert len(tree) == 4
    assert tree.tokens[:2].tolist() == [10, 20]


def test_ngrams_share_prefixes_and_their_frequencies_add_up() -> None:
    ngrams = [((1, 2, 3), 4), ((1, 2, 4), 2), ((5, 6, 7), 2)]
    tree = grow_tree([NgramOffer(None, ngrams, total=16, max_depth=3)], 100)
    paths = tree_paths(tree)
    assert paths[(1,)] == pytest.approx(6 / 16)
    assert paths[(1, 2, 3)] == pytest.approx(4 / 16)
    assert paths[(5, 6, 7)] == pytest.approx(2 / 16)
    assert len(tree) == 7


def test_heads_name_their_sources_by_depth() -> None:
    tree = grow_tree([HeadOffer(None, heads(), (1, 1, 1, 1))], 10)
    assert tree.sources.tolist() == [Source.SELF, Source.HEADS, Source.HEADS, Source.HEADS]
    free = HeadCandidates([[1]], [[0.5]], free=True)
    assert grow_tree([HeadOffer(None, free, (1,))], 10).sources.tolist() == [Source.FREE_HEADS]


def test_rows_of_heads_follow_only_the_tokens_they_were_asked_behind() -> None:
    along_paths = HeadCandidates(
        [[1, 2, 3], [10, 11], [20, 21]],
        [[0.5, 0.3, 0.1], [0.6, 0.2], [0.4, 0.3]],
        free=True,
        below=[[1, NO_ROW, 2], [NO_ROW, NO_ROW], [NO_ROW, NO_ROW]],
    )
    tree = grow_tree([HeadOffer(None, along_paths, (3, 3))], 100)
    assert set(tree_paths(tree)) == {(1,), (2,), (3,), (1, 10), (1, 11), (3, 20), (3, 21)}


def test_heads_of_unequal_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        HeadCandidates([[1, 2]], [[0.5]], free=True)


def test_trees_hold_the_promised_types() -> None:
    tree = grow_tree([HeadOffer(None, heads(), (1, 3))], 10)
    assert tree.tokens.dtype == np.int32
    assert tree.probabilities.dtype == np.float32
