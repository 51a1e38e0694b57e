"""What a draft is worth: acceptance per source and feature, learned as the text is written.

Every candidate token falls into a *cell*: a source, what that source knows about it (length
of the match, share among the n-grams, probability under the head) and its depth. A cell
holds the chance that such a candidate, its parent accepted, is accepted too. Because every
candidate can be compared with the tokens that really came, whether it was verified or not,
cells are learned at every step, also while nothing is drafted: noticing that drafting pays
again needs no wasted pass, except for sources that need a pass to exist at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp

import numpy as np

from vllm_tokenswift.common.arrays import Floats
from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.tree import Source

# Match lengths at which a cell begins. A candidate at depth d below a match of length m is
# what the next iteration would call depth 1 below a match of m + d - 1, so both share a cell.
_MATCH_EDGES = (1, 2, 3, 4, 5, 6, 7, 9, 12, 16, 24, 32, 64, 128)
# Solved from mean accepted lengths: mean(m) = p(m) * (1 + mean(m + 1)).
_MATCH_PRIORS = (0.20, 0.25, 0.60, 0.70, 0.74, 0.77, 0.80, 0.85, 0.89, 0.93, 0.95, 0.97, 0.98, 0.99)
# Sampled text leaves a match sooner than text that follows its likeliest token. In log-odds.
_SAMPLED_MATCH_OFFSET = -1.2
# An occurrence that is not the longest match was contradicted by a longer one.
_ALTERNATIVE_FACTOR = 0.4
# The first token of a match is cross-examined by the n-gram table: its share among what
# followed the bonus token anywhere. The offsets are in log-odds.
_SUPPORT_EDGES = (0.05, 0.2, 0.8)
_SUPPORT_OFFSETS = (-1.2, -0.5, 0.2, 1.2)

_SHARE_EDGES = (0.05, 0.1, 0.2, 0.35, 0.6, 0.85)
_SHARE_CENTRES = (0.03, 0.07, 0.15, 0.27, 0.47, 0.72, 0.95)
_COUNT_EDGES = (2, 3, 6)
# How far the prior believes a share, by depth within the n-gram and by how often it was seen.
_COUNT_TRUST = (
    (0.30, 0.45, 0.60, 0.75),
    (0.50, 0.65, 0.75, 0.85),
    (0.65, 0.80, 0.85, 0.90),
)

_PROBABILITY_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 0.95)
_PROBABILITY_CENTRES = (0.01, 0.03, 0.07, 0.15, 0.27, 0.42, 0.6, 0.78, 0.9, 0.98)
_HEAD_DEPTHS = 4
# How far the prior believes a distribution: the draft pass is the target itself on a part
# of its cache, heads are weak and know nothing of the path they are put on.
_HEAD_TRUST = {Source.SELF: 0.95, Source.HEADS: 0.5, Source.FREE_HEADS: 0.5}
_FIRST_HEAD_SOURCE = int(min(_HEAD_TRUST))
# What followed the newest tokens before (``draft/proposals/context_statistics.py``): the longer
# the text, the more of what those chances promise comes true.
_CONTEXT_TRUST = 0.8

# Columns of the cells: the estimated chance that a candidate of that cell is accepted, its
# parent being so; and how many observations it rests on.
RATE, _WEIGHT = 0, 1
# How many observations a prior counts for, and how many a cell remembers at most. Rates are
# running means over them, so a cell that is hit at every step has forgotten another kind of
# text after about three times as many tokens.
_PRIOR_WEIGHT, _MEMORY = 4.0, 32.0

# Where the cells of each kind begin.
_FIRST_SUPPORTED = len(_MATCH_PRIORS)
_FIRST_NGRAM = _FIRST_SUPPORTED + 2 * len(_SUPPORT_OFFSETS) * len(_MATCH_PRIORS)
_FIRST_HEAD = _FIRST_NGRAM + len(_COUNT_TRUST) * len(_COUNT_TRUST[0]) * len(_SHARE_CENTRES)
_HEAD_CELLS = _HEAD_DEPTHS * len(_PROBABILITY_CENTRES)
_FIRST_CONTEXT = _FIRST_HEAD + len(_HEAD_TRUST) * _HEAD_CELLS
_COUNTS, _SHARES = len(_COUNT_TRUST[0]), len(_SHARE_CENTRES)
_NGRAM_DEPTHS, _PROBABILITIES = len(_COUNT_TRUST), len(_PROBABILITY_CENTRES)


def _shifted(probability: float, log_odds: float) -> float:
    odds = probability / (1.0 - probability) * exp(log_odds)
    return odds / (1.0 + odds)


def new_cells(sampled: bool = False) -> Floats:
    """Cells of a request of which nothing is known.

    Args:
        sampled: its tokens are drawn, not its likeliest ones.

    Returns:
        float64 ``[cells, 2]``: the estimated chance, and the observations it rests on.
    """
    shift = _SAMPLED_MATCH_OFFSET if sampled else 0.0
    match_priors = [_shifted(p, shift) for p in _MATCH_PRIORS]
    rates = [
        *match_priors,
        *(
            _shifted(p * factor, offset)
            for factor in (1.0, _ALTERNATIVE_FACTOR)
            for offset in _SUPPORT_OFFSETS
            for p in match_priors
        ),
        *(share * trust for trusts in _COUNT_TRUST for trust in trusts for share in _SHARE_CENTRES),
        *(
            p * trust
            for trust in (*_HEAD_TRUST.values(), _CONTEXT_TRUST)
            for _ in range(_HEAD_DEPTHS)
            for p in _PROBABILITY_CENTRES
        ),
    ]
    return np.array([rates, [_PRIOR_WEIGHT] * len(rates)]).T.copy()


@inner
def _bucket(edges: Iterable[float], value: float) -> int:
    """How many of the rising ``edges`` are at most ``value``."""
    bucket = 0
    for edge in edges:
        bucket += edge <= value
    return bucket


@inner
def continued_match_cell(length: int) -> int:
    """Cell of a token further down.

    Args:
        length: at depth d (from 1) below a match of m tokens, m + d - 1.
    """
    return max(_bucket(_MATCH_EDGES, length) - 1, 0)


@inner
def match_cell(match_length: int, support: float, alternative: bool) -> int:
    """Cell of the token that directly follows a match.

    Args:
        match_length: in tokens.
        support: the token's share among what followed the bonus token so far.
        alternative: a longer match is followed by another token.
    """
    row = alternative * len(_SUPPORT_OFFSETS) + _bucket(_SUPPORT_EDGES, support)
    return _FIRST_SUPPORTED + row * len(_MATCH_PRIORS) + continued_match_cell(match_length)


@inner
def ngram_cell(frequency: int, share: float, depth: int) -> int:
    """Cell of an n-gram's token.

    Args:
        frequency: how often it was seen here.
        share: of what was seen here.
        depth: from 1, counted from the n-gram's first token.
    """
    row = (min(depth, _NGRAM_DEPTHS) - 1) * _COUNTS + _bucket(_COUNT_EDGES, frequency)
    return _FIRST_NGRAM + row * _SHARES + _bucket(_SHARE_EDGES, share)


@inner
def _cell_of_chance(first: int, chance: float, depth: int) -> int:
    """Among a source's cells by depth and by the chance that it gives, the first at ``first``."""
    row = min(depth, _HEAD_DEPTHS) - 1
    return first + row * _PROBABILITIES + _bucket(_PROBABILITY_EDGES, chance)


@inner
def head_cell(source: int, probability: float, depth: int) -> int:
    """Cell of a token of a head or the draft pass.

    Args:
        source: a :class:`Source` of them.
        probability: that it gives the token.
        depth: of the token, from 1.
    """
    first = _FIRST_HEAD + (source - _FIRST_HEAD_SOURCE) * _HEAD_CELLS
    return _cell_of_chance(first, probability, depth)


@inner
def context_cell(chance: float, depth: int) -> int:
    """Cell of a token that followed the newest ones before.

    Args:
        chance: that the noise leaves it.
        depth: of the token, from 1.
    """
    return _cell_of_chance(_FIRST_CONTEXT, chance, depth)


@entry
def head_rate(cells: Floats, source: int, probability: float, depth: int) -> float:
    """Learned chance of a token of a head or the draft pass.

    Args:
        cells: float64 ``[cells, 2]``, of the request.
        source, probability, depth: see :func:`head_cell`.
    """
    rate: float = cells[head_cell(source, probability, depth), RATE]
    return rate


@inner
def observe_candidate(cells: Floats, cell: int, is_accepted: bool) -> None:
    """Learns from a candidate whose parent was accepted.

    Args:
        cells: float64 ``[cells, 2]``, of the request.
        cell: the candidate's.
        is_accepted: whether the candidate came.
    """
    weight = min(cells[cell, _WEIGHT] + 1.0, _MEMORY)
    cells[cell, _WEIGHT] = weight
    rate = cells[cell, RATE]
    cells[cell, RATE] = rate + ((1.0 if is_accepted else 0.0) - rate) / weight
