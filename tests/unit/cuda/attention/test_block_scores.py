"""Masses of all layers and requests at once, against the eager twin."""

from collections.abc import Callable

import pytest
import torch

from vllm_tokenswift.cuda.attention.block_scores import block_scores, block_scores_reference
from vllm_tokenswift.cuda.attention.cache_layout import CacheLayers

ON_GPU = torch.cuda.is_available()


@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"),
    [
        ((8, 2), 64, torch.float32),
        ((3, 1), 80, torch.float16),
        ((2, 2), 128, torch.bfloat16 if ON_GPU else torch.float32),
    ],
)
def test_masses_equal_the_eager_twin(
    block_size: int,
    heads: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    random_caches: Callable[..., CacheLayers],
) -> None:
    layers = random_caches(2, 40, heads[1], block_size, head_size, dtype)
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 3, heads[0], head_size, generator=generator).to(dtype).to(device)
    table = torch.randperm(40, generator=generator)[:33].reshape(3, 11).int().to(device)
    # a part of a block, whole blocks, and a padded request
    lens = torch.tensor([9 * block_size + 5, 11 * block_size, 0], dtype=torch.int32, device=device)
    scale = head_size**-0.5
    actual = block_scores(queries, layers, table, lens, scale)
    expected = block_scores_reference(queries, layers, table, lens, scale)
    # sums of exponentials in another order; float16 products are exact in float32
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        actual[:, :2].sum(-1), torch.full((2, 2), float(heads[0]), device=device), rtol=1e-4, atol=0
    )


def test_large_scores_do_not_overflow(
    device: torch.device, random_caches: Callable[..., CacheLayers]
) -> None:
    layers = random_caches(1, 8, 1, 16, 64, torch.float32)
    queries = torch.full((1, 1, 1, 64), 100.0, device=device)
    table = torch.arange(8, dtype=torch.int32, device=device)[None]
    lens = torch.tensor([128], dtype=torch.int32, device=device)
    actual = block_scores(queries, layers, table, lens, 1.0)
    expected = block_scores_reference(queries, layers, table, lens, 1.0)
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)
