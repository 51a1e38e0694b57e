"""What a draft pass and heads propose: top tokens in rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

NO_ROW = -1  # nothing was asked below a token
NO_TOKEN = -1  # where a row is shorter than others


@dataclass(frozen=True)
class HeadProposals:
    """Top tokens of a draft pass and of heads, in rows.

    tokens, probabilities: ``[rows][width]``, likeliest first, of the constrained
        distributions. Row 0 follows the bonus token (depth 1).
    free: False: from draft passes (depth 1 is the model's own next token ``l0``, those beyond
        ``own_depths`` are heads). True: heads on the verify pass's hidden state (depth 1 is
        head 0).
    below: ``[rows][width]``, the later row that follows each token, or NO_ROW. None: a row for
        each depth, whatever the path to it (a Cartesian tree, paper Eq. 1).
    num_passes: passes of the heads and the LM head that they took.
    sees_noise: the heads' probabilities are chances that know the noise (``gumbel_noise.py``).
    own_depths: depths that draft passes of the target speak for, one pass each; of no meaning
        where free.
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

    @cached_property
    def arrays(
        self,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float64], npt.NDArray[np.int32]]:
        """Tokens, probabilities and the rows below, each ``[rows, width]``; NO_TOKEN as filling."""
        widths = [*map(len, self.tokens)]
        below = self.below
        if below is None:
            following = [*range(1, len(widths)), NO_ROW]
            below = [[row] * width for row, width in zip(following, widths, strict=True)]
        return (
            _filled(self.tokens, widths, NO_TOKEN, np.int32),
            _filled(self.probabilities, widths, 0.0, np.float64),
            _filled(below, widths, NO_ROW, np.int32),
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
