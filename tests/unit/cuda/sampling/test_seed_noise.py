"""The noise that drafts are told of is the kernel's own."""

import torch

from vllm_tokenswift.cuda.sampling.row_parameters import RowSampling
from vllm_tokenswift.cuda.sampling.sample_kernel import sample_rows
from vllm_tokenswift.cuda.sampling.seed_noise import SeedNoise


def test_the_token_with_the_smallest_noise_by_probability_is_drawn(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, vocab = 24, 300
    logits = torch.randn(rows, vocab, generator=generator) * 2
    positions = torch.randint(0, 100_000, (rows,), generator=generator)
    draws = [SeedNoise(torch.Generator().manual_seed(seed)) for seed in (7, 2**40 + 3)]
    draws = [draws[row % 2] for row in range(rows)]
    seeds = torch.tensor([draw.seed for draw in draws])
    zeros = torch.zeros(rows, device=device)
    temperature = torch.ones(rows, device=device)
    sampling = RowSampling(seeds.to(device), positions.to(device), temperature, zeros, zeros, zeros)
    sampled = sample_rows(logits.to(device), sampling, chunk=128).tolist()
    for row in range(rows):
        gumbel_noise = draws[row].noise_from(int(positions[row]))
        probabilities = logits[row].softmax(-1).tolist()
        expected = min(
            range(vocab), key=lambda token: gumbel_noise.noise(0, token) / probabilities[token]
        )
        assert sampled[row] == expected, row
