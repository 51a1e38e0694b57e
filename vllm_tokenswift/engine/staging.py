"""Small arrays from the host to the device in one copy that nobody waits for."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from vllm.utils.torch_utils import PIN_MEMORY

_ALIGNMENT = 16  # bytes; Triton loads are wider where addresses divide by it

_TORCH_TYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}


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

    def to_device(self, *arrays: npt.NDArray[np.generic]) -> list[torch.Tensor]:
        """The arrays (int32, int64 or float32) as tensors of the same shapes and types."""
        offsets = []
        end = 0
        for array in arrays:
            offsets.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._copied is not None:
            self._copied.synchronize()  # the last copy may still read the buffer
        if end > len(self._bytes):
            self._grow(2 * end)
        for offset, array in zip(offsets, arrays, strict=True):
            place = self._bytes[offset : offset + array.nbytes]
            place.view(array.dtype).reshape(array.shape)[...] = array
        self._device[:end].copy_(self._host[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        return [
            self._device[offset : offset + array.nbytes]
            .view(_TORCH_TYPES[array.dtype])
            .view(array.shape)
            for offset, array in zip(offsets, arrays, strict=True)
        ]
