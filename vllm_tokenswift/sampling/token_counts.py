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
    """What stands in one request's prompt, and how often what in its output.

    Args:
        vocab_size: of the target.
        prompt: token ids.
        output: token ids.
        device: of the counts.

    Attributes:
        in_prompt: bool ``[vocab]``.
        in_output: int32 ``[vocab]``, how often each token stands in the output.
    """

    def __init__(
        self, vocab_size: int, prompt: Sequence[int], output: Sequence[int], device: torch.device
    ) -> None:
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        self.in_output = torch.zeros(vocab_size, dtype=torch.int32, device=device)
        self.count_tokens(output)

    def count_tokens(self, tokens: Sequence[int]) -> None:
        """The output grows by these tokens."""
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

    Args:
        logits: float32 ``[rows, vocab]``.
        counts: of each row, its request's counts.
        paths: of each row, the draft tokens from the root's child down to its node.
        repetition: float32 ``[rows]``, vLLM's ``repetition_penalty``; 1 is off.
        frequency: float32 ``[rows]``, ``frequency_penalty``; 0 is off.
        presence: float32 ``[rows]``, ``presence_penalty``; 0 is off.
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
