"""Unseeded requests: what the tree_sampler emits has exactly the target's distribution.

Sequences of three tokens over a vocabulary of four, 50,000 of them, against their
exact probabilities. The trees are of all shapes and differ per request and
iteration; nearly all accept something.
"""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from sampling_reference import CPU
from scipy import stats
from vllm.sampling_params import SamplingParams

from vllm_tokenswift.sampling.position_noise import ExponentialSampler
from vllm_tokenswift.sampling.request_parameters import PlainDefaults
from vllm_tokenswift.sampling.tree_sampler import TreeSampler, VerifyRows
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

VOCAB = 4
LENGTH = 3
NUM_DRAWS = 50_000
BATCH = 2_500
PROMPT = [0, 2]

THETA, WINDOW, TEMPERATURE, MIN_P = 1.5, 2, 0.9, 0.15

# Logits of the token after the text's last two, float32 [vocab, vocab, vocab].
MODEL = torch.randn(VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(0)) * 1.2

EVERY_PAIR = DraftTree.build(
    [token for first in range(VOCAB) for token in (first, *range(VOCAB))],
    [parent for first in range(VOCAB) for parent in (0, *[5 * first + 1] * VOCAB)],
)
SHAPES = [
    EMPTY_TREE,
    DraftTree.chain([1]),
    DraftTree.chain([3, 1, 2]),
    DraftTree.build([0, 1, 2, 3], [0, 0, 0, 0]),
    DraftTree.build([1, 0, 2], [0, 1, 1]),
    DraftTree.build([2, 2, 1, 3, 0], [0, 1, 0, 3, 3]),
    DraftTree.build([0, 0, 1, 3, 1, 1], [0, 1, 2, 1, 0, 5]),
    EVERY_PAIR,
]
# The nodes' texts, by shape.
NODE_PATHS = [
    [[int(tree.tokens[i - 1]) for i in tree.path(node)] for node in range(len(tree) + 1)]
    for tree in SHAPES
]


def exact_probabilities(temperature: float) -> dict[tuple[int, ...], float]:
    """Written out in plain Python: penalty, temperature, min-p, softmax."""
    result = {}
    for sequence in itertools.product(range(VOCAB), repeat=LENGTH):
        product = 1.0
        text = list(PROMPT)
        for token in sequence:
            logits = MODEL[text[-2], text[-1]].tolist()
            for seen in set(text[-WINDOW:]):
                logits[seen] = logits[seen] / THETA if logits[seen] > 0 else logits[seen] * THETA
            weights = [2.718281828459045 ** (value / temperature) for value in logits]
            weights = [w if w >= MIN_P * max(weights) else 0.0 for w in weights]
            product *= weights[token] / sum(weights)
            text.append(token)
        result[sequence] = product
    return result


def p_value(counts: Counter[tuple[int, ...]], exact: dict[tuple[int, ...], float]) -> float:
    possible = [sequence for sequence, p in exact.items() if p > 0]
    assert set(counts) <= set(possible)
    expected = [exact[sequence] * NUM_DRAWS for sequence in possible]
    return float(stats.chisquare([counts[s] for s in possible], expected, sum_check=False).pvalue)


@pytest.fixture
def _no_gc() -> Iterator[None]:
    """Thousands of requests live at once; looking for cycles among them doubles the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("kind", ["gumbel seeds by depth", "exponential rows of whole trees"])
def test_sequences_drawn_over_trees_have_exactly_the_targets_distribution(kind: str) -> None:
    tree_sampler = TreeSampler(VOCAB, CPU, PlainDefaults(THETA, WINDOW))
    if kind != "gumbel seeds by depth":
        tree_sampler._noise = ExponentialSampler(VOCAB, CPU, use_fp64_gumbel=False)
        tree_sampler._sample_whole_trees = True
    params = SamplingParams(temperature=TEMPERATURE, min_p=MIN_P, max_tokens=100)
    rng = random.Random(1)
    counts: Counter[tuple[int, ...]] = Counter()
    iterations = 0
    with torch.random.fork_rng():
        torch.manual_seed(2)
        for _ in range(NUM_DRAWS // BATCH):
            texts = [list(PROMPT) for _ in range(BATCH)]
            for i in range(BATCH):
                tree_sampler.remove_request(str(i))
                tree_sampler.add_request(str(i), params, PROMPT, [], None)
            unfinished = list(range(BATCH))
            while unfinished:
                iterations += len(unfinished)
                shapes = [rng.randrange(len(SHAPES)) for _ in unfinished]
                ends = [
                    (*texts[i], *path)[-2:]
                    for i, shape in zip(unfinished, shapes, strict=True)
                    for path in NODE_PATHS[shape]
                ]
                logits = MODEL[tuple(torch.tensor(ends).t())]  # [rows, vocab]
                groups = [
                    VerifyRows(str(i), SHAPES[s]) for i, s in zip(unfinished, shapes, strict=True)
                ]
                accepted, _ = tree_sampler.sample_trees(logits, groups)
                for i, group in zip(unfinished, accepted, strict=True):
                    texts[i] += group.tokens
                    tree_sampler.commit_tokens(str(i), group.tokens)
                unfinished = [i for i in unfinished if len(texts[i]) < len(PROMPT) + LENGTH]
            counts.update(tuple(text[len(PROMPT) :][:LENGTH]) for text in texts)
    assert counts.total() == NUM_DRAWS
    assert iterations < 0.75 * NUM_DRAWS * LENGTH, "the trees must have been accepted from"
    assert p_value(counts, exact_probabilities(TEMPERATURE)) > 0.001
    # The test would notice a distribution that is a little flatter.
    assert p_value(counts, exact_probabilities(TEMPERATURE * 1.05)) < 1e-9
