"""The noise of vLLM's model runner V2: a function of seed, position and token."""

from __future__ import annotations

import numpy as np
import torch

from vllm_tokenswift.draft.gumbel_noise import MURMUR, GumbelNoise
from vllm_tokenswift.sampling.position_noise import PositionDraws

_MASK64 = (1 << 64) - 1


class SeedNoise(PositionDraws):
    """A request's seed. Nothing is drawn, so nothing is pending or consumed.

    Args:
        generator: of a seeded request; None where it has no seed.

    Attributes:
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

    def drop_draws(self, num_tokens: int) -> None:
        pass

    def noise_from(self, position: int) -> GumbelNoise:
        """The noise of the positions from a sequence position on."""
        keys = np.array([self.seed & _MASK64, position], np.uint64)
        return GumbelNoise(MURMUR, lambda _: keys)
