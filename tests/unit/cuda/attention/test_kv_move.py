"""Moves within overlapping ranges, all layers in one launch, against copies made one by one."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vllm_tokenswift.cuda.attention.cache_layout import CacheLayers
from vllm_tokenswift.cuda.attention.kv_move import move_kv, move_kv_reference


def copy_of(layers: CacheLayers) -> CacheLayers:
    return CacheLayers.of([cache.clone() for cache in layers.caches])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("slots_outermost", [True, False])
def test_every_layer_gets_the_moves_of_every_request(
    dtype: torch.dtype,
    slots_outermost: bool,
    device: torch.device,
    random_caches: Callable[..., CacheLayers],
) -> None:
    layers = random_caches(3, 12, 2, 16, 40, dtype, slots_outermost)
    expected = copy_of(layers)
    # accepted nodes 1, 3, 4, 9 of one tree; 2, 5 of another; slots in scattered blocks
    src = torch.tensor([[-1, 16 * 7 + 3, 16 * 7 + 4, 16 * 2 + 1], [50, 53, -1, -1]])
    dst = torch.tensor([[-1, 16 * 7 + 2, 16 * 7 + 3, 16 * 7 + 4], [49, 50, -1, -1]])
    move_kv(layers, src.to(device), dst.to(device), stripe=64)
    move_kv_reference(expected, src.to(device), dst.to(device))
    for actual, wanted in zip(layers.caches, expected.caches, strict=True):
        assert torch.equal(actual, wanted)


def test_overlapping_ranges_of_any_accepted_path_move_safely(
    device: torch.device, random_caches: Callable[..., CacheLayers]
) -> None:
    """The yardstick takes all sources before it writes any destination."""
    rng = np.random.default_rng(5)
    for _ in range(10):
        layers = random_caches(2, 6, 1, 16, 32, torch.float32)
        before = [c.clone() for c in layers.caches]
        path = np.sort(rng.choice(np.arange(1, 40), 12, replace=False))
        src, dst = torch.from_numpy(20 + path), torch.from_numpy(20 + np.arange(1, 13))
        move_kv(layers, src[None].to(device), dst[None].to(device))
        for old, cache in zip(before, layers.caches, strict=True):
            rows = old.permute(0, 2, 1, 3).reshape(96, -1)
            rows[dst] = rows[src].clone()
            assert torch.equal(cache.permute(0, 2, 1, 3).reshape(96, -1), rows)


def test_layers_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="layer 1"):
        CacheLayers.of([torch.zeros(2, 1, 16, 8), torch.zeros(2, 2, 16, 8)])
