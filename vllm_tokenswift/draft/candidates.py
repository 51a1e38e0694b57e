"""The common form of what a source offers: a small tree that is opened only where needed.

An :class:`Offer` is opened at a *handle* (``root`` first) and lists the :data:`Step` s a
path could take next, each with the chance that it is accepted and the gain cell that chance
came from. The trie opens offers while it looks for the likeliest paths; the gain model
opens them again along the tokens that really came.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_tokenswift.draft.foresight import Foresight
from vllm_tokenswift.draft.gain import GainModel
from vllm_tokenswift.draft.ngrams import Ngram
from vllm_tokenswift.tree import Source

NO_CELL = -1  # a step whose rate is taken at face value
Handle = Any  # what an offer needs to find its place again; None where it ends


# One candidate token, as a plain tuple because thousands are made for every token written:
# (token, rate, source, cell, below). rate: estimated chance that it is accepted if its parent
# is; source: a Source; cell: where the gain model learns that rate, or NO_CELL; below: the
# offer's handle at this token, None where the offer has nothing further.
Step = tuple[int, float, int, int, Handle]

_SUFFIX = int(Source.SUFFIX)
_NGRAM = int(Source.NGRAM)


class Offer(ABC):
    """What one source proposes to follow the bonus token."""

    root: Handle

    @abstractmethod
    def steps(self, handle: Handle) -> Sequence[Step]:
        """The candidates below ``handle``, in an order that is a function of the text."""


class PathOffer(Offer):
    """One continuation: what followed an earlier occurrence of the text's end.

    tokens: the path. match_length: how many tokens before it matched.
    support: share of the path's first token among what followed the bonus token so far.
    alternative: a longer match is followed by another token.
    """

    root = 0

    def __init__(
        self,
        gains: GainModel,
        tokens: Sequence[int],
        match_length: int,
        support: float,
        alternative: bool = False,
    ) -> None:
        self._tokens = tokens
        self._last = len(tokens) - 1
        self._match_length = match_length
        self._first_cell = gains.match_cell(match_length, support, alternative)
        self._cells = gains.continued_match_cells()
        self._rates = gains.rates

    def steps(self, handle: Handle) -> Sequence[Step]:
        if handle == 0:
            cell = self._first_cell
        else:
            length = self._match_length + handle
            cell = self._cells[length] if length < len(self._cells) else self._cells[-1]
        below = handle + 1 if handle < self._last else None
        return ((self._tokens[handle], self._rates[cell], _SUFFIX, cell, below),)


class NgramOffer(Offer):
    """The n-grams that begin with one token, grouped by shared prefixes.

    gains: None takes a token's share among the n-grams at face value (nothing is learned).
    total: how often that token began an n-gram, the unlisted ones included.
    max_depth: offer no more than this many tokens of an n-gram.
    """

    def __init__(
        self, gains: GainModel | None, ngrams: list[Ngram], total: int, max_depth: int
    ) -> None:
        self._gains = gains
        self._max_depth = min(len(ngrams[0][0]), max_depth)
        self.root = (0, total, ngrams)
        self._root_steps: list[Step] = []

    def steps(self, handle: Handle) -> Sequence[Step]:
        depth, total, ngrams = handle
        if depth == 0:
            if not self._root_steps:
                self._root_steps = self._open(depth, total, ngrams)
            return self._root_steps
        return self._open(depth, total, ngrams)

    def _open(self, depth: int, total: int, ngrams: list[Ngram]) -> list[Step]:
        gains = self._gains
        groups: dict[int, list[Ngram]] = {}
        for ngram in ngrams:
            token = ngram[0][depth]
            if token in groups:
                groups[token].append(ngram)
            else:
                groups[token] = [ngram]
        depth += 1
        last = depth >= self._max_depth
        steps: list[Step] = []
        for token, group in groups.items():
            frequency = group[0][1]
            for ngram in group[1:]:
                frequency += ngram[1]
            below = None if last else (depth, frequency, group)
            rate, cell = frequency / total, NO_CELL
            if gains is not None:
                cell = gains.ngram_cell(frequency, rate, depth)
                rate = gains.rates[cell]
            steps.append((token, rate, _NGRAM, cell, below))
        return steps


NO_ROW = -1  # nothing was asked below a token


@dataclass(frozen=True)
class HeadCandidates:
    """Top tokens of a draft pass and of heads, in rows.

    tokens, probabilities: ``[rows][width]``, likeliest first, of the constrained
        distributions. Row 0 follows the bonus token (depth 1).
    free: False: from draft passes (depth 1 is the model's own next token ``l0``, those beyond
        ``own_depths`` are heads). True: heads on the verify pass's hidden state (depth 1 is
        head 0).
    below: ``[rows][width]``, the row that follows each token, or NO_ROW. None: a row for
        each depth, whatever the path to it (a Cartesian tree, paper Eq. 1).
    num_passes: passes of the heads and the LM head that they took.
    foreseen: the heads' probabilities are chances that know the noise (``foresight.py``).
    own_depths: depths that draft passes of the target speak for, one pass each; of no meaning
        where free.
    """

    tokens: Sequence[Sequence[int]]
    probabilities: Sequence[Sequence[float]]
    free: bool
    below: Sequence[Sequence[int]] | None = None
    num_passes: int = 1
    foreseen: bool = False
    own_depths: int = 1

    def __post_init__(self) -> None:
        widths = [len(row) for row in self.tokens]
        if widths != [len(row) for row in self.probabilities] or (
            self.below is not None and widths != [len(row) for row in self.below]
        ):
            raise ValueError("HeadCandidates: tokens, probabilities and below differ in shape")

    def row_below(self, row: int, place: int) -> int:
        """The row that follows a row's token, or NO_ROW."""
        if self.below is not None:
            return self.below[row][place]
        return row + 1 if row + 1 < len(self.tokens) else NO_ROW

    def source(self, depth: int) -> Source:
        """Where the candidates of ``depth`` (from 1) come from."""
        if self.free:
            return Source.FREE_HEADS
        return Source.SELF if depth <= self.own_depths else Source.HEADS


class HeadOffer(Offer):
    """:class:`HeadCandidates` as an offer.

    gains: None takes the heads' probabilities at face value (nothing is learned).
    widths: the most tokens that each depth offers; depths beyond offer nothing.
    foresight: turns what a draft pass says of its token into the chance that it is drawn.
    """

    root = (0, 1)

    def __init__(
        self,
        gains: GainModel | None,
        heads: HeadCandidates,
        widths: Sequence[int],
        foresight: Foresight | None = None,
    ) -> None:
        self._gains = gains
        self._heads = heads
        self._widths = widths
        self._foresight = foresight
        self._opened: dict[int, list[Step]] = {}

    def steps(self, handle: Handle) -> Sequence[Step]:
        row, depth = handle
        if row not in self._opened:
            self._opened[row] = self._open(row, depth)
        return self._opened[row]

    def _open(self, row: int, depth: int) -> list[Step]:
        heads, gains = self._heads, self._gains
        source = heads.source(depth)
        last = depth >= len(self._widths)
        steps: list[Step] = []
        for place in range(min(self._widths[depth - 1], len(heads.tokens[row]))):
            token, probability = heads.tokens[row][place], heads.probabilities[row][place]
            next_row = NO_ROW if last else heads.row_below(row, place)
            below = None if next_row == NO_ROW else (next_row, depth + 1)
            if self._foresight is not None and source is Source.SELF:
                probability = self._foresight.chance(probability, depth - 1, token)
            if gains is None:
                steps.append((token, probability, int(source), NO_CELL, below))
            else:
                cell = gains.head_cell(source, probability, depth)
                steps.append((token, gains.rates[cell], int(source), cell, below))
        return steps


class AfterOffer(Offer):
    """Another offer one step down: what would follow if ``token`` came first.

    The first step claims nothing of its own (rate 0): whoever offers ``token`` at the root
    is continued by it.
    """

    root = None

    def __init__(self, token: int, offer: Offer) -> None:
        self._first = ((token, 0.0, int(Source.UNKNOWN), NO_CELL, offer.root),)
        self._offer = offer

    def steps(self, handle: Handle) -> Sequence[Step]:
        return self._first if handle is None else self._offer.steps(handle)
