"""The compiled heads, against the torch modules they stand for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from vllm_tokenswift.cpu import head_chain
from vllm_tokenswift.cpu.head_chain import BEAM_WIDTH, TOP, CpuHeadChain, HeadNoise, LogitScales
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary
from vllm_tokenswift.sampling.position_noise import SeedDraws

pytestmark = pytest.mark.skipif(
    not head_chain.is_compiled(), reason="installed without a C compiler: nothing was compiled"
)


def made(hidden, width, vocabulary, num_heads=3):
    """Random heads, LM head and embeddings, whose weights int8 and bfloat16 hold exactly."""
    generator = torch.Generator().manual_seed(hidden)
    tokens = torch.randperm(4 * vocabulary, generator=generator)[:vocabulary]
    heads = DraftHeads("sequential", num_heads, hidden, 1e-5, width, tokens).requires_grad_(False)
    lm_rows = torch.empty(vocabulary, hidden)
    for weight in [*heads.parameters(), lm_rows]:
        if weight.ndim == 1:
            weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
            continue
        steps = torch.randint(-126, 127, weight.shape, generator=generator).float()
        steps[:, 0] = 127
        scales = torch.rand(len(weight), 1, generator=generator) + 0.5
        weight.copy_(steps * scales / 127 * 3 / weight.shape[1] ** 0.5)
    embeddings = torch.randn(vocabulary, hidden, generator=generator).bfloat16().float()
    return heads, lm_rows, embeddings


def bits(embedded):
    return embedded.bfloat16().view(torch.int16).numpy()


def same(vocabulary, scale=1.0):
    """The same scale for all logits."""
    return LogitScales(np.zeros(vocabulary, np.uint8), scale, scale, scale)


def chances_of(heads, lm_rows, level, state, embedded, scales, noise):
    """By torch: the new state, and float64 ``[vocabulary]``."""
    state, read = heads.run_head(level, state[None], embedded[None])
    likely = DraftVocabulary.probabilities(read @ lm_rows.T, scales[None])[0].double()
    if noise is not None:
        draws, power = noise
        noise = [draws.coming_noise().noise(level, token) for token in heads.vocabulary.tolist()]
        likely /= torch.tensor(noise) ** power
        likely /= likely.sum()
    return state[0], likely


@pytest.mark.parametrize("power", [None, 0.5, 1.0])
@pytest.mark.parametrize(("hidden", "width", "vocabulary"), [(64, 96, 16), (576, 1152, 1003)])
def test_the_rows_are_those_of_the_modules_along_the_same_paths(hidden, width, vocabulary, power):
    heads, lm_rows, embeddings = made(hidden, width, vocabulary)
    generator = torch.Generator().manual_seed(1)
    count = 5
    start = torch.randn(count, hidden, generator=generator) * 3
    marks = torch.rand(count, vocabulary, generator=generator) < 0.3
    numbers = torch.rand(count, 3, generator=generator) + 0.5
    given = [
        LogitScales(mark.to(torch.uint8).numpy(), *three)
        for mark, three in zip(marks, numbers.tolist(), strict=True)
    ]
    outside, positive, negative = (column[:, None] for column in numbers.unbind(1))
    scales = torch.stack(
        [torch.where(marks, positive, outside), torch.where(marks, negative, outside)], dim=1
    )  # [requests, 2, vocabulary], of positive and of negative logits
    # One request has no path at all, another two.
    roots = [(0, 1.0), (1, 0.9), (3, 0.7), (3, 0.3), (4, 1.0)]
    embedded = torch.randn(len(roots), hidden, generator=generator).bfloat16().float()
    noises = [None] * count
    if power is not None:
        draws = [SeedDraws(torch.Generator().manual_seed(i)) for i in range(count)]
        noises = [(d, power) for d in draws]
        noises[1] = None

    levels = CpuHeadChain(heads, lm_rows, embeddings).search(
        start,
        roots,
        bits(embedded),
        given,
        [n and HeadNoise([n[0].key_at(level) for level in range(3)], n[1]) for n in noises],
        0.05,
    )
    assert [row["request"] for row in levels[0]] == [request for request, _ in roots]
    assert len(levels) > 1
    place_of = {token: place for place, token in enumerate(heads.vocabulary.tolist())}
    states = start
    for level, rows in enumerate(levels):
        new_states = []
        for number, row in enumerate(rows):
            request = row["request"]
            if level == 0:
                token = embedded[number]
            else:
                above = levels[level - 1][row["above"]]
                assert above["request"] == request
                token = embeddings[place_of[above["tokens"][row["place"]]]]
                chance = above["chance"] * above["chances"][row["place"]]
                assert np.isclose(row["chance"], chance, atol=1e-6)
                assert chance >= 0.05
            state, expected = chances_of(
                heads, lm_rows, level, states[row["above"]], token, scales[request], noises[request]
            )
            new_states.append(state)
            # What enters a product is rounded to a 14000th of its largest; and where the
            # noise counts, tokens with a chance below e^-11 of the best one's are left out.
            tolerance = 5e-3 if noises[request] is None else 2e-2
            best = expected.topk(TOP).values
            assert np.allclose(row["chances"], best, atol=tolerance), (level, number)
            expected_chances = expected[[place_of[token] for token in row["tokens"]]]
            assert np.allclose(row["chances"], expected_chances, atol=tolerance)
            assert (np.diff(row["chances"]) <= 0).all()
        for request in {int(row["request"]) for row in rows}:
            assert sum(row["request"] == request for row in rows) <= BEAM_WIDTH
        states = torch.stack(new_states)


def test_the_best_paths_are_followed_and_no_others():
    heads, lm_rows, embeddings = made(64, 96, 16)
    chain = CpuHeadChain(heads, lm_rows * 0.3, embeddings)
    arguments = torch.randn(1, 64), [(0, 1.0)], bits(torch.randn(1, 64)), [same(16)]
    levels = [rows.copy() for rows in chain.search(*arguments, [None], 0.0)]
    assert len(levels) == 3
    for above, rows in pairwise(levels):
        chances = (above["chance"][:, None] * above["chances"]).flatten()
        best = np.sort(chances)[::-1][:BEAM_WIDTH]
        assert np.allclose(rows["chance"], best)
    too_much = float(levels[1]["chance"].max()) * 1.01
    assert len(chain.search(*arguments, [None], too_much)) == 1


def test_of_equals_the_one_that_comes_first_is_ahead():
    heads, lm_rows, embeddings = made(64, 96, 32)
    lm_rows[:] = lm_rows[0]
    [rows] = CpuHeadChain(heads, lm_rows, embeddings).search(
        torch.randn(1, 64), [(0, 1.0)], bits(torch.randn(1, 64)), [same(32)], [None], 0.5
    )
    assert rows["tokens"].tolist() == [heads.vocabulary[:TOP].tolist()]
    assert np.allclose(rows["chances"], 1 / 32)


def test_where_the_noise_counts_tokens_far_below_the_likeliest_are_not_offered():
    heads, lm_rows, embeddings = made(64, 96, 32)
    noise = HeadNoise([1, 2, 3], 0.5)
    [rows] = CpuHeadChain(heads, lm_rows, embeddings).search(
        torch.randn(1, 64),
        [(0, 1.0)],
        bits(torch.randn(1, 64)),
        [same(32, 1e4)],
        [noise],
        1.1,
    )
    assert rows["chances"][0, 0] == pytest.approx(1.0)
    assert (rows["chances"][0, 1:] == 0.0).all()


SCRIPT = """
import json, sys, torch
torch.set_num_threads(int(sys.argv[1]))
import numpy as np
from vllm_tokenswift.cpu.head_chain import CpuHeadChain, LogitScales
from vllm_tokenswift.heads.model import DraftHeads
torch.manual_seed(0)
heads = DraftHeads("sequential", 3, 64, 1e-5, 96, vocabulary=torch.arange(500))
for layer in heads.layers:
    torch.nn.init.normal_(layer.down.weight)
chain = CpuHeadChain(heads, torch.randn(500, 64), torch.randn(500, 64))
roots = [(request, 1.0) for request in range(16)]
states, embedded = torch.randn(16, 64), torch.randn(16, 64).bfloat16().view(torch.int16).numpy()
scales = [LogitScales(np.zeros(500, np.uint8), 1.0, 1.0, 1.0)] * 16
levels = chain.search(states, roots, embedded, scales, [None] * 16, 0.0)
names = ("above", "tokens", "chances")
print(json.dumps([{name: rows[name].tolist() for name in names} for rows in levels]))
"""


@pytest.mark.slow
def test_drafts_do_not_depend_on_the_number_of_threads():
    expected_chances = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", SCRIPT, threads],
                env={**os.environ, "OMP_NUM_THREADS": threads},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for threads in ("1", "2", "3")
    ]
    assert len(expected_chances[0]) == 3
    for others in expected_chances[1:]:
        for rows, expected in zip(others, expected_chances[0], strict=True):
            assert rows == expected
