"""What drafts are told of a position's noise is what decides its sample."""

import pytest
import torch

from vllm_tokenswift.sampling.noise import ExponentialSampler, NoiseSampler, noise_sampler

VOCAB = 1000


def samplers() -> list[NoiseSampler]:
    cpu = torch.device("cpu")
    return [noise_sampler(VOCAB, cpu, False), ExponentialSampler(VOCAB, cpu, False)]


@pytest.mark.parametrize("sampler", samplers(), ids=lambda sampler: type(sampler).__name__)
def test_the_token_with_the_smallest_noise_by_probability_is_drawn(sampler: NoiseSampler) -> None:
    generator = torch.Generator().manual_seed(5)
    draws = sampler.new_draws(torch.Generator().manual_seed(1))
    for depth in range(30):
        logits = torch.randn(1, VOCAB, generator=generator) * 2
        noise = draws.noise_at(depth)
        assert noise is not None
        probabilities = logits[0].softmax(-1).tolist()
        expected = min(range(VOCAB), key=lambda token: noise(token) / probabilities[token])
        assert sampler.sample(logits, [draws], [depth]).item() == expected


@pytest.mark.parametrize("sampler", samplers(), ids=lambda sampler: type(sampler).__name__)
def test_a_position_keeps_its_noise_when_those_before_it_are_committed(
    sampler: NoiseSampler,
) -> None:
    draws = sampler.new_draws(torch.Generator().manual_seed(1))
    ahead = draws.noise_at(3)
    draws.commit(3)
    now = draws.noise_at(0)
    assert ahead is not None
    assert now is not None
    assert [ahead(token) for token in range(50)] == [now(token) for token in range(50)]


def test_rows_that_are_not_kept_are_not_shown() -> None:
    """An unseeded request's exponential row is drawn anew: drafts must not depend on it."""
    draws = ExponentialSampler(VOCAB, torch.device("cpu"), False).new_draws(None)
    assert draws.noise_at(0) is None
