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

from vllm_tokenswift.common.staging import spans_of, views_at


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
        spans, end = spans_of([shape.num_bytes for shape in shapes.values()])
        self._spans = dict(zip(shapes, spans, strict=True))
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=PIN_MEMORY)
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        for name, shape in shapes.items():
            span, dtype = self._spans[name], np.dtype(shape.dtype)
            self.host[name], self.device[name] = views_at(
                span, dtype, shape.shape, self._host.numpy(), self._device
            )

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
