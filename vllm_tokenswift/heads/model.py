"""Self-drafting heads: a chain of small layers on the target's last hidden state.

The paper (Eq. 1): ``h_i = f_i(h_{i-1}) + h_{i-1}`` and ``l_i = g(h_i)`` with the
target's own LM head ``g``. Two forms of it exist:

``linear`` (the paper's text)
    ``f_i`` is one linear layer; the chain starts at the hidden state *after* the
    target's final norm, and the LM head reads ``h_i`` itself.
``released`` (the authors' checkpoints)
    ``f_i(h) = linear(rmsnorm_in(h))``; the chain starts at the hidden state *before*
    the final norm, and the LM head reads ``rmsnorm_post(h_i)``.

Head ``i`` (from 0) at position ``t`` predicts token ``t + 2 + i``: the target itself
predicts token ``t + 1``. No linear layer has a bias.

The heads are plain torch and never sharded. Under tensor parallelism vLLM's hidden
states are whole on every rank, so every rank holds the same heads and computes the
same ``h_i``; only the LM head, which is vLLM's, is split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import Literal, cast

import torch
from torch import Tensor, nn

Reads = Literal["post_norm", "pre_norm"]


class HeadForm(StrEnum):
    """Which of the two published forms the heads have."""

    LINEAR = "linear"
    RELEASED = "released"


class HeadNorm(nn.Module):
    """RMS norm, computed in float32 and rounded once to the dtype of its input."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))  # [hidden]
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:  # [rows, hidden] -> [rows, hidden]
        wide = hidden.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        normed: Tensor = wide * scale * self.weight.float()
        return normed.to(hidden.dtype)


class Head(nn.Module, ABC):
    """One link of the chain. Both methods: ``[rows, hidden] -> [rows, hidden]``."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size, bias=False)
        nn.init.zeros_(self.linear.weight)

    @abstractmethod
    def advance(self, hidden: Tensor) -> Tensor:
        """``h_i`` from ``h_{i-1}``."""

    @abstractmethod
    def read(self, hidden: Tensor) -> Tensor:
        """What the LM head reads, from ``h_i``."""


class LinearHead(Head):
    """The paper's form: ``h + W h``."""

    def advance(self, hidden: Tensor) -> Tensor:
        moved: Tensor = self.linear(hidden)
        return hidden + moved

    def read(self, hidden: Tensor) -> Tensor:
        return hidden


class ReleasedHead(Head):
    """The authors' form: norms around the linear layer."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size)
        self.input_layernorm = HeadNorm(hidden_size, eps)
        self.post_layernorm = HeadNorm(hidden_size, eps)

    def advance(self, hidden: Tensor) -> Tensor:
        moved: Tensor = self.linear(self.input_layernorm(hidden))
        return hidden + moved

    def read(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.post_layernorm(hidden)
        return normed


class DraftHeads(nn.Module):
    """The chain of self-drafting heads.

    form: which published form.
    num_heads: length of the chain (the paper's gamma = 3), at least 1.
    hidden_size: the target's hidden size.
    eps: the target's ``rms_norm_eps``; used by the ``released`` form only.

    Freshly made heads predict what their input predicts (linear layers are zero).
    Parameters are named ``layers.{i}.linear.weight`` and, in the released form,
    ``layers.{i}.input_layernorm.weight`` and ``layers.{i}.post_layernorm.weight``.
    """

    def __init__(self, form: HeadForm | str, num_heads: int, hidden_size: int, eps: float) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads is {num_heads}: a chain has at least one head")
        self.form = HeadForm(form)
        self.hidden_size = hidden_size
        self.eps = eps
        self.layers = nn.ModuleList(
            LinearHead(hidden_size)
            if self.form is HeadForm.LINEAR
            else ReleasedHead(hidden_size, eps)
            for _ in range(num_heads)
        )

    @property
    def num_heads(self) -> int:
        return len(self.layers)

    @property
    def reads(self) -> Reads:
        """The hidden state the chain starts from: after or before the final norm."""
        return "post_norm" if self.form is HeadForm.LINEAR else "pre_norm"

    def forward(self, hidden: Tensor) -> list[Tensor]:
        """What the target's LM head reads, for each head.

        hidden: ``[rows, hidden]`` (or with more leading dimensions), the state named
            by :attr:`reads`, in the heads' dtype.
        Returns one tensor of the same shape for each head, in the heads' order.
        """
        reads = []
        for layer in cast("list[Head]", self.layers):
            hidden = layer.advance(hidden)
            reads.append(layer.read(hidden))
        return reads
