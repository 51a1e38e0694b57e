"""Kernels run in Triton's interpreter where there is no GPU: same code, on CPU tensors.

Triton must be told before its import, so without a GPU these tests are collected only with
``TRITON_INTERPRET=1`` in the environment (``tests/unit/test_cuda_kernels.py`` runs them so).
"""

import os
from collections.abc import Callable, Iterator

import pytest
import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["*test_*.py"]  # in its folders too
else:
    if not ON_GPU:
        # vLLM switches its own Triton off where it sees no GPU; our kernels call its functions.
        import triton
        from vllm import triton_utils

        triton_utils.triton, triton_utils.tl = triton, triton.language
    from vllm_tokenswift.cuda.attention.cache_layout import CacheLayers


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture
def random_caches(device: torch.device) -> Callable[..., "CacheLayers"]:
    """Paged KV caches with random contents, in vLLM's logical shape and two physical orders."""

    def make(
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
        slots_outermost: bool = True,
    ) -> "CacheLayers":
        """slots_outermost: order ``LBNHC`` (FlashAttention's default), else ``LBHNC``."""
        generator = torch.Generator().manual_seed(num_blocks)
        shape = (num_layers, num_blocks, num_kv_heads, block_size, 2 * head_size)
        caches = (torch.randn(shape, generator=generator) * 3).to(dtype).to(device)
        if slots_outermost:
            caches = caches.transpose(2, 3).contiguous().transpose(2, 3)
        return CacheLayers.of(list(caches))

    return make


@pytest.fixture(scope="session", autouse=ON_GPU)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM captures graphs together with the ranks of its groups: here one of one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{meeting}", 0, "nccl")
        initialize_model_parallel(1)
        yield
    cleanup_dist_env_and_memory()
