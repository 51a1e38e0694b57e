"""Slices of paged prefixes, put together by the tree kernel, against the eager twins."""

from collections.abc import Callable

import pytest
import torch

from vllm_tokenswift.cuda.attention.cache_layout import CacheLayers
from vllm_tokenswift.cuda.attention.prefix_kernel import (
    prefix_attention,
    prefix_attention_reference,
)

ON_GPU = torch.cuda.is_available()


def combined(states: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One state from several slices: [rows, heads, size] and [heads, rows]."""
    weights = lse.softmax(0).nan_to_num()  # all slices empty: nothing
    filled = states.masked_fill((lse == -torch.inf).transpose(1, 2).unsqueeze(-1), 0)
    return (weights.transpose(1, 2).unsqueeze(-1) * filled).sum(0), lse.logsumexp(0)


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize(
    ("heads", "head_size", "dtype"),
    [
        ((6, 2), 64, torch.float32),
        ((4, 1), 96, torch.float16),
        ((2, 2), 128, torch.bfloat16 if ON_GPU else torch.float32),
    ],
)
def test_slices_together_equal_attention_over_the_prefix(
    num_slices: int,
    block_size: int,
    heads: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    random_caches: Callable[..., CacheLayers],
) -> None:
    cache = random_caches(1, 30, heads[1], block_size, head_size, dtype).caches[0]
    generator = torch.Generator().manual_seed(4)
    starts = torch.tensor([0, 9, 9, 10, 21], dtype=torch.int32, device=device)
    query = torch.randn(21, heads[0], head_size, generator=generator).to(dtype).to(device)
    table = torch.randperm(30, generator=generator)[:28].reshape(4, 7).int().to(device)
    # part of a block; a padded tree of no rows; nothing cached; all of the table
    lens = torch.tensor([3 * block_size + 7, 20, 0, 7 * block_size], dtype=torch.int32)
    arguments = (query, cache, table, lens.to(device), starts, head_size**-0.5)
    actual = combined(*prefix_attention(*arguments, max_rows=11, num_slices=num_slices, block_m=16))
    expected, expected_lse = prefix_attention_reference(*arguments)
    # weights are rounded to the value's type before the second product
    tolerance = 2e-5 if dtype is torch.float32 else (3e-3 if dtype is torch.float16 else 2e-2)
    torch.testing.assert_close(actual[0], expected[0], atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(actual[1], expected_lse[0], atol=1e-4, rtol=1e-4)
