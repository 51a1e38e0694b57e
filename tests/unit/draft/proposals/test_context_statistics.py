"""Followers of contexts, against counting them in dictionaries."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.gumbel_noise import MURMUR, GumbelNoise, exponential, position_key
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlannedRequest, Planner
from vllm_tokenswift.draft.proposals import context_statistics as contexts
from vllm_tokenswift.draft.proposals.context_statistics import (
    MOST_CONTEXTS,
    MOST_FOLLOWERS,
    ORDERS,
    Contexts,
    ContextTable,
    mix_followers,
)
from vllm_tokenswift.draft.proposals.contexts import likeliest_followers
from vllm_tokenswift.draft.proposals.table import NUM_CANDIDATES, Candidates
from vllm_tokenswift.draft.top_tokens import (
    NO_TOKEN,
    TOP_K,
    TOP_K_COLUMNS,
    TopKRows,
    VerifyTopK,
)
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree, Source


def table_of(tokens: list[int]) -> ContextTable:
    table = ContextTable()
    table.append_tokens(np.array(tokens, np.int32))
    return table


def recent_of(table: ContextTable) -> list[int]:
    recent: list[int] = Contexts(*table.arrays).recent.tolist()
    return recent


def mixture(table: ContextTable, context: list[int]) -> dict[int, float]:
    """context: the newest tokens, the oldest first."""
    recent = np.full(ORDERS, -1, np.int32)
    recent[: len(context)] = context[::-1]
    found, shares = np.empty(MOST_FOLLOWERS, np.int32), np.empty(MOST_FOLLOWERS)
    number = mix_followers(Contexts(*table.arrays), recent, found, shares)
    return dict(zip(found[:number].tolist(), shares[:number].tolist(), strict=True))


def expected_mixture(tokens: list[int], context: list[int]) -> dict[int, float]:
    """Witten and Bell's, with four times as much for what is unseen and one, of fading weights."""
    shares: dict[int, float] = {}
    for order in range(1, min(len(context), ORDERS) + 1):
        last = context[-order:]
        weights: dict[int, float] = defaultdict(float)
        for i in range(order, len(tokens)):
            if tokens[i - order : i] == last:
                weights[tokens[i]] += 2 ** ((i - len(tokens)) / 3000)
        total = sum(weights.values())
        if not total:
            break
        share = total / (total + 1 + 4 * len(weights))
        shares = {token: value * (1 - share) for token, value in shares.items()}
        for token, weight in weights.items():
            shares[token] = shares.get(token, 0.0) + share * weight / total
    return shares


@pytest.mark.parametrize("seed", range(10))
def test_the_mixture_is_of_all_that_followed_the_last_one_two_and_three_tokens(seed: int) -> None:
    """A text of 15 words, 3,000 long, so that lists grow, tables too, and none is cut."""
    rng = np.random.default_rng(seed)
    tokens = rng.choice(15, 3000, p=rng.dirichlet(np.full(15, 0.5))).tolist()
    table = table_of(tokens)
    contexts = [tokens[i : i + 3] for i in rng.integers(0, 2000, 40)]
    for context in [*contexts, [tokens[7]], tokens[7:9], [99], [99, tokens[7]]]:
        expected = expected_mixture(tokens, context)
        assert mixture(table, context) == pytest.approx(expected, rel=1e-4)
        assert sum(expected.values()) < 1


def test_tokens_may_come_in_pieces() -> None:
    tokens = np.random.default_rng(0).integers(0, 30, 2000).tolist()
    whole, pieces = table_of(tokens), ContextTable()
    at = 0
    for size in np.random.default_rng(1).integers(1, 9, 2000):
        pieces.append_tokens(np.array(tokens[at : at + size], np.int32))
        at += size
    assert recent_of(pieces) == recent_of(whole) == tokens[:-4:-1]
    assert mixture(pieces, tokens[100:103]) == mixture(whole, tokens[100:103])


def test_a_full_list_keeps_the_frequent_and_makes_room_for_the_new() -> None:
    """After 0 come 1 and 2 in turns, and between them 60 tokens that come once each."""
    tokens = [0]
    for rare in range(100, 160):
        tokens += [1, 0, 2, 0, rare, 0]
    followers = mixture(table_of(tokens), [0])
    likeliest = sorted(followers, key=lambda token: -followers[token])
    assert set(likeliest[:2]) == {1, 2}
    assert followers[1] == pytest.approx(followers[2], rel=0.01)
    assert 159 in followers
    assert 100 not in followers


def test_what_came_lately_counts_for_more() -> None:
    """7 followed 0 forty times, long ago; then 8 did thirty times."""
    tokens = [0, 7] * 40 + list(range(100, 6100)) + [0, 8] * 30
    followers = mixture(table_of(tokens), [0])
    assert followers[8] > 2 * followers[7]


def test_the_lightest_contexts_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """40,000 tokens that hardly ever come twice, three new contexts each, and a phrase between."""
    tokens = np.random.default_rng(5).integers(10, 1 << 20, 40_000).tolist()
    for at in range(0, 40_000, 100):
        tokens[at : at + 4] = [0, 1, 2, 3 + at % 3]
    bounded = table_of(tokens)
    kept = Contexts(*bounded.arrays)
    assert MOST_CONTEXTS // 2 <= kept.counts[0] <= MOST_CONTEXTS
    assert len(kept.keys) == len(kept.table) == 2 * MOST_CONTEXTS
    assert len(kept.pool) <= 8 * MOST_CONTEXTS
    monkeypatch.setattr(contexts, "MOST_CONTEXTS", 1 << 20)
    unbounded = table_of(tokens)
    assert mixture(bounded, [0, 1, 2]) == mixture(unbounded, [0, 1, 2]) != {}
    assert mixture(bounded, tokens[-5:-2]) == mixture(unbounded, tokens[-5:-2]) != {}
    assert mixture(unbounded, tokens[150:153]) != {} == mixture(bounded, tokens[150:153])


def test_the_noise_chooses_among_followers() -> None:
    """The chance of a follower is its share of q / E, if nothing unseen comes before it."""
    rng = np.random.default_rng(3)
    found, shares = np.arange(40, dtype=np.int32), 0.7 * rng.dirichlet(np.ones(40))
    keys = np.array([5, 77], np.uint64)
    key = position_key(MURMUR, keys, 2)
    weights = [share / exponential(MURMUR, key, token) for token, share in enumerate(shares)]
    expected = sorted(range(40), key=lambda token: -weights[token])[:8]
    assert likeliest_followers(found, shares, 40, MURMUR, key, 8) == 8
    assert found[:8].tolist() == expected
    assert shares[:8].tolist() == pytest.approx(
        [weights[t] / sum(weights) * math.exp(-0.3 / weights[t]) for t in expected]
    )


Chain = dict[tuple[int, int], np.ndarray]


def sampled_chain(length: int, seed: int) -> tuple[list[int], Chain]:
    """A second-order chain of 25 words, each sample ``argmin E / p`` of the noise at its place;
    and its probabilities after each pair of words that it came to."""
    rng = np.random.default_rng(seed)
    of_pair: dict[tuple[int, int], np.ndarray] = defaultdict(
        lambda: rng.dirichlet(np.full(25, 0.15))
    )
    tokens = [0, 1]
    while len(tokens) < length:
        key = position_key(MURMUR, np.array([seed, len(tokens) - 1], np.uint64), 0)
        noise = np.array([exponential(MURMUR, key, token) for token in range(25)])
        chances = np.maximum(of_pair[tokens[-2], tokens[-1]], 1e-12)
        tokens.append(int(np.argmin(noise / chances)))
    return tokens, of_pair


def sampled_text(length: int, seed: int) -> list[int]:
    return sampled_chain(length, seed)[0]


def accepted_per_step(tokens: list[int], start: int, seed: int, contexts: bool) -> float:
    planner = Planner(CostModel(((1, 10.0), (33, 10.5))))
    state = DraftState(sampled=True, sees_noise=contexts)
    state.append_tokens(tokens[:start])
    at, steps = start, 0
    while at < len(tokens) - 16:
        keys = np.array([seed, at - 1], np.uint64)
        gumbel_noise = GumbelNoise(MURMUR, lambda _, keys=keys: keys)
        [tree] = planner.plan([PlannedRequest(state, None, at, 16, noise=gumbel_noise)])
        emitted = len(tree.follow(tokens[at : at + 16])) + 1
        state.append_tokens(tokens[at : at + emitted])
        at, steps = at + emitted, steps + 1
    return (at - start) / steps


def test_text_that_never_repeats_for_long_is_drafted_from_its_own_statistics() -> None:
    """Copies of earlier passages find a token or two; the mixture and the noise find more."""
    tokens = sampled_text(3000, seed=11)
    without = accepted_per_step(tokens, 2500, 11, contexts=False)
    assert accepted_per_step(tokens, 2500, 11, contexts=True) > 1.15 * without


def test_what_contexts_propose_is_theirs_and_keeps_to_the_depth_that_is_asked() -> None:
    tokens = sampled_text(2000, seed=4)
    state = DraftState(max_match=0, sampled=True)
    state.append_tokens(tokens)
    gumbel_noise = GumbelNoise(MURMUR, lambda _: np.array([4, len(tokens) - 1], np.uint64))
    for limit in (1, 2, 6):
        drafted = state.draft(None, limit, noise=gumbel_noise)
        tree = drafted.tree(drafted.count)
        assert int(Source.CONTEXT) in tree.sources.tolist()
        assert tree.depths.max() <= limit


def said(*rows: dict[int, float]) -> TopKRows:
    """Rows of the likeliest tokens and their probabilities."""
    packed = np.full((len(rows), TOP_K_COLUMNS), NO_TOKEN, np.int32)
    for row, likely in zip(packed, rows, strict=True):
        row[: len(likely)] = list(likely)
        row[TOP_K : TOP_K + len(likely)] = np.array(list(likely.values()), np.float32).view(
            np.int32
        )
    return packed


def test_what_the_target_said_counts_by_its_probability_at_drafts_not_accepted_too() -> None:
    """After 3, 4, 5 stands a tree: 6, below it 7 and 8; 6 is accepted, then 9 is drawn."""
    table = table_of([3, 4, 5])
    tree = DraftTree.build([6, 7, 8], [0, 1, 1])
    rows = said({6: 0.7, 20: 0.3}, {9: 0.5, 7: 0.25, 8: 0.25}, {30: 1.0}, {})
    table.append_verified(np.array([6, 9], np.int32), VerifyTopK(tree, rows))
    assert recent_of(table) == [9, 6, 5]
    fading = 2 ** (-2 / 3000)

    def heard(weights: dict[int, float], orders: int) -> dict[int, float]:
        """Contexts of so many orders that said this, once."""
        unknown = (1 / (fading + 1)) ** orders
        return {token: weight * (1 - unknown) for token, weight in weights.items()}

    assert mixture(table, [4, 5]) == pytest.approx(heard({6: 0.7, 20: 0.3}, 2), rel=1e-3)
    accepted = {9: 0.5, 7: 0.25, 8: 0.25}
    assert mixture(table, [4, 5, 6]) == pytest.approx(heard(accepted, 3), rel=1e-3)
    assert mixture(table, [5, 6, 7]) == pytest.approx(heard({30: 1.0}, 3), rel=1e-3)
    assert mixture(table, [5, 6, 8]) == {}  # nothing was said there
    assert mixture(table, [6, 9]) == {}  # nor was 9 verified


def test_a_table_grows_while_top_ks_are_counted() -> None:
    """Every iteration says eight followers of 32 nodes, and none is lost."""
    rng, table = np.random.default_rng(5), ContextTable()
    newest = 0
    for _ in range(60):
        drafts = rng.integers(0, 5000, 31).tolist()
        tree = DraftTree.build(drafts, [int(rng.integers(0, i + 1)) for i in range(31)])
        likely = [rng.choice(5000, 8, replace=False).tolist() for _ in range(32)]
        rows = said(*(dict.fromkeys(row, 0.1) for row in likely))
        before, newest = newest, int(rng.integers(0, 5000))
        table.append_verified(np.array([newest], np.int32), VerifyTopK(tree, rows))
        for node in range(1, 32):
            assert set(likely[node]) <= set(mixture(table, [drafts[node - 1]]))
        assert before == 0 or set(likely[0]) <= set(mixture(table, [before]))


def test_a_text_whose_top_ks_are_known_is_drafted_better_than_one_that_was_counted() -> None:
    """The chain's own probabilities are heard at the places of its tokens."""
    tokens, of_pair = sampled_chain(3000, seed=11)
    table = table_of(tokens[:2])
    for i in range(2, len(tokens)):
        chances = of_pair[tokens[i - 2], tokens[i - 1]]
        order = np.argsort(-chances)[:8]
        row = said({int(t): float(chances[t]) for t in order if chances[t] >= 0.01})
        table.append_verified(np.array([tokens[i]], np.int32), VerifyTopK(EMPTY_TREE, row))
    errors = []
    for known in (table, table_of(tokens)):
        wrong = 0.0
        for pair, chances in of_pair.items():
            found = mixture(known, list(pair))
            wrong += sum(abs(chances[t] - found.get(t, 0.0)) for t in range(25))
        errors.append(wrong)
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize(("sampled", "k"), [(False, 20), (True, 0)])
def test_nothing_is_counted_where_nothing_is_drawn_or_n_grams_are_off(
    sampled: bool, k: int
) -> None:
    assert DraftState(k=k, sampled=sampled).contexts is None
    state = DraftState(k=k, sampled=sampled)
    state.append_tokens([1, 2, 3, 1, 2])
    noise = GumbelNoise(MURMUR, lambda _: np.array([4, 4], np.uint64))
    assert int(Source.CONTEXT) not in state.draft(None, 8, noise=noise).nodes[:, 1]


def test_nothing_is_looked_up_below_paths_that_cannot_pay() -> None:
    """And what can pay is found all the same."""
    tokens = sampled_text(3000, seed=10)
    taken, num_proposed = [], []
    for least in (0.0, 0.2):
        state = DraftState(max_match=0, sampled=True)
        state.append_tokens(tokens)
        gumbel_noise = GumbelNoise(MURMUR, lambda _: np.array([10, len(tokens) - 1], np.uint64))
        drafted = state.draft(None, 24, least, noise=gumbel_noise)
        nodes = zip(drafted.nodes.tolist(), drafted.probabilities, strict=True)
        taken.append(
            [(node, chance) for node, chance in list(nodes)[: drafted.count] if chance > 0.2]
        )
        num_proposed.append(int(Candidates(*state._table.arrays).counts[NUM_CANDIDATES]))
    assert len(taken[0]) > 1
    assert taken[0] == taken[1]
    assert num_proposed[1] < num_proposed[0]
