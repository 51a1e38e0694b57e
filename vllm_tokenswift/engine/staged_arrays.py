"""Named arrays on the host whose twins on the device are always the same memory.

As a CUDA graph needs: it can hold the copy, and what reads the twins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import PIN_MEMORY

_ALIGNMENT = 16  # bytes; Triton loads are wider where addresses divide by it

_TORCH_TYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


@dataclass(frozen=True)
class ArrayShape:
    shape: tuple[int, ...]
    dtype: type[np.generic]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class StagedArrays:
    """``host[name]`` and ``device[name]`` of every shape, zero at first, in the shapes' order."""

    def __init__(self, device: torch.device, shapes: Mapping[str, ArrayShape]) -> None:
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.device: dict[str, torch.Tensor] = {}
        self._spans: dict[str, slice] = {}
        end = 0
        for name, shape in shapes.items():
            self._spans[name] = slice(end, end + shape.num_bytes)
            end += -(-shape.num_bytes // _ALIGNMENT) * _ALIGNMENT
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=PIN_MEMORY)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        for name, shape in shapes.items():
            dtype = np.dtype(shape.dtype)
            span = self._spans[name]
            self.host[name] = self._host.numpy()[span].view(dtype).reshape(shape.shape)
            self.device[name] = self._device[span].view(_TORCH_TYPES[dtype]).view(shape.shape)

    def to_device(self, upto: int | None = None) -> None:
        """Copies all arrays, or the first ``upto`` bytes; nobody waits for it."""
        self._device[:upto].copy_(self._host[:upto], non_blocking=True)

    def to_host(self, name: str) -> None:
        """Copies one array back; nobody waits for it."""
        span = self._spans[name]
        self._host[span].copy_(self._device[span], non_blocking=True)

    def start(self, name: str) -> int:
        """The byte at which an array begins."""
        first: int = self._spans[name].start
        return first
