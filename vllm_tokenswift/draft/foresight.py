"""Drafting with the noise in view that will decide the samples.

A sampled token is the one whose exponential noise, divided by its probability, is the
smallest (the Gumbel trick): ``argmin E_x / p_x``. The scorer fixes the noise of a position
before the position is sampled, so drafts may look at it: a token whose noise is small is
likelier to come than its probability says. What is emitted stays the same function of text
and noise, whatever was drafted (``sampling/noise.py``).

Where the probability itself is known, as after a self-draft pass, which is the target on a part
of its cache, the chance follows: the smallest ``E_y / p_y`` of all other tokens is exponential
with rate ``1 - p``, so

    P(x is drawn | E_x = e) = exp(-e (1 - p) / p).

Heads say a probability q of every token of their vocabulary, which is not the target's, but
near: there the likeliest draft is ``argmin E_x / q_x``, and its chance its share of the
``q_x / E_x`` (:func:`noise_power`).

What the text offers has no such probability: a candidate that is right one time in ten was
mostly, when it was right, nearly certain. There the noise is evidence to be weighed, and the
weights are counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from math import exp

NoiseOf = Callable[[int], float]
"""The exponential noise of a token at one position."""

# Counted on SmolLM2's text at temperature 1, with and without a penalty: by the noise of
# 23,000 offered tokens, how the odds that they came differ from all tokens' (in log-odds).
_NOISE_EDGES = (0.03, 0.25, 0.5, 1.0)
_ODDS_FACTORS = tuple(exp(offset) for offset in (1.8, 0.85, 0.0, -0.4, -1.0))
# Offers less likely than this are not worth looking at their noise.
_LEAST_RATE = 0.003
_LEAST_PROBABILITY = 5e-4


def noise_power(cuts_unlikely: bool) -> float:
    """How far the noise counts for heads: chances go by ``q / E^power``.

    cuts_unlikely: min-p or its like is applied to the target's probabilities. It takes tokens
    away that only much luck could have brought, and luck counts for less. By likelihood on
    SmolLM2's text (356 tokens without and 587 with min-p 0.1, powers from 0.3 to 1.6): 1 took
    the first head's top-1 from 0.23, weighed as text, to 0.32; 0.5 kept it at 0.30.
    """
    return 0.5 if cuts_unlikely else 1.0


class Foresight:
    """The noise of one request's coming positions, each looked up when it is first asked for.

    noise_at: for a depth (0 is the position after the bonus token) the noise of its tokens.
    """

    def __init__(self, noise_at: Callable[[int], NoiseOf]) -> None:
        self._noise_at = noise_at
        self._by_depth: list[NoiseOf] = []
        self._known: list[dict[int, float]] = []  # plans of one step ask for the same tokens

    def noise(self, depth: int, token: int) -> float:
        """``E_x`` of a token, ``depth`` positions after the next."""
        while len(self._by_depth) <= depth:
            self._by_depth.append(self._noise_at(len(self._by_depth)))
            self._known.append({})
        known = self._known[depth]
        if token not in known:
            known[token] = self._by_depth[depth](token)
        return known[token]

    def chance(self, probability: float, depth: int, token: int) -> float:
        """The chance that ``token`` is drawn where its ``probability`` is known."""
        if probability < _LEAST_PROBABILITY:
            return 0.0
        return exp(-self.noise(depth, token) * (1.0 - probability) / probability)

    def weighed(self, rate: float, depth: int, token: int) -> float:
        """The chance that an offered token is accepted, which is ``rate`` over all noise."""
        if not _LEAST_RATE <= rate < 1.0:
            return rate
        factor = _ODDS_FACTORS[bisect_right(_NOISE_EDGES, self.noise(depth, token))]
        # The surer an offer, the less it depends on luck.
        odds = rate / (1.0 - rate) * (1.0 + (factor - 1.0) * (1.0 - rate))
        return odds / (1.0 + odds)
