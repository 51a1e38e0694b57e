"""A conditioned head's pass on a CPU, in one call of compiled code (``cpu_pass.c``).

The installation compiles it where there is a C compiler; without it, and beyond
:data:`MAX_ROWS`, heads go through torch, which comes to the same tokens but for int8's
rounding and takes twice the time.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import cache
from typing import cast

import numpy as np
import torch

from vllm_tokenswift.heads.model import ConditionedHead, DraftHeads

# As in cpu_pass.c.
MAX_ROWS = 8
TOP = 8


class _Linear(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
    )


class _Head(ctypes.Structure):
    _fields_ = (
        ("state_norm", ctypes.c_void_p),
        ("token_norm", ctypes.c_void_p),
        ("read_norm", ctypes.c_void_p),
        ("up", _Linear),
        ("down", _Linear),
        ("eps", ctypes.c_float),
    )


@cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("vllm_tokenswift.heads._cpu_pass")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    library.tokenswift_head_pass.restype = None
    return library


def is_compiled() -> bool:
    """Whether the installation has the compiled pass."""
    return _library() is not None


class CpuHeadPass:
    """The heads' weights in int8, and the pass over them.

    heads: of the ``conditioned`` form, with a vocabulary of at least :data:`TOP` tokens.
    lm_rows: ``[vocabulary of the heads, hidden]``, the LM head's rows of it.
    """

    def __init__(self, heads: DraftHeads, lm_rows: torch.Tensor) -> None:
        library = _library()
        assert library is not None
        assert len(lm_rows) >= TOP
        self._run = library.tokenswift_head_pass
        self._kept: list[torch.Tensor] = []  # what the structures point to
        self.hidden_size = heads.hidden_size
        self._lm = self._linear(lm_rows)
        self._heads = [self._head(cast("ConditionedHead", layer)) for layer in heads.layers]
        hidden, width = heads.hidden_size, self._heads[0].up.outputs
        floats = 2 * hidden + MAX_ROWS * (hidden + 2 * width + len(lm_rows))
        self._work = np.empty(floats, np.float32)

    def _floats(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.detach().float().contiguous())
        return self._kept[-1].data_ptr()

    def _linear(self, weight: torch.Tensor) -> _Linear:
        wide = weight.detach().float()
        scale = wide.abs().amax(dim=1).clamp_(min=1e-12) / 127
        self._kept.append((wide / scale[:, None]).round_().to(torch.int8).contiguous())
        return _Linear(
            self._kept[-1].data_ptr(), self._floats(scale), weight.shape[1], weight.shape[0]
        )

    def _head(self, head: ConditionedHead) -> _Head:
        return _Head(
            self._floats(head.input_layernorm.weight),
            self._floats(head.token_layernorm.weight),
            self._floats(head.post_layernorm.weight),
            self._linear(head.up.weight),
            self._linear(head.down.weight),
            head.input_layernorm.eps,
        )

    def __call__(
        self,
        index: int,
        states: torch.Tensor,
        before: Sequence[int],
        embedded: torch.Tensor,
        scales: torch.Tensor,
        owners: Sequence[int],
    ) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
        """One head for at most :data:`MAX_ROWS` rows.

        states: float32 ``[any, hidden]``, ``h_{i-1}``; before: each row's row of it.
        embedded: bfloat16 ``[rows, hidden]``, of the token before the one predicted.
        scales: float32 ``[requests, 2, vocabulary of the heads]``, what positive and negative
            logits are multiplied by; owners: each row's request.
        Returns ``h_i`` (float32 ``[rows, hidden]``), and of the :data:`TOP` likeliest tokens
        the probabilities (float32) and the places in the heads' vocabulary (int64), both
        ``[rows, TOP]``, likeliest first.
        """
        rows = len(before)
        assert rows <= MAX_ROWS
        assert states.dtype == scales.dtype == torch.float32
        assert embedded.dtype == torch.bfloat16
        states, embedded, scales = states.contiguous(), embedded.contiguous(), scales.contiguous()
        new_states = torch.empty(rows, self.hidden_size)
        probabilities = np.empty((rows, TOP), np.float32)
        places = np.empty((rows, TOP), np.int64)
        row_before = np.array(before, np.int32)
        owner = np.array(owners, np.int32)
        self._run(
            ctypes.byref(self._heads[index]),
            ctypes.byref(self._lm),
            ctypes.c_int32(rows),
            ctypes.c_void_p(states.data_ptr()),
            ctypes.c_void_p(row_before.ctypes.data),
            ctypes.c_void_p(embedded.data_ptr()),
            ctypes.c_void_p(scales.data_ptr()),
            ctypes.c_void_p(owner.ctypes.data),
            ctypes.c_void_p(self._work.ctypes.data),
            ctypes.c_void_p(new_states.data_ptr()),
            ctypes.c_void_p(probabilities.ctypes.data),
            ctypes.c_void_p(places.ctypes.data),
        )
        return new_states, probabilities, places
