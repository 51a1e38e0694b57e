"""The sampled tokens of the two-pass kernel, against vLLM's order of operations."""

import pytest
import torch

from vllm_tokenswift.cuda.scorer import sample_rows, sample_rows_reference


def scorer_case(rows: int, vocab: int, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise_rows = torch.randint(0, 5, (rows,), generator=generator, dtype=torch.int32)
    case = {
        "logits": torch.randn(rows, vocab, generator=generator) * 3,
        "noise": torch.empty(5, vocab).exponential_(generator=generator),
        "noise_rows": noise_rows,
        "temperature": torch.ones(rows),
        "min_p": torch.zeros(rows),
        "eta_epsilon": torch.zeros(rows),
        "eta_alpha": torch.zeros(rows),
    }
    return {name: value.to(device) for name, value in case.items()}


@pytest.mark.parametrize("vocab", [999, 2048])
def test_every_kind_of_row_samples_the_same_token(vocab: int, device: torch.device) -> None:
    for seed in range(2):
        case = scorer_case(12, vocab, device, seed)
        case["temperature"][::4] = 0.7
        case["temperature"][1::4] = 0.0
        case["min_p"][::3] = 0.1
        case["eta_epsilon"][::2] = 0.02
        case["eta_alpha"][::2] = 0.02**0.5
        # eta is computed from what min-p left, in the eager order; they are not combined
        case["min_p"][::2] = 0.0
        case["logits"][:, ::5] = float("-inf")  # what top-p or allowed tokens masked
        actual = sample_rows(**case, chunk=512)
        assert actual.tolist() == sample_rows_reference(**case).tolist()


def test_the_sample_is_that_of_vllms_random_sample(device: torch.device) -> None:
    case = scorer_case(12, 2048, device, seed=9)
    probabilities = case["logits"].softmax(-1, dtype=torch.float32)
    expected = probabilities.div(case["noise"][case["noise_rows"].long()]).argmax(-1)
    assert sample_rows(**case, chunk=512).tolist() == expected.tolist()


def test_constraints_keep_the_likeliest_token_and_drop_the_rest(device: torch.device) -> None:
    case = scorer_case(8, 1000, device, seed=2)
    case["min_p"][:4] = 1.0
    case["eta_epsilon"][4:] = 1.0
    case["eta_alpha"][4:] = 1e9
    likeliest = case["logits"].argmax(-1)
    assert sample_rows(**case, chunk=256).tolist() == likeliest.tolist()
