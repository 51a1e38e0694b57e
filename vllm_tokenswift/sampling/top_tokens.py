"""The likeliest tokens of rows of logits, as drafting hears of them."""

from __future__ import annotations

import numpy as np
import torch

from vllm_tokenswift.draft.top_tokens import (
    COLUMNS,
    LEAST_PROBABILITY,
    NOTHING,
    NUM_LIKELIEST,
    Likeliest,
)


def likeliest_tokens(logits: torch.Tensor) -> Likeliest:
    """``[rows, COLUMNS]`` on the host; of tokens that are equally likely the first stands first.

    logits: float32 ``[rows, vocab]``, under all constraints and after temperature.
    """
    probabilities = logits.softmax(dim=-1).numpy(force=True)
    said = np.full((len(probabilities), COLUMNS), NOTHING, np.int32)
    for row, of_row in zip(said, probabilities, strict=True):
        likely = np.flatnonzero(of_row >= LEAST_PROBABILITY).astype(np.int32)
        first = likely[np.argsort(-of_row[likely], kind="stable")[:NUM_LIKELIEST]]
        row[: len(first)] = first
        row[NUM_LIKELIEST : NUM_LIKELIEST + len(first)] = of_row[first].view(np.int32)
    return said
