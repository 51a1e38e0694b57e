"""What drafts are told of a position's noise is what decides its sample."""

import pytest
import torch
from vllm.platforms import current_platform

from vllm_tokenswift.sampling.position_noise import ExponentialSampler, NoiseSampler, noise_sampler

VOCAB = 1000

current_platform.import_kernels()  # vLLM's sampling on the CPU is one of them


def sampler() -> NoiseSampler:
    return noise_sampler(VOCAB, torch.device("cpu"), False)


def test_the_token_with_the_smallest_noise_by_probability_is_drawn() -> None:
    generator = torch.Generator().manual_seed(5)
    draws = sampler().new_draws(torch.Generator().manual_seed(1))
    gumbel_noise = draws.coming_noise()
    assert gumbel_noise is not None
    for depth in range(30):
        logits = torch.randn(1, VOCAB, generator=generator) * 2
        probabilities = logits[0].softmax(-1).tolist()
        expected = min(
            range(VOCAB), key=lambda token: gumbel_noise.noise(depth, token) / probabilities[token]
        )
        assert sampler().sample(logits, [draws], [depth]).item() == expected


def test_a_position_keeps_its_noise_when_those_before_it_are_committed() -> None:
    draws = sampler().new_draws(torch.Generator().manual_seed(1))
    ahead = draws.coming_noise()
    assert ahead is not None
    before = [ahead.noise(3, token) for token in range(50)]
    draws.drop_draws(3)
    now = draws.coming_noise()
    assert now is not None
    assert before == [now.noise(0, token) for token in range(50)]


@pytest.mark.parametrize("seed", [None, 1])
def test_drafts_do_not_look_at_exponential_rows(seed: int | None) -> None:
    """An unseeded request's row is drawn anew: drafts must not depend on it."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    draws = ExponentialSampler(VOCAB, torch.device("cpu"), False).new_draws(generator)
    assert draws.coming_noise() is None
