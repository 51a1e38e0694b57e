"""The constraints that shape drafts, over the part of the vocabulary that heads propose.

Heads run several times between two steps, and what they propose only has to be likely: so
temperature and the windowed penalty are applied to their few thousand logits, and whatever
cannot be done there is left to the tree sampler's own :meth:`TreeSampler.draft_probabilities`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm_tokenswift.sampling.sampling_state import SamplingState


class DraftVocabulary:
    """The part of the vocabulary that heads propose, and the constraints over it.

    Args:
        tokens: int64 ``[part]``, ids.
        vocab_size: of the target.
    """

    def __init__(self, tokens: torch.Tensor, vocab_size: int) -> None:
        self.tokens = tokens
        self.device = tokens.device
        # Where a token stands in the part; those outside share one place behind it.
        self._place = np.full(vocab_size, len(tokens), np.int64)
        self._place[tokens.cpu().numpy()] = np.arange(len(tokens))

    @staticmethod
    def suffices(states: Sequence[SamplingState]) -> bool:
        """Whether nothing but temperature, penalty and cuts of unlikely tokens is asked for."""
        return not any(state.edits_tokens for state in states)

    def place(self, token: int) -> int:
        """Where a token stands in the part; its length for one outside."""
        return int(self._place[token])

    def in_window(self, state: SamplingState) -> npt.NDArray[np.uint8]:
        """uint8 ``[part]``, 1 for the tokens of the penalty's window."""
        marks = np.zeros(len(self.tokens) + 1, np.uint8)
        if state.window is not None:
            marks[self._place[state.window.tokens]] = 1
        return marks[:-1]

    @staticmethod
    def scales_of(state: SamplingState) -> tuple[np.float32, np.float32, np.float32]:
        """What a request's logits are multiplied by.

        Returns:
            Factors of the logits of tokens outside the penalty's window, and of the positive
            and of the negative ones of tokens in it.
        """
        theta, temperature = state.numbers.theta, np.float32(state.numbers.temperature)
        plain, positive, negative = np.float32(1.0), np.float32(1.0 / theta), np.float32(theta)
        return plain / temperature, positive / temperature, negative / temperature

    def scales(self, states: Sequence[SamplingState]) -> torch.Tensor:
        """What positive and negative logits are multiplied by: float32 ``[states, 2, part]``,
        on the tokens' device."""
        scales = np.empty((len(states), 2, len(self.tokens)), np.float32)
        for by_sign, state in zip(scales, states, strict=True):
            outside, *inside = self.scales_of(state)
            in_window = self.in_window(state)
            for row, factor in zip(by_sign, inside, strict=True):
                row[:] = np.where(in_window, factor, outside)
        return torch.from_numpy(scales).to(self.device)

    @staticmethod
    def probabilities(logits: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The softmax of scaled logits.

        Args:
            logits: ``[rows, part]``, any float dtype.
            scales: float32 ``[rows, 2, part]``, see :meth:`scales`.

        Returns:
            float32 ``[rows, part]``.
        """
        wide = logits.float()
        scaled = torch.where(wide > 0, scales[:, 0], scales[:, 1]).mul_(wide)
        return scaled.softmax(dim=-1)
