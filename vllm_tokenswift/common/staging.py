"""Small arrays from the host to the device in one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import PIN_MEMORY, current_stream

_ALIGNMENT = 16  # bytes; Triton loads are wider where addresses divide by it

_TORCH_TYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


# Layouts whose views are kept; a batch of changing size and texts need some dozens.
_MAX_LAYOUTS = 256


def spans_of(sizes: Sequence[int]) -> tuple[list[slice], int]:
    """Where arrays of so many bytes lie in a buffer, one after another; and where that ends."""
    spans, end = [], 0
    for size in sizes:
        spans.append(slice(end, end + size))
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return spans, end


def views_at(
    span: slice,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    host: npt.NDArray[np.uint8],
    device: torch.Tensor,
) -> tuple[npt.NDArray[Any], torch.Tensor]:
    """An array of that type and shape in a host's buffer, and its twin in the device's."""
    return host[span].view(dtype).reshape(shape), device[span].view(_TORCH_TYPES[dtype]).view(shape)


@dataclass(frozen=True)
class _Layout:
    """Where arrays of certain shapes and types lie; views of both buffers."""

    places: list[npt.NDArray[np.generic]]
    tensors: list[torch.Tensor]
    host: torch.Tensor
    device: torch.Tensor


class Staging:
    """A pinned buffer and its twin on the device, both as large as was ever needed.

    What :meth:`to_device` returns is valid until its next call, on the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self._grow(1 << 14)

    def _grow(self, num_bytes: int) -> None:
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=PIN_MEMORY)
        self._bytes = self._host.numpy()
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._layouts: dict[tuple[Any, ...], _Layout] = {}

    def to_device(self, *arrays: npt.NDArray[np.generic]) -> list[torch.Tensor]:
        """The arrays (int32, int64 or float32) as tensors of the same shapes and types."""
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read the buffer
        # Making views takes the host longer than the copy does.
        key = tuple((array.dtype.char, array.shape) for array in arrays)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._lay_out(arrays)
            self._layouts[key] = layout
        for place, array in zip(layout.places, arrays, strict=True):
            place[...] = array
        layout.device.copy_(layout.host, non_blocking=True)
        if self._copied is not None:
            self._copied.record(current_stream())
        return list(layout.tensors)

    def _lay_out(self, arrays: Sequence[npt.NDArray[np.generic]]) -> _Layout:
        spans, end = spans_of([array.nbytes for array in arrays])
        if end > len(self._bytes):
            self._grow(2 * end)
        elif len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        places, tensors = [], []
        for span, array in zip(spans, arrays, strict=True):
            place, tensor = views_at(span, array.dtype, array.shape, self._bytes, self._device)
            places.append(place)
            tensors.append(tensor)
        return _Layout(places, tensors, self._host[:end], self._device[:end])
