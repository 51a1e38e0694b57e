"""The exponential noise of a token at a position, as vLLM's samplers draw it.

Two kinds, told apart by a number so that compiled code takes either:

- SPLITMIX, vLLM's CPU kernel (``fused_gumbel_argmax``): SplitMix64 of a position's seed and the
  token; the keys are the seeds of the coming positions.
- MURMUR, vLLM's model runner V2 (``gumbel_noised_argmax``, ``vllm/v1/worker/gpu/sample/
  gumbel.py``): the 32-bit MurmurHash3 of the request's seed, position and token; the keys are
  the seed and the next position.
"""

from __future__ import annotations

from math import log, log1p

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.common.compiled import entry, inner

Keys = npt.NDArray[np.uint64]

NO_NOISE, SPLITMIX, MURMUR = 0, 1, 2

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
    """What the noise of a position's tokens is made from, ``depth`` positions after the next."""
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
