"""The noise of vLLM's model runner V2: a function of seed, position and token."""

from __future__ import annotations

from collections.abc import Callable
from math import log1p

import numpy as np
import torch

from vllm_tokenswift.sampling.noise import PositionDraws


class SeedNoise(PositionDraws):
    """A request's seed. Nothing is drawn, so nothing is pending or consumed.

    seed: an int64; the request's own, or for an unseeded one a random one, drawn as
    vLLM's ``SamplingStates`` draws it.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__(generator)
        if generator is None:
            limits = np.iinfo(np.int64)
            self.seed = int(np.random.randint(limits.min, limits.max))
        else:
            self.seed = int(np.uint64(generator.initial_seed()).astype(np.int64))

    def commit(self, num_tokens: int) -> None:
        pass

    def noise_of(self, position: int) -> Callable[[int], float]:
        """The exponential noise of each token at one position.

        As ``gumbel_noised_argmax`` draws it (``vllm/v1/worker/gpu/sample/gumbel.py``): the
        32-bit MurmurHash3 of seed, position and token.
        """
        prefix = 0
        for word in (self.seed, self.seed >> 32, position):
            prefix = _murmur3_mix(prefix, word & _MASK32)

        def noise(token: int) -> float:
            uniform = (_murmur3_finish(_murmur3_mix(prefix, token) ^ 16) + 0.5) * 2.0**-32
            return -log1p(-uniform)

        return noise


# MurmurHash3, x86, 32 bits (Austin Appleby).
_MASK32 = (1 << 32) - 1


def _murmur3_mix(state: int, word: int) -> int:
    word = (word * 0xCC9E2D51) & _MASK32
    word = ((word << 15) | (word >> 17)) & _MASK32
    state ^= (word * 0x1B873593) & _MASK32
    state = ((state << 13) | (state >> 19)) & _MASK32
    return (state * 5 + 0xE6546B64) & _MASK32


def _murmur3_finish(state: int) -> int:
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _MASK32
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _MASK32
    return state ^ (state >> 16)
