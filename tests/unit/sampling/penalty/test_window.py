"""The windowed penalty: once per distinct token of the last W, path included."""

from __future__ import annotations

import random

import pytest
import torch
from sampling_reference import CPU

from vllm_tokenswift.sampling.penalty.window import TokenWindow, penalise, window_indices

VOCAB = 20


def eager_penalty(logits: list[float], text: list[int], size: int, theta: float) -> list[float]:
    """The definition, token by token; float32 division as torch does it."""
    result = torch.tensor(logits)
    for token in set(text[-size:]):
        value = result[token]
        result[token] = value / theta if value > 0 else value * theta
    return result.tolist()


def test_the_window_is_the_last_tokens_after_any_number_of_appends() -> None:
    rng = random.Random(0)
    for size in (1, 2, 5, 64):
        text = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))]
        window = TokenWindow(size, text)
        for _ in range(300):
            new = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 1, 1, 2, 7, 150]))]
            text += new
            window.append_tokens(new)
            assert window.tokens.tolist() == text[-size:]


def test_the_window_over_a_prompt_and_an_output_spans_both() -> None:
    for num_prompt in range(5):
        for num_output in range(5):
            prompt, output = list(range(num_prompt)), list(range(10, 10 + num_output))
            window = TokenWindow.over(3, prompt, output)
            assert window.tokens.tolist() == (prompt + output)[-3:]


def test_memory_of_a_window_does_not_grow_with_the_text() -> None:
    window = TokenWindow(8, [1])
    buffer = window._buffer
    for token in range(10_000):
        window.append_tokens([token])
    assert window._buffer is buffer


def test_rows_of_many_requests_and_depths_follow_the_definition() -> None:
    rng = random.Random(1)
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        texts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(4)]
        sizes = [rng.choice([1, 2, 3, 8, 40]) for _ in texts]
        thetas = [1.0 + rng.random() for _ in texts]
        windows = [TokenWindow(size, text) for size, text in zip(sizes, texts, strict=True)]
        owners = [rng.randrange(4) for _ in range(9)]
        deepest = rng.choice([0, 2, 5])
        paths = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, deepest))] for _ in owners]
        logits = torch.randn(10, VOCAB, generator=generator)
        expected = logits.clone()
        rows = rng.sample(range(10), 9)  # one row belongs to nobody
        for row, owner, path in zip(rows, owners, paths, strict=True):
            expected[row] = torch.tensor(
                eager_penalty(
                    logits[row].tolist(), texts[owner] + path, sizes[owner], thetas[owner]
                )
            )
        tokens = window_indices(windows, owners, paths, CPU)
        theta = torch.tensor([[thetas[owner]] for owner in owners])
        penalise(logits, torch.tensor(rows).unsqueeze(1), tokens, theta)
        assert torch.equal(logits, expected)


@pytest.mark.parametrize("value", [2.0, -2.0, 0.0, -float("inf")])
def test_a_token_is_penalised_once_however_often_it_occurs(value: float) -> None:
    logits = torch.full((1, VOCAB), value)
    window = TokenWindow(16, [3] * 16)
    tokens = window_indices([window], [0], [[3, 3]], CPU)
    penalise(logits, torch.tensor([[0]]), tokens, torch.tensor([[2.0]]))
    assert logits[0, 3] == (value / 2 if value > 0 else value * 2)
    assert logits[0, 4] == value
