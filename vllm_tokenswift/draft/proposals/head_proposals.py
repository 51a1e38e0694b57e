"""What a draft pass and heads propose: top tokens in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from vllm_tokenswift.common.arrays import Floats, Ints

NO_ROW = -1  # nothing was asked below a token
NO_TOKEN = -1  # where a row is shorter than others

HeadArrays = tuple[Ints, Floats, Ints, int, bool]
"""A :class:`HeadRows` on its way into compiled code."""


class HeadRows(NamedTuple):
    """A :class:`HeadProposals` in arrays.

    Attributes:
        tokens: int32 ``[rows, width]``, NO_TOKEN as filling.
        probabilities: float64 ``[rows, width]``.
        below: int32 ``[rows, width]``, the row below each token, NO_ROW where there is none.
        own_depths: depths that draft passes speak for, 0 for free heads.
        sees_noise: as the proposals'.
    """

    tokens: Ints
    probabilities: Floats
    below: Ints
    own_depths: int
    sees_noise: bool


@dataclass(frozen=True)
class HeadProposals:
    """Top tokens of a draft pass and of heads, in rows.

    Attributes:
        tokens: ``[rows][width]``, likeliest first, of the constrained distributions. Row 0
            follows the bonus token (depth 1).
        probabilities: ``[rows][width]``, of the tokens.
        free: False: from draft passes (depth 1 is the model's own next token ``l0``, those
            beyond ``own_depths`` are heads). True: heads on the verify pass's hidden state
            (depth 1 is head 0).
        below: ``[rows][width]``, the later row that follows each token, or NO_ROW. None: a row
            for each depth, whatever the path to it (a Cartesian tree, paper Eq. 1).
        num_passes: passes of the heads and the LM head that they took.
        sees_noise: the heads' probabilities are chances that know the noise
            (``gumbel_noise.py``).
        own_depths: depths that draft passes of the target speak for, one pass each; of no
            meaning where free.

    Raises:
        ValueError: where the rows differ in shape.
    """

    tokens: Sequence[Sequence[int]]
    probabilities: Sequence[Sequence[float]]
    free: bool
    below: Sequence[Sequence[int]] | None = None
    num_passes: int = 1
    sees_noise: bool = False
    own_depths: int = 1

    def __post_init__(self) -> None:
        widths = [len(row) for row in self.tokens]
        if widths != [len(row) for row in self.probabilities] or (
            self.below is not None and widths != [len(row) for row in self.below]
        ):
            raise ValueError("HeadProposals: tokens, probabilities and below differ in shape")

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, filling included."""
        return self.arrays[0].size

    @cached_property
    def arrays(self) -> HeadArrays:
        """The fields of :class:`HeadRows`."""
        widths = [*map(len, self.tokens)]
        below = self.below
        if below is None:
            following = [*range(1, len(widths)), NO_ROW]
            below = [[row] * width for row, width in zip(following, widths, strict=True)]
        return (
            _filled(self.tokens, widths, NO_TOKEN, np.int32),
            _filled(self.probabilities, widths, 0.0, np.float64),
            _filled(below, widths, NO_ROW, np.int32),
            0 if self.free else self.own_depths,
            self.sees_noise,
        )


def _filled(
    rows: Sequence[Sequence[float]], widths: Sequence[int], filling: float, dtype: Any
) -> Any:
    """Rows of these widths as an array ``[rows, width]``."""
    width = max(widths)
    if min(widths) != width:
        rows = [[*row, *[filling] * (width - len(row))] for row in rows]
    # From lists within a list numpy takes half as long again.
    numbers = np.fromiter(chain.from_iterable(rows), dtype, len(rows) * width)
    return numbers.reshape(len(rows), width)
