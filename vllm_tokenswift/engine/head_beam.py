"""The seam behind which a platform runs all sequential heads at once, path by path.

Without it :class:`~vllm_tokenswift.engine.head_drafter.HeadDrafter` goes from head to head
itself, and waits for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_tokenswift.sampling.sampling_state import SamplingState

BEAM_WIDTH = 2
"""Paths of a request that heads go on with."""
OFFERED_TOKENS = 8
"""Likeliest tokens below a path that are offered to the planner, which takes a few."""

Embed = Callable[[torch.Tensor], torch.Tensor]
"""int64 ``[tokens]`` -> ``[tokens, hidden]``, by the target."""


@dataclass(frozen=True)
class BeamRoot:
    """Where a path begins: behind ``token`` of request ``request`` (an index), with its chance."""

    request: int
    token: int
    chance: float


@dataclass(frozen=True)
class BeamRow:
    """What a head offers below a path: tokens, likeliest first, and their probabilities.

    Those know the noise where the request sees it (``draft/gumbel_noise.py``).

    above: the row of the level above that the path comes from (at the first level: the start);
    place: which of its tokens it follows.
    """

    above: int
    place: int
    tokens: list[int]
    probabilities: list[float]


class HeadBeam(Protocol):
    """All heads, from the starts down along the likeliest paths."""

    runs_ahead: bool
    """Whether it runs while the host goes on, always through all heads; else the host runs
    it, heads below the last path are saved, and the cost goes by level."""

    def launch(
        self,
        states: Sequence[SamplingState],
        sees_noise: Sequence[bool],
        starts: Sequence[BeamRoot],
        hidden: torch.Tensor,
        depth: int,
    ) -> bool:
        """Begins a descent that nobody waits for yet; False where they are too many.

        states, sees_noise: by request, none that needs constraints over the whole vocabulary
        (``DraftVocabulary.suffices``); whether its noise is looked at. starts: in the order of
        their requests. hidden: ``[requests, hidden]``, what head 0 starts from. depth: of the
        first level's tokens, from 0.
        """

    def found(self) -> list[list[BeamRow]]:
        """The rows of the descent launched last, by level, a level for each head."""

    def alone(self) -> object:
        """The descent of one request, for its cost: all of it where it :attr:`runs_ahead`, else
        one level."""
