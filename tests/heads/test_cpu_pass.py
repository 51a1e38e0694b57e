"""The compiled pass of a conditioned head, against the torch modules it stands for."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from vllm_tokenswift.heads import cpu_pass
from vllm_tokenswift.heads.cpu_pass import MAX_ROWS, TOP, CpuHeadPass
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary

pytestmark = pytest.mark.skipif(
    not cpu_pass.is_compiled(), reason="installed without a C compiler: nothing was compiled"
)


def made(hidden, width, vocabulary):
    """Random heads and LM head whose weights int8 holds exactly, in one scale for each row."""
    generator = torch.Generator().manual_seed(hidden)
    heads = DraftHeads(
        "conditioned", 2, hidden, 1e-5, width, vocabulary=torch.arange(vocabulary)
    ).requires_grad_(False)
    lm_rows = torch.empty(vocabulary, hidden)
    for weight in [*heads.parameters(), lm_rows]:
        if weight.ndim == 1:
            weight.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
            continue
        steps = torch.randint(-126, 127, weight.shape, generator=generator).float()
        steps[:, 0] = 127
        scales = torch.rand(len(weight), 1, generator=generator) + 0.5
        weight.copy_(steps * scales / 127 * 2 / weight.shape[1] ** 0.5)
    return heads, lm_rows


@pytest.mark.parametrize("rows", [1, 2, 5, MAX_ROWS])
@pytest.mark.parametrize(("hidden", "width", "vocabulary"), [(64, 96, TOP), (576, 1152, 1003)])
def test_a_pass_says_what_the_modules_say(rows, hidden, width, vocabulary):
    heads, lm_rows = made(hidden, width, vocabulary)
    generator = torch.Generator().manual_seed(rows)
    states = torch.randn(rows + 2, hidden, generator=generator) * 3
    embedded = torch.randn(rows, hidden, generator=generator).bfloat16()
    scales = torch.rand(3, 2, vocabulary, generator=generator) + 0.5
    before = torch.randint(rows + 2, (rows,), generator=generator).tolist()
    owners = torch.randint(3, (rows,), generator=generator).tolist()

    compiled = CpuHeadPass(heads, lm_rows)
    for index in range(2):
        found, probabilities, places = compiled(index, states, before, embedded, scales, owners)
        expected, read = heads.step(index, states[before], embedded.float())
        likely = DraftVocabulary.probabilities(read @ lm_rows.T, scales[owners])
        # What enters a product is rounded to a 14000th of its largest.
        assert (found - expected).abs().max() < 1e-3 * expected.abs().max()
        top = likely.topk(TOP, dim=-1)
        assert np.allclose(probabilities, top.values, atol=2e-3)
        chosen = likely.gather(1, torch.from_numpy(places))
        assert np.allclose(probabilities, chosen, atol=2e-3)
        assert all(len(set(row)) == TOP for row in places.tolist())


def test_of_equals_the_one_that_comes_first_is_ahead():
    heads, lm_rows = made(64, 96, 4 * TOP)
    lm_rows[:] = lm_rows[0]
    _, probabilities, places = CpuHeadPass(heads, lm_rows)(
        0, torch.randn(1, 64), [0], torch.randn(1, 64).bfloat16(), torch.ones(1, 2, 4 * TOP), [0]
    )
    assert places.tolist() == [list(range(TOP))]
    assert np.allclose(probabilities, 1 / (4 * TOP))


SCRIPT = """
import sys, torch
torch.set_num_threads(int(sys.argv[1]))
from vllm_tokenswift.heads.cpu_pass import CpuHeadPass
from vllm_tokenswift.heads.model import DraftHeads
torch.manual_seed(0)
heads = DraftHeads("conditioned", 1, 64, 1e-5, 96, vocabulary=torch.arange(500))
torch.nn.init.normal_(heads.layers[0].down.weight)
run = CpuHeadPass(heads, torch.randn(500, 64))
embedded = torch.randn(8, 64).bfloat16()
states, probabilities, places = run(
    0, torch.randn(8, 64), range(8), embedded, torch.ones(1, 2, 500), [0] * 8
)
print(places.tolist(), states.double().sum().item(), probabilities.round(5).tolist())
"""


def test_drafts_do_not_depend_on_the_number_of_threads():
    said = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT, threads],
            env={**os.environ, "OMP_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in ("1", "2", "3")
    }
    assert len(said) == 1
    assert said.pop()
