"""Where the rows of vLLM's paged KV cache lie, for kernels that touch all layers at once.

vLLM 0.32 and 0.33 give each layer a logical view ``[num_blocks, num_kv_heads,
block_size, 2 * head_size]``, K before V in the last axis, physically in any of
``KVCacheLayout``'s orders (vllm/v1/kv_cache_layout.py; FlashAttention's default is
``LBNHC``, where all heads of a slot are contiguous).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class CacheLayers:
    """The KV caches of all layers, as one table of addresses and one set of strides.

    Strides are in elements and the same for all layers.

    Attributes:
        caches: the layers' views, kept so that their memory stays alive.
        addresses: int64 ``[num_layers]`` on the device, the views' data pointers.
    """

    caches: tuple[torch.Tensor, ...]
    addresses: torch.Tensor

    @classmethod
    def of(cls, caches: Sequence[torch.Tensor]) -> CacheLayers:
        """Of the layers' views.

        Args:
            caches: each ``[num_blocks, num_kv_heads, block_size, 2 * head_size]``.

        Raises:
            ValueError: Where the layers do not share shape, strides and type, or the last axis is
                not contiguous.
        """
        first = caches[0]
        for i, cache in enumerate(caches):
            if (cache.shape, cache.stride(), cache.dtype) != (
                first.shape,
                first.stride(),
                first.dtype,
            ):
                raise ValueError(
                    f"the KV cache of layer {i} is {tuple(cache.shape)} {cache.dtype}, layer 0's "
                    f"is {tuple(first.shape)} {first.dtype}: TokenSwift needs all layers alike"
                )
        if first.stride(3) != 1:
            raise ValueError("the KV cache's last axis must be contiguous")
        addresses = torch.tensor([c.data_ptr() for c in caches], dtype=torch.int64)
        return cls(tuple(caches), addresses.to(first.device))

    @property
    def num_layers(self) -> int:
        return len(self.caches)

    @property
    def num_kv_heads(self) -> int:
        return self.caches[0].shape[1]

    @property
    def block_size(self) -> int:
        return self.caches[0].shape[2]

    @property
    def head_size(self) -> int:
        return self.caches[0].shape[3] // 2

    @property
    def dtype(self) -> torch.dtype:
        return self.caches[0].dtype

    @property
    def strides(self) -> tuple[int, int, int]:
        """Elements from one block, one KV head and one token of a block to the next."""
        block, head, token, _ = self.caches[0].stride()
        return block, head, token
