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
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


# Layouts whose views are kept; a batch of changing size and texts need some dozens.
_MAX_LAYOUTS = 256


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
        offsets = []
        end = 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > len(self._bytes):
            self._grow(2 * end)
        elif len(self._layouts) >= _MAX_LAYOUTS:
            self._layouts.clear()
        places, tensors = [], []
        for offset, array in zip(offsets, arrays, strict=True):
            span = slice(offset, offset + array.nbytes)
            places.append(self._bytes[span].view(array.dtype).reshape(array.shape))
            tensor = self._device[span].view(_TORCH_TYPES[array.dtype])
            tensors.append(tensor.view(array.shape))
        return _Layout(places, tensors, self._host[:end], self._device[:end])
