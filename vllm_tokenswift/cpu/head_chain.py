"""Sequential heads on a CPU, along the likeliest paths in one call of compiled code.

``head_chain.c`` is compiled at installation where there is a C compiler. Without it the heads
go through torch, one by one, which takes longer.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from vllm_tokenswift.heads.model import DraftHeads, SequentialHead

# As in head_chain.c; TOP and BEAM_WIDTH as in engine/head_beam.py.
MAX_ROWS = 32
TOP = 8
BEAM_WIDTH = 2

ROW = np.dtype(
    [
        ("request", np.int32),
        ("above", np.int32),
        ("place", np.int32),
        ("chance", np.float32),
        ("tokens", np.int32, TOP),
        ("places", np.int32, TOP),
        ("chances", np.float32, TOP),
    ]
)


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


class _Chain(ctypes.Structure):
    _fields_ = (
        ("heads", ctypes.c_void_p),
        ("lm", _Linear),
        ("embeddings", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
    )


class _Request(ctypes.Structure):
    _fields_ = (
        ("in_window", ctypes.c_void_p),
        ("outside", ctypes.c_float),
        ("positive", ctypes.c_float),
        ("negative", ctypes.c_float),
        ("keys", ctypes.c_void_p),
        ("noise_power", ctypes.c_float),
    )


@cache
def _library() -> ctypes.CDLL | None:
    spec = importlib.util.find_spec("vllm_tokenswift.cpu._head_chain")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    library.tokenswift_descend.restype = None
    return library


def is_compiled() -> bool:
    """Whether the installation has the compiled heads."""
    return _library() is not None


@dataclass(frozen=True)
class HeadNoise:
    """What is known of the noise that will decide a request's samples.

    Args:
        keys: for each head the state of the noise at its tokens' position
            (``SeedDraws.key_at``).
        power: how far it counts, see ``draft/gumbel_noise.py``.
    """

    keys: Sequence[int]
    power: float


@dataclass(frozen=True)
class LogitScales:
    """What a request's logits are multiplied by.

    Args:
        in_window: uint8 ``[vocabulary of the heads]``, 1 for the tokens of the penalty's
            window.
        outside: factor of the logits of all other tokens.
        positive: of the positive logits of tokens in the window.
        negative: of their negative logits.
    """

    in_window: npt.NDArray[np.uint8]
    outside: float
    positive: float
    negative: float


class CpuHeadChain:
    """The heads' weights in int8, and their run.

    Args:
        heads: of the ``sequential`` form, with a vocabulary of at least :data:`TOP` tokens.
        lm_rows: ``[vocabulary of the heads, hidden]``, the rows of the target's LM head for it.
        embeddings: ``[vocabulary of the heads, hidden]``, those of its embedding.
    """

    def __init__(self, heads: DraftHeads, lm_rows: torch.Tensor, embeddings: torch.Tensor) -> None:
        library = _library()
        assert library is not None
        assert heads.vocabulary is not None
        assert len(lm_rows) == len(embeddings) == len(heads.vocabulary) >= TOP
        self._run = library.tokenswift_descend
        self._kept: list[torch.Tensor] = []  # what the structures point to
        self._heads = (_Head * heads.num_heads)(
            *(self._head(cast("SequentialHead", layer)) for layer in heads.layers)
        )
        self._chain = _Chain(
            ctypes.addressof(self._heads),
            self._linear(lm_rows),
            self._pointer(embeddings.to(torch.bfloat16)),
            self._pointer(heads.vocabulary.to(torch.int32)),
            heads.num_heads,
        )
        hidden, width = heads.hidden_size, self._heads[0].up.outputs
        floats = 2 * hidden + MAX_ROWS * (3 * hidden + 2 * width + len(lm_rows))
        self._work = np.empty(floats, np.float32)
        self._rows = np.zeros((heads.num_heads, MAX_ROWS), ROW)
        self._counts = np.zeros(heads.num_heads, np.int32)

    def _pointer(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.detach().contiguous())
        return self._kept[-1].data_ptr()

    def _linear(self, weight: torch.Tensor) -> _Linear:
        wide = weight.detach().float()
        scale = wide.abs().amax(dim=1).clamp_(min=1e-12) / 127
        steps = (wide / scale[:, None]).round_().to(torch.int8)
        return _Linear(self._pointer(steps), self._pointer(scale), weight.shape[1], len(weight))

    def _head(self, head: SequentialHead) -> _Head:
        return _Head(
            self._pointer(head.input_layernorm.weight.float()),
            self._pointer(head.token_layernorm.weight.float()),
            self._pointer(head.post_layernorm.weight.float()),
            self._linear(head.up.weight),
            self._linear(head.down.weight),
            head.input_layernorm.eps,
        )

    def search(
        self,
        hidden: torch.Tensor,
        roots: Sequence[tuple[int, float]],
        embedded: npt.NDArray[np.int16],
        scales: Sequence[LogitScales],
        noises: Sequence[HeadNoise | None],
        least_chance: float,
    ) -> list[npt.NDArray[Any]]:
        """Head beam search: runs head after head along the best paths of each request.

        Followed are the :data:`BEAM_WIDTH` best paths of each request that have
        ``least_chance``; ``len(noises) * BEAM_WIDTH`` is at most :data:`MAX_ROWS`.

        Args:
            hidden: ``[requests, hidden]``, what head 0 starts from.
            roots: requests and chances of the paths that are begun, in the requests' order
                and at most :data:`BEAM_WIDTH` of each.
            embedded: ``[roots, hidden]``, the bits of their tokens' embeddings in bfloat16.
            scales: of each request.
            noises: of each request; None: the noise is not looked at.
            least_chance: of a path that is followed, 0 to 1.

        Returns:
            For each head that had paths its rows, of :data:`ROW`: request, place in the level
            above (of the request, for the first head) and among that row's tokens, chance of
            the path; and the :data:`TOP` likeliest tokens below, likeliest first, with their
            chances. Valid until the next call. Without noise chances are probabilities q of
            the scaled logits; with it they are in proportion to q / E^power, E the token's
            noise.
        """
        assert len(noises) * BEAM_WIDTH <= MAX_ROWS
        states = hidden.float().contiguous()
        assert embedded.flags.c_contiguous
        keys = np.zeros((len(noises), len(self._heads)), np.uint64)
        requests = (_Request * len(noises))()
        for index, (scale, noise) in enumerate(zip(scales, noises, strict=True)):
            requests[index].in_window = scale.in_window.ctypes.data
            requests[index].outside = scale.outside
            requests[index].positive, requests[index].negative = scale.positive, scale.negative
            requests[index].keys = keys[index].ctypes.data
            if noise is not None:
                keys[index] = np.array(noise.keys, np.uint64)
                requests[index].noise_power = noise.power
        for row, (request, chance) in zip(self._rows[0], roots, strict=False):
            row["request"] = row["above"] = request
            row["chance"] = chance
        self._counts[0] = len(roots)
        self._run(
            ctypes.byref(self._chain),
            requests,
            ctypes.c_void_p(states.data_ptr()),
            ctypes.c_void_p(embedded.ctypes.data),
            ctypes.c_float(least_chance),
            ctypes.c_void_p(self._work.ctypes.data),
            ctypes.c_void_p(self._rows.ctypes.data),
            ctypes.c_void_p(self._counts.ctypes.data),
        )
        counts = self._counts.tolist()
        return [rows[:count] for rows, count in zip(self._rows, counts, strict=True) if count]
