"""The sampled tokens of the two-pass kernel, against vLLM's own sampler (model runner V2)."""

import pytest
import torch

from vllm_tokenswift.cuda.sampling.sample_kernel import sample_rows, sample_rows_reference
from vllm_tokenswift.draft.top_tokens import TOP_K, TOP_K_COLUMNS


def sampling_case(
    rows: int, vocab: int, device: torch.device, seed: int
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(torch.int64)
    case = {
        "logits": torch.randn(rows, vocab, generator=generator) * 3,
        "seeds": torch.randint(limits.min, limits.max, (rows,), generator=generator),
        "positions": torch.randint(0, 100_000, (rows,), generator=generator),
        "temperature": torch.ones(rows),
        "min_p": torch.zeros(rows),
        "eta_epsilon": torch.zeros(rows),
        "eta_alpha": torch.zeros(rows),
    }
    return {name: value.to(device) for name, value in case.items()}


@pytest.mark.parametrize(("vocab", "use_fp64"), [(999, False), (2048, False), (1500, True)])
def test_every_kind_of_row_samples_the_same_token(
    vocab: int, use_fp64: bool, device: torch.device
) -> None:
    for seed in range(2):
        case = sampling_case(12, vocab, device, seed)
        case["temperature"][::4] = 0.7
        case["temperature"][1::4] = 0.0
        case["min_p"][::3] = 0.1
        case["eta_epsilon"][::2] = 0.02
        case["eta_alpha"][::2] = 0.02**0.5
        # eta is computed from what min-p left, in the eager order; they are not combined
        case["min_p"][::2] = 0.0
        case["logits"][:, ::5] = float("-inf")  # what top-p or allowed tokens masked
        actual = sample_rows(**case, use_fp64=use_fp64, chunk=512)
        assert actual.tolist() == sample_rows_reference(**case, use_fp64=use_fp64).tolist()


@pytest.mark.parametrize("has_constraints", [True, False])
def test_the_likeliest_are_those_of_the_constrained_row(
    has_constraints: bool, device: torch.device
) -> None:
    case = sampling_case(12, 1500, device, seed=3)
    case["temperature"][::4] = 0.7
    case["logits"][:, ::5] = float("-inf")
    case["logits"][5, 7] = 40.0  # one alone has a chance
    if has_constraints:
        case["min_p"][::3] = 0.1
        case["eta_epsilon"][1::3] = 0.02
        case["eta_alpha"][1::3] = 0.02**0.5
    shape = (12, TOP_K_COLUMNS)
    actual, expected = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
    sampled = sample_rows(**case, has_constraints=has_constraints, verify_top_k=actual, chunk=512)
    assert sampled.tolist() == sample_rows_reference(**case, verify_top_k=expected).tolist()
    tokens = expected[:, :TOP_K]
    assert actual[:, :TOP_K].tolist() == tokens.tolist()
    assert (tokens[5] >= 0).sum() == 1
    assert (tokens[0] >= 0).sum() > 1
    probabilities = [rows.view(torch.float32)[:, TOP_K:] for rows in (actual, expected)]
    torch.testing.assert_close(
        probabilities[0][tokens >= 0], probabilities[1][tokens >= 0], rtol=1e-5, atol=0
    )


def test_rows_without_constraints_need_no_statistics(device: torch.device) -> None:
    case = sampling_case(12, 2048, device, seed=9)
    case["temperature"][3] = 0.0
    actual = sample_rows(**case, has_constraints=False, chunk=512)
    assert actual.tolist() == sample_rows_reference(**case).tolist()


def test_rows_of_one_seed_and_position_share_their_noise(device: torch.device) -> None:
    case = sampling_case(6, 1000, device, seed=4)
    for name in ("seeds", "positions"):
        case[name][:] = case[name][0].clone()
    case["logits"][:] = case["logits"][0].clone()
    assert len(set(sample_rows(**case, chunk=256).tolist())) == 1
    case["positions"] += torch.arange(6, device=device)
    assert len(set(sample_rows(**case, chunk=256).tolist())) > 1


def test_constraints_keep_the_likeliest_token_and_drop_the_rest(device: torch.device) -> None:
    case = sampling_case(8, 1000, device, seed=2)
    case["min_p"][:4] = 1.0
    case["eta_epsilon"][4:] = 1.0
    case["eta_alpha"][4:] = 1e9
    likeliest = case["logits"].argmax(-1)
    assert sample_rows(**case, chunk=256).tolist() == likeliest.tolist()
