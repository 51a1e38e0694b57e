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

What the text proposes has no such probability: a candidate that is right one time in ten was
mostly, when it was right, nearly certain. There the noise is evidence to be weighed, and the
weights are counted.

Two kinds of noise, as vLLM's samplers draw it, told apart by a number so that compiled code
takes either:

- SPLITMIX, vLLM's CPU kernel (``fused_gumbel_argmax``): SplitMix64 of a position's seed and the
  token; the keys are the seeds of the coming positions.
- MURMUR, vLLM's model runner V2 (``gumbel_noised_argmax``, ``vllm/v1/worker/gpu/sample/
  gumbel.py``): the 32-bit MurmurHash3 of the request's seed, position and token; the keys are
  the seed and the next position.
"""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log, log1p
from typing import NamedTuple

import numpy as np

from vllm_tokenswift.common.arrays import Keys
from vllm_tokenswift.common.compiled import entry, inner

NO_NOISE, SPLITMIX, MURMUR = 0, 1, 2

NoiseArrays = tuple[int, Keys]
"""A :class:`Noise` on its way into compiled code."""


class Noise(NamedTuple):
    """The noise of coming positions.

    Attributes:
        kind: NO_NOISE, SPLITMIX or MURMUR.
        keys: uint64, what it is made from.
    """

    kind: int
    keys: Keys


NO_KEYS: Keys = np.zeros(0, np.uint64)
UNSEEN_NOISE: NoiseArrays = (NO_NOISE, NO_KEYS)

# How the odds that a candidate comes differ by its noise, in log-odds. Counted.
_NOISE_EDGES = (0.03, 0.25, 0.5, 1.0)
_ODDS_FACTORS = tuple(exp(offset) for offset in (1.8, 0.85, 0.0, -0.4, -1.0))
# Candidates less likely than this are not worth looking at their noise.
_LEAST_RATE = 0.003
_LEAST_PROBABILITY = 5e-4

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_SPLITMIX_1, _SPLITMIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
_MANTISSA_SHIFT = np.uint64(11)


@inner
def splitmix64(state: np.uint64) -> np.uint64:
    """The output function of the SplitMix64 generator (Steele, Lea and Flood, 2014)."""
    state = (state ^ (state >> _30)) * _SPLITMIX_1
    state = (state ^ (state >> _27)) * _SPLITMIX_2
    return state ^ (state >> _31)


# MurmurHash3, x86, 32 bits (Austin Appleby), in 64-bit numbers.
_LOW = np.uint64(0xFFFFFFFF)
_MURMUR_1, _MURMUR_2 = np.uint64(0xCC9E2D51), np.uint64(0x1B873593)
_MURMUR_3, _MURMUR_4 = np.uint64(0x85EBCA6B), np.uint64(0xC2B2AE35)
_FIVE, _ADDED = np.uint64(5), np.uint64(0xE6546B64)
_13, _15, _16, _17, _19, _32 = (np.uint64(bits) for bits in (13, 15, 16, 17, 19, 32))


@inner
def _murmur3_mix(state: np.uint64, word: np.uint64) -> np.uint64:
    word = (word * _MURMUR_1) & _LOW
    word = ((word << _15) | (word >> _17)) & _LOW
    state ^= (word * _MURMUR_2) & _LOW
    state = ((state << _13) | (state >> _19)) & _LOW
    return (state * _FIVE + _ADDED) & _LOW


@inner
def _murmur3_finish(state: np.uint64) -> np.uint64:
    state = ((state ^ (state >> _16)) * _MURMUR_3) & _LOW
    state = ((state ^ (state >> _13)) * _MURMUR_4) & _LOW
    return state ^ (state >> _16)


@entry
def position_key(kind: int, keys: Keys, depth: int) -> np.uint64:
    """What the noise of a position's tokens is made from.

    Args:
        kind, keys: see :class:`Noise`.
        depth: of the position, after the next.
    """
    if kind == SPLITMIX:
        return splitmix64(keys[depth])
    if kind == MURMUR:
        state = _murmur3_mix(np.uint64(0), keys[0] & _LOW)
        state = _murmur3_mix(state, keys[0] >> _32)
        return _murmur3_mix(state, (keys[1] + np.uint64(depth)) & _LOW)
    return np.uint64(0)


@entry
def exponential(kind: int, key: np.uint64, token: int) -> float:
    """``E_x`` of a token. key: of its position."""
    if kind == SPLITMIX:
        bits = np.int64(splitmix64(key + np.uint64(token + 1) * _GAMMA) >> _MANTISSA_SHIFT)
        return -log((bits + 0.5) * 2.0**-53)
    bits = np.int64(_murmur3_finish(_murmur3_mix(key, np.uint64(token)) ^ _16))
    return -log1p(-((bits + 0.5) * 2.0**-32))


def noise_power(cuts_unlikely: bool) -> float:
    """How far the noise counts for heads: chances go by ``q / E^power``.

    Args:
        cuts_unlikely: min-p or its like is applied to the target's probabilities. It takes
            tokens away that only much luck could have brought, and luck counts for less.
    """
    return 0.5 if cuts_unlikely else 1.0


@inner
def chance(probability: float, noise: float) -> float:
    """The chance that a token is drawn whose probability is known.

    Args:
        probability: of the target, under the request's constraints.
        noise: ``E_x`` of the token.
    """
    if probability < _LEAST_PROBABILITY:
        return 0.0
    return exp(-noise * (1.0 - probability) / probability)


@inner
def weighed(rate: float, noise: float) -> float:
    """The chance that a candidate is accepted.

    Args:
        rate: its chance over all noise.
        noise: ``E_x`` of its token.
    """
    if not _LEAST_RATE <= rate < 1.0:
        return rate
    bucket = 0
    for edge in _NOISE_EDGES:
        bucket += edge <= noise
    # The surer a candidate, the less it depends on luck.
    odds = rate / (1.0 - rate) * (1.0 + (_ODDS_FACTORS[bucket] - 1.0) * (1.0 - rate))
    return odds / (1.0 + odds)


@entry
def weighed_by(kind: int, key: np.uint64, rate: float, token: int) -> float:
    """:func:`weighed` with the noise of a token. key: of its position."""
    if not _LEAST_RATE <= rate < 1.0:
        return rate  # its noise need not be looked at
    return weighed(rate, exponential(kind, key, token))


@entry
def chance_by(kind: int, key: np.uint64, probability: float, token: int) -> float:
    """:func:`chance` with the noise of a token. key: of its position."""
    return chance(probability, exponential(kind, key, token))


class GumbelNoise:
    """The noise of one request's coming positions.

    Args:
        kind: SPLITMIX or MURMUR.
        keys: for a number of positions, what their noise is made from (see above).
    """

    def __init__(self, kind: int, keys: Callable[[int], Keys]) -> None:
        self.kind = kind
        self._keys_of = keys
        self._keys = NO_KEYS
        self._num_known = 0

    def arrays(self, num_positions: int) -> NoiseArrays:
        """The fields of :class:`Noise`, of at least the next ``num_positions`` positions."""
        if self._num_known < num_positions:
            self._keys, self._num_known = self._keys_of(num_positions), num_positions
        return self.kind, self._keys

    def noise(self, depth: int, token: int) -> float:
        """``E_x`` of a token, ``depth`` positions after the next."""
        return exponential(self.kind, self._key(depth), token)

    def chance(self, probability: float, depth: int, token: int) -> float:
        """The chance that a token is drawn whose probability is known.

        Args:
            probability: of the target, under the request's constraints.
            depth: positions after the next.
            token: that might be drawn.
        """
        return chance_by(self.kind, self._key(depth), probability, token)

    def weighed(self, rate: float, depth: int, token: int) -> float:
        """The chance that a candidate is accepted.

        Args:
            rate: its chance over all noise.
            depth: positions after the next.
            token: the candidate.
        """
        return weighed_by(self.kind, self._key(depth), rate, token)

    def _key(self, depth: int) -> np.uint64:
        return np.uint64(position_key(*self.arrays(depth + 1), depth))
