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
PROPOSED_TOKENS = 8
"""Likeliest tokens below a path that are proposed to the planner, which takes a few."""

Embed = Callable[[torch.Tensor], torch.Tensor]
"""int64 ``[tokens]`` -> ``[tokens, hidden]``, by the target."""


@dataclass(frozen=True)
class BeamRoot:
    """Where a path begins.

    Args:
        request: index of the request.
        token: the token that the path begins behind.
        chance: that this token is accepted, 0 to 1.
    """

    request: int
    token: int
    chance: float


@dataclass(frozen=True)
class BeamRow:
    """What a head proposes below a path.

    Args:
        above: the row of the level above that the path comes from; at the first level the root.
        place: which of that row's tokens the path follows.
        tokens: likeliest first.
        probabilities: theirs; they know the noise where the request sees it
            (``draft/gumbel_noise.py``).
    """

    above: int
    place: int
    tokens: list[int]
    probabilities: list[float]


class HeadBeam(Protocol):
    """Head beam search: all heads, from the roots down along the likeliest paths."""

    runs_ahead: bool
    """Whether it runs while the host goes on, always through all heads; else the host runs
    it, heads below the last path are saved, and the cost goes by level."""

    def launch_search(
        self,
        states: Sequence[SamplingState],
        sees_noise: Sequence[bool],
        roots: Sequence[BeamRoot],
        hidden: torch.Tensor,
        depth: int,
    ) -> bool:
        """Begins a search that nobody waits for yet.

        Args:
            states: of each request, none of which needs constraints over the whole vocabulary
                (``DraftVocabulary.suffices``).
            sees_noise: of each request, whether its noise is looked at.
            roots: in the order of their requests, at most :data:`BEAM_WIDTH` of each.
            hidden: ``[requests, hidden]``, what head 0 starts from.
            depth: of the first level's tokens, from 0.

        Returns:
            False where the requests are too many, and nothing was begun.
        """

    def found_rows(self) -> list[list[BeamRow]]:
        """The rows of the search launched last, by level, a level for each head."""

    def dummy_run(self) -> object:
        """Searches for one made-up request, for the cost: all of it where the search
        :attr:`runs_ahead`, else one level."""
