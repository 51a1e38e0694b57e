"""Drafting with the noise in view that will decide the samples.

A sampled token is the one whose exponential noise, divided by its probability, is the
smallest (the Gumbel trick): ``argmin E_x / p_x``. The tree sampler fixes the noise of a position
before the position is sampled, so drafts may look at it: a token whose noise is small is
likelier to come than its probability says. What is emitted stays the same function of text
and noise, whatever was drafted (``sampling/position_noise.py``).

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

from collections.abc import Callable
from math import exp

import numpy as np

from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.draft.exponential_noise import Keys, exponential, position_key

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


@inner
def chance(probability: float, noise: float) -> float:
    """The chance that a token is drawn where its ``probability`` is known."""
    if probability < _LEAST_PROBABILITY:
        return 0.0
    return exp(-noise * (1.0 - probability) / probability)


@inner
def weighed(rate: float, noise: float) -> float:
    """The chance that an offered token is accepted, which is ``rate`` over all noise."""
    if not _LEAST_RATE <= rate < 1.0:
        return rate
    bucket = 0
    for edge in _NOISE_EDGES:
        bucket += edge <= noise
    # The surer an offer, the less it depends on luck.
    odds = rate / (1.0 - rate) * (1.0 + (_ODDS_FACTORS[bucket] - 1.0) * (1.0 - rate))
    return odds / (1.0 + odds)


@entry
def weighed_by(kind: int, key: np.uint64, rate: float, token: int) -> float:
    """:func:`weighed` with the noise of a token. kind, key: see ``draft/exponential_noise.py``."""
    if not _LEAST_RATE <= rate < 1.0:
        return rate  # its noise need not be looked at
    return weighed(rate, exponential(kind, key, token))


@entry
def chance_by(kind: int, key: np.uint64, probability: float, token: int) -> float:
    """:func:`chance` with the noise of a token. kind, key: see ``draft/exponential_noise.py``."""
    return chance(probability, exponential(kind, key, token))


class GumbelNoise:
    """The noise of one request's coming positions.

    kind: which noise. keys: for a number of positions, what their noise is made from (both see
    ``draft/exponential_noise.py``).
    """

    def __init__(self, kind: int, keys: Callable[[int], Keys]) -> None:
        self.kind = kind
        self._keys_of = keys
        self._keys = NO_KEYS
        self._known = 0

    def keys(self, num_positions: int) -> Keys:
        """uint64, of at least the next ``num_positions`` positions."""
        if self._known < num_positions:
            self._keys, self._known = self._keys_of(num_positions), num_positions
        return self._keys

    def noise(self, depth: int, token: int) -> float:
        """``E_x`` of a token, ``depth`` positions after the next."""
        return exponential(self.kind, self._key(depth), token)

    def chance(self, probability: float, depth: int, token: int) -> float:
        """The chance that ``token`` is drawn where its ``probability`` is known."""
        return chance_by(self.kind, self._key(depth), probability, token)

    def weighed(self, rate: float, depth: int, token: int) -> float:
        """The chance that an offered token is accepted, which is ``rate`` over all noise."""
        return weighed_by(self.kind, self._key(depth), rate, token)

    def _key(self, depth: int) -> np.uint64:
        return np.uint64(position_key(self.kind, self.keys(depth + 1), depth))


NO_KEYS: Keys = np.zeros(0, np.uint64)
