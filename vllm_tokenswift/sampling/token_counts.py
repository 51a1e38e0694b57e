"""Token counts for vLLM's repetition, frequency and presence penalties.

vLLM rebuilds them from the whole text at every step
(``vllm/v1/sample/ops/penalties.py``); here they are kept per request and
advanced, so the cost does not depend on the text's length.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from vllm._custom_ops import apply_repetition_penalties


class TokenCounts:
    """What stands in one request's prompt, and how often what in its output."""

    def __init__(
        self, vocab_size: int, prompt: Sequence[int], output: Sequence[int], device: torch.device
    ) -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        self.in_output = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.extend(output)

    def extend(self, tokens: Sequence[int]) -> None:
        index = torch.tensor(tokens, dtype=torch.int64, device=self.in_output.device)
        self.in_output.index_add_(0, index, torch.ones_like(index, dtype=torch.int32))


def apply_count_penalties(
    logits: torch.Tensor,
    counts: Sequence[TokenCounts],
    paths: Sequence[Sequence[int]],
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """vLLM's ``apply_penalties`` (model_executor/layers/utils.py), in place.

    logits: float32 ``[rows, vocab]``; counts and paths: one per row, the path
    being the draft tokens above and at the row's node; the penalties: float32 ``[rows]``.
    """
    device = logits.device
    in_prompt = torch.stack([count.in_prompt for count in counts])  # [rows, vocab]
    in_output = torch.stack([count.in_output for count in counts])  # [rows, vocab]
    rows = [row for row, path in enumerate(paths) for _ in path]
    if rows:
        tokens = torch.tensor([token for path in paths for token in path], device=device)
        ones = torch.ones_like(tokens, dtype=torch.int32)
        in_output.index_put_((torch.tensor(rows, device=device), tokens), ones, accumulate=True)
    seen = in_output > 0
    apply_repetition_penalties(logits, in_prompt, seen, repetition)
    logits -= frequency.unsqueeze(1) * in_output
    logits -= presence.unsqueeze(1) * seen
