"""Self-drafting heads: a chain of small layers on the target's last hidden state.

The paper (its Eq. 1): ``h_i = f_i(h_{i-1}) + h_{i-1}`` and ``l_i = g(h_i)`` with the
target's own LM head ``g``. Two forms of it were published, and one is ours:

``linear`` (the paper's text)
    ``f_i`` is one linear layer; the chain starts at the hidden state *after* the
    target's final norm, and the LM head reads ``h_i`` itself.
``released`` (the authors' checkpoints)
    ``f_i(h) = linear(rmsnorm_in(h))``; the chain starts at the hidden state *before*
    the final norm, and the LM head reads ``rmsnorm_post(h_i)``.
``sequential`` (ours)
    ``f_i(h, x) = down(silu(up([rmsnorm_in(h); rmsnorm_token(embed(x))])))``, where ``x`` is
    the token that stands before the one predicted: the sampled one for the first head, the
    drafted one for those after it. A head that does not know that token predicts the
    average over all it could have been. The idea is Hydra's (Ankner et al., 2024). Chain and
    LM head as in ``released``; the LM head may be cut to a part of the vocabulary, since on a
    small model reading it whole costs more than the heads.

Head ``i`` (from 0) at position ``t`` predicts token ``t + 2 + i``: the target itself
predicts token ``t + 1``, and a sequential head reads token ``t + 1 + i``. No linear layer
has a bias.

The heads are plain torch and never sharded. Under tensor parallelism vLLM's hidden
states are whole on every rank, so every rank holds the same heads and computes the
same ``h_i``; only the LM head, which is vLLM's, is split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, cast

import torch
from torch import Tensor, nn

Reads = Literal["post_norm", "pre_norm"]


_OLD_NAME = "conditioned"


class HeadForm(StrEnum):
    """Which form the heads have (see above).

    ``HeadForm("conditioned")`` is ``SEQUENTIAL`` too: the form was called so before, and is in
    the files that hold heads (:attr:`name_in_files`).
    """

    LINEAR = "linear"
    RELEASED = "released"
    SEQUENTIAL = "sequential"

    @property
    def name_in_files(self) -> str:
        """What ``heads.json`` and the states of trainings call the form."""
        return _OLD_NAME if self is HeadForm.SEQUENTIAL else self.value

    @classmethod
    def _missing_(cls, value: object) -> HeadForm | None:
        return cls.SEQUENTIAL if value == _OLD_NAME else None


class HeadNorm(nn.Module):
    """RMS norm, computed in float32 and rounded once to the dtype of its input.

    Args:
        hidden_size: of what is normed.
        eps: added to the mean square.
    """

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
    """One link of the chain."""

    @abstractmethod
    def advance(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """``h_i`` from ``h_{i-1}``.

        Args:
            hidden: ``[rows, hidden]``, ``h_{i-1}``.
            embedded: ``[rows, hidden]``, the target's embedding of the token before the one
                predicted; None where the form does not look at it.

        Returns:
            ``[rows, hidden]``.
        """

    @abstractmethod
    def read(self, hidden: Tensor) -> Tensor:
        """What the LM head reads, from ``h_i``: ``[rows, hidden] -> [rows, hidden]``."""


def _zero_linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.zeros_(linear.weight)
    return linear


class LinearHead(Head):
    """The paper's form: ``h + W h``.

    Args:
        hidden_size: the target's hidden size.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = _zero_linear(hidden_size, hidden_size)

    def advance(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        moved: Tensor = self.linear(hidden)
        return hidden + moved

    def read(self, hidden: Tensor) -> Tensor:
        return hidden


class ReleasedHead(Head):
    """The authors' form: norms around the linear layer.

    Args:
        hidden_size: the target's hidden size.
        eps: of the norms.
    """

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.linear = _zero_linear(hidden_size, hidden_size)
        self.input_layernorm = HeadNorm(hidden_size, eps)
        self.post_layernorm = HeadNorm(hidden_size, eps)

    def advance(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        moved: Tensor = self.linear(self.input_layernorm(hidden))
        return hidden + moved

    def read(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.post_layernorm(hidden)
        return normed


class SequentialHead(Head):
    """Our form: an MLP of the state and of the token before the one predicted.

    Args:
        hidden_size: the target's hidden size.
        eps: of the norms.
        width: of the MLP's hidden layer.
    """

    def __init__(self, hidden_size: int, eps: float, width: int) -> None:
        super().__init__()
        self.input_layernorm = HeadNorm(hidden_size, eps)
        self.token_layernorm = HeadNorm(hidden_size, eps)
        self.up = nn.Linear(2 * hidden_size, width, bias=False)
        self.down = _zero_linear(width, hidden_size)
        self.post_layernorm = HeadNorm(hidden_size, eps)

    def advance(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        assert embedded is not None
        both = torch.cat([self.input_layernorm(hidden), self.token_layernorm(embedded)], dim=-1)
        moved: Tensor = self.down(nn.functional.silu(self.up(both)))
        return hidden + moved

    def read(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.post_layernorm(hidden)
        return normed


class DraftHeads(nn.Module):
    """The chain of self-drafting heads.

    Freshly made heads predict what their input predicts (the last linear layers are zero).
    Parameters are named ``layers.{i}.`` plus the module's names.

    Args:
        form: see the module.
        num_heads: length of the chain (the paper's gamma = 3), at least 1.
        hidden_size: the target's hidden size.
        eps: the target's ``rms_norm_eps``; the ``linear`` form does not use it.
        width: of the ``sequential`` form's hidden layer; 0 is twice the hidden size.
        vocabulary: int64 ``[tokens]``, those that the heads can propose, most frequent first;
            None is all of them. ``sequential`` form only.

    Raises:
        ValueError: ``num_heads`` is less than 1, or there is no such form.
    """

    vocabulary: Tensor | None

    def __init__(
        self,
        form: HeadForm | str,
        num_heads: int,
        hidden_size: int,
        eps: float,
        width: int = 0,
        vocabulary: Tensor | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1:
            raise ValueError(f"num_heads is {num_heads}: a chain has at least one head")
        self.form = HeadForm(form)
        self.hidden_size = hidden_size
        self.eps = eps
        self.layers = nn.ModuleList(self._layer(width or 2 * hidden_size) for _ in range(num_heads))
        self.register_buffer("vocabulary", vocabulary)

    def _layer(self, width: int) -> Head:
        if self.form is HeadForm.LINEAR:
            return LinearHead(self.hidden_size)
        if self.form is HeadForm.RELEASED:
            return ReleasedHead(self.hidden_size, self.eps)
        return SequentialHead(self.hidden_size, self.eps, width)

    @property
    def num_heads(self) -> int:
        """Length of the chain."""
        return len(self.layers)

    @property
    def reads(self) -> Reads:
        """The hidden state the chain starts from: after or before the final norm."""
        return "post_norm" if self.form is HeadForm.LINEAR else "pre_norm"

    @property
    def is_sequential(self) -> bool:
        """Whether a head has to know the token before the one it predicts."""
        return self.form is HeadForm.SEQUENTIAL

    def run_head(
        self, index: int, hidden: Tensor, embedded: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """One head of the chain.

        Args:
            index: of the head, from 0.
            hidden: ``[rows, hidden]``, ``h_{i-1}``; for head 0 the state named by
                :attr:`reads`, in the heads' dtype.
            embedded: see :meth:`Head.advance`.

        Returns:
            The head's state ``h_i``, and what the LM head reads; both ``[rows, hidden]``.
        """
        layer = cast("Head", self.layers[index])
        hidden = layer.advance(hidden, embedded)
        return hidden, layer.read(hidden)

    def forward(self, hidden: Tensor, embedded: Sequence[Tensor] | None = None) -> list[Tensor]:
        """What the target's LM head reads, for each head.

        Args:
            hidden: ``[rows, hidden]`` (or with more leading dimensions), the state named
                by :attr:`reads`, in the heads' dtype.
            embedded: for each head the embedding of the token before the one it predicts, in
                the shape of ``hidden``; for the ``sequential`` form.

        Returns:
            One tensor of the same shape for each head, in the heads' order.
        """
        reads = []
        for index in range(self.num_heads):
            hidden, read = self.run_head(index, hidden, embedded[index] if embedded else None)
            reads.append(read)
        return reads
