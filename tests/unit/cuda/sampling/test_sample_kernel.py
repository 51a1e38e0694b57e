"""The sampled tokens of the two-pass kernel, against vLLM's own sampler (model runner V2)."""

import pytest
import torch

from vllm_tokenswift.cuda.sampling.row_parameters import RowSampling
from vllm_tokenswift.cuda.sampling.sample_kernel import sample_rows, sample_rows_reference
from vllm_tokenswift.draft.top_tokens import TOP_K, TOP_K_COLUMNS


def sampling_case(
    num_rows: int, vocab: int, device: torch.device, seed: int
) -> tuple[torch.Tensor, RowSampling]:
    """Logits and rows without constraints."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(torch.int64)
    logits = torch.randn(num_rows, vocab, generator=generator) * 3
    rows = RowSampling(
        seeds=torch.randint(limits.min, limits.max, (num_rows,), generator=generator),
        positions=torch.randint(0, 100_000, (num_rows,), generator=generator),
        temperature=torch.ones(num_rows),
        min_p=torch.zeros(num_rows),
        eta_epsilon=torch.zeros(num_rows),
        eta_alpha=torch.zeros(num_rows),
    )
    return logits.to(device), RowSampling(*(values.to(device) for values in rows))


@pytest.mark.parametrize(("vocab", "use_fp64"), [(999, False), (2048, False), (1500, True)])
def test_every_kind_of_row_samples_the_same_token(
    vocab: int, use_fp64: bool, device: torch.device
) -> None:
    for seed in range(2):
        logits, rows = sampling_case(12, vocab, device, seed)
        rows.temperature[::4] = 0.7
        rows.temperature[1::4] = 0.0
        rows.min_p[::3] = 0.1
        rows.eta_epsilon[::2] = 0.02
        rows.eta_alpha[::2] = 0.02**0.5
        # eta is computed from what min-p left, in the eager order; they are not combined
        rows.min_p[::2] = 0.0
        logits[:, ::5] = float("-inf")  # what top-p or allowed tokens masked
        actual = sample_rows(logits, rows, use_fp64=use_fp64, chunk=512)
        assert actual.tolist() == sample_rows_reference(logits, rows, use_fp64=use_fp64).tolist()


@pytest.mark.parametrize("has_constraints", [True, False])
def test_the_likeliest_are_those_of_the_constrained_row(
    has_constraints: bool, device: torch.device
) -> None:
    logits, rows = sampling_case(12, 1500, device, seed=3)
    rows.temperature[::4] = 0.7
    logits[:, ::5] = float("-inf")
    logits[5, 7] = 40.0  # one alone has a chance
    if has_constraints:
        rows.min_p[::3] = 0.1
        rows.eta_epsilon[1::3] = 0.02
        rows.eta_alpha[1::3] = 0.02**0.5
    shape = (12, TOP_K_COLUMNS)
    actual, expected = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
    sampled = sample_rows(
        logits, rows, has_constraints=has_constraints, verify_top_k=actual, chunk=512
    )
    assert sampled.tolist() == sample_rows_reference(logits, rows, verify_top_k=expected).tolist()
    tokens = expected[:, :TOP_K]
    assert actual[:, :TOP_K].tolist() == tokens.tolist()
    assert (tokens[5] >= 0).sum() == 1
    assert (tokens[0] >= 0).sum() > 1
    probabilities = [top_k.view(torch.float32)[:, TOP_K:] for top_k in (actual, expected)]
    torch.testing.assert_close(
        probabilities[0][tokens >= 0], probabilities[1][tokens >= 0], rtol=1e-5, atol=0
    )


def test_rows_without_constraints_need_no_statistics(device: torch.device) -> None:
    logits, rows = sampling_case(12, 2048, device, seed=9)
    rows.temperature[3] = 0.0
    actual = sample_rows(logits, rows, has_constraints=False, chunk=512)
    assert actual.tolist() == sample_rows_reference(logits, rows).tolist()


def test_rows_of_one_seed_and_position_share_their_noise(device: torch.device) -> None:
    logits, rows = sampling_case(6, 1000, device, seed=4)
    for values in (rows.seeds, rows.positions):
        values[:] = values[0].clone()
    logits[:] = logits[0].clone()
    assert len(set(sample_rows(logits, rows, chunk=256).tolist())) == 1
    rows.positions.add_(torch.arange(6, device=device))
    assert len(set(sample_rows(logits, rows, chunk=256).tolist())) > 1


def test_constraints_keep_the_likeliest_token_and_drop_the_rest(device: torch.device) -> None:
    logits, rows = sampling_case(8, 1000, device, seed=2)
    rows.min_p[:4] = 1.0
    rows.eta_epsilon[4:] = 1.0
    rows.eta_alpha[4:] = 1e9
    likeliest = logits.argmax(-1)
    assert sample_rows(logits, rows, chunk=256).tolist() == likeliest.tolist()
