"""Cross-entropy through the target's LM head, a chunk of rows at a time.

The logits of a whole batch would be ``rows x vocabulary`` floats for each head: 12 GB
for 8K tokens of one sequence and three heads of Llama-3.1. The LM head is frozen, so the
only gradient wanted is the one of what it reads, and that has a closed form:
``(softmax(logits) - onehot(label)) @ W``. Each chunk's logits are made, used and dropped;
memory grows with ``chunk x vocabulary`` and not with the length of the sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOP = 3
"""Accuracy is counted for the best 1..TOP guesses."""


@dataclass(frozen=True)
class ChunkedLoss:
    """Sums over rows, so that batches and ranks add up.

    loss: float64 ``[]``, the summed cross-entropy. hits: float64 ``[TOP]``, rows whose
    label is among the best 1..TOP. rows: number of rows. grad: float32 ``[rows, hidden]``,
    the gradient of ``scale * loss`` with respect to what the LM head read, or None where
    no scale was given.
    """

    loss: Tensor
    hits: Tensor
    rows: int
    grad: Tensor | None


@torch.no_grad()
def chunked_cross_entropy(
    read: Tensor, labels: Tensor, lm_head: Tensor, *, chunk: int, scale: float | None
) -> ChunkedLoss:
    """Loss, accuracy and gradient of one head.

    read: ``[rows, hidden]``, what the LM head reads. labels: int64 ``[rows]``.
    lm_head: ``[vocab, hidden]``, in the dtype in which the logits are computed.
    scale: factor of the gradient (1 / rows of the whole step), or None for no gradient.
    """
    loss = torch.zeros((), dtype=torch.float64, device=read.device)
    hits = torch.zeros(TOP, dtype=torch.float64, device=read.device)
    grad = None if scale is None else torch.empty_like(read, dtype=torch.float32)
    for start in range(0, len(labels), chunk):
        label = labels[start : start + chunk, None]  # [chunk, 1]
        part = read[start : start + chunk].to(lm_head.dtype)
        logits = (part @ lm_head.T).float()  # [chunk, vocab]
        best = logits.topk(TOP, dim=-1).indices  # [chunk, TOP]
        hits += (best == label).cumsum(dim=-1).sum(dim=0)
        log_p = logits.log_softmax(dim=-1)  # [chunk, vocab]
        loss -= log_p.gather(1, label).sum(dtype=torch.float64)
        if grad is not None and scale is not None:
            error = log_p.exp_()  # softmax, in place
            error.scatter_add_(1, label, torch.full_like(label, -1, dtype=error.dtype))
            grad[start : start + chunk] = (error.mul_(scale)).to(lm_head.dtype) @ lm_head
    return ChunkedLoss(loss, hits, len(labels), grad)
