"""Eta-sampling (the paper's appendix on sampling; Hewitt et al. 2022).

A token stays if its probability is at least
``eta = min(epsilon, alpha * exp(-entropy))``.
"""

from __future__ import annotations

import torch


def apply_eta(logits: torch.Tensor, epsilon: torch.Tensor, alpha: torch.Tensor) -> None:
    """Mask, in place, the tokens below eta; the likeliest always stays.

    logits: float32 ``[rows, vocab]``, after temperature.
    epsilon, alpha: float32 ``[rows, 1]``; rows with epsilon 0 stay as they are.
    """
    probabilities = logits.softmax(dim=-1)
    # Summed in float64: how a float32 sum over the vocabulary is split depends on
    # the number of rows, and a row must come out the same in every batch.
    entropy = torch.special.entr(probabilities).sum(dim=-1, keepdim=True, dtype=torch.float64)
    eta = torch.minimum(epsilon.double(), alpha.double() * torch.exp(-entropy)).float()
    # exp(-entropy) can exceed the top probability by a rounding error where all are equal.
    eta = torch.minimum(eta, probabilities.amax(dim=-1, keepdim=True))
    logits.masked_fill_(probabilities < eta, -float("inf"))
