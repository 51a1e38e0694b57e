"""The noise that decides a sample: one draw per sequence position.

Plain vLLM draws once per generated token: on the CPU one integer, which seeds a
row of Gumbel noise (``TopKTopPSampler.forward_cpu``), elsewhere one row of
exponential noise (``random_sample``). Here the draw belongs to a *position*:
every node of one depth shares it, and a draw that no emitted token has used
stays for the next iteration. A seeded request's generator is thus consumed as
in plain decoding: one draw per token, in order.

Why the distribution is exact, for any tree. Let ``Z_t`` be the draw of position
t, independent and identically distributed. The token at t is ``f(text before t,
Z_t)``: the tree decides how many tokens one iteration emits, never which. As
long as a position keeps its draw until its token is committed, the whole text
is the same function of ``Z_1, Z_2, ...`` as plain decoding's, even if drafts
were chosen by someone who had looked at the draws.

Discarding unused draws is exact under one more condition: the tree must not
depend on them. The walk stops at a position because of that position's own
draw; later draws were compared with nothing that was emitted, so replacing
them by fresh independent ones changes no joint probability. Exponential rows of
*unseeded* requests are not kept (a row is 4 bytes per vocabulary entry). Everything else is
kept until its token is committed. Drafting looks at the integers (``draft/gumbel_noise.py``),
and at no rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from vllm.platforms import CpuArchEnum, current_platform

from vllm_tokenswift.draft.gumbel_noise import SPLITMIX, GumbelNoise, position_key


class PositionDraws(ABC):
    """The pending draws of one request; index 0 is its next position.

    Args:
        generator: of a seeded request; None where it has no seed.
    """

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    @abstractmethod
    def drop_draws(self, num_tokens: int) -> None:
        """Forget the draws of the next ``num_tokens`` positions, which have their tokens."""

    def coming_noise(self) -> GumbelNoise | None:
        """The noise of the coming positions; None where drafts may not or cannot look at it."""
        return None


class NoiseSampler(ABC):
    """Samples rows of fully constrained logits with the draws of their positions."""

    @abstractmethod
    def new_draws(self, generator: torch.Generator | None) -> PositionDraws:
        """The draws of a new request; generator: its own, None where it has no seed."""

    @abstractmethod
    def sample(
        self, logits: torch.Tensor, draws: Sequence[PositionDraws], depths: Sequence[int]
    ) -> torch.Tensor:
        """One token per row.

        Args:
            logits: float32 ``[rows, vocab]``, may be overwritten.
            draws: of each row, its request's draws.
            depths: of each row, how many positions behind the request's next one it samples.

        Returns:
            int64 ``[rows]``.
        """


class SeedDraws(PositionDraws):
    """One integer per position, from which vLLM's CPU kernel makes its noise."""

    def __init__(self, generator: torch.Generator | None) -> None:
        super().__init__(generator)
        self.pending: deque[int] = deque()

    def seed_at(self, depth: int) -> int:
        """The integer of the position ``depth`` behind the next one, drawn if need be."""
        while len(self.pending) <= depth:
            seed = torch.randint(0, 2**31, (1,), generator=self.generator, dtype=torch.long)
            self.pending.append(int(seed))
        return self.pending[depth]

    def drop_draws(self, num_tokens: int) -> None:
        for _ in range(min(num_tokens, len(self.pending))):
            self.pending.popleft()

    def seeds_ahead(self, num_positions: int) -> npt.NDArray[np.uint64]:
        """The integers of the next positions: uint64 ``[num_positions]``."""
        self.seed_at(num_positions - 1)
        return np.fromiter(islice(self.pending, num_positions), np.uint64, num_positions)

    def coming_noise(self) -> GumbelNoise:
        return GumbelNoise(SPLITMIX, self.seeds_ahead)

    def key_at(self, depth: int) -> int:
        """The state from which a position's noise is made, token by token (uint64)."""
        return int(position_key(SPLITMIX, np.array([self.seed_at(depth)], np.uint64), 0))


class GumbelSeedSampler(NoiseSampler):
    """vLLM's sampling on the CPU (``TopKTopPSampler.forward_cpu``)."""

    def new_draws(self, generator: torch.Generator | None) -> SeedDraws:
        return SeedDraws(generator)

    def sample(
        self, logits: torch.Tensor, draws: Sequence[PositionDraws], depths: Sequence[int]
    ) -> torch.Tensor:
        seeds: list[int] = []
        for draw, depth in zip(draws, depths, strict=True):
            assert isinstance(draw, SeedDraws)
            seeds.append(draw.seed_at(depth))
        tokens: torch.Tensor = torch.ops._C.fused_gumbel_argmax(logits, torch.tensor(seeds))
        return tokens.long()


class RowDraws(PositionDraws):
    """One exponential row per position; empty for unseeded requests (see above).

    Args:
        generator: of a seeded request; None where it has no seed.
        vocab_size: length of a row.
        dtype: of a row.
        device: of a row.
    """

    def __init__(
        self,
        generator: torch.Generator | None,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(generator)
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._device = device
        self.pending: deque[torch.Tensor] = deque()

    def row_at(self, depth: int) -> torch.Tensor:
        """``[vocab]`` of the position ``depth`` behind the next one, drawn if need be."""
        while len(self.pending) <= depth:
            row = torch.empty(self._vocab_size, dtype=self._dtype, device=self._device)
            self.pending.append(row.exponential_(generator=self.generator))
        return self.pending[depth]

    def drop_draws(self, num_tokens: int) -> None:
        for _ in range(min(num_tokens, len(self.pending))):
            self.pending.popleft()


class ExponentialSampler(NoiseSampler):
    """vLLM's sampling in plain PyTorch (``random_sample``): argmax of probability over noise.

    Args:
        vocab_size: width of the logits.
        device: of the logits.
        use_fp64_gumbel: noise in float64, as vLLM's option of this name has it.
    """

    def __init__(self, vocab_size: int, device: torch.device, use_fp64_gumbel: bool) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.dtype = torch.float64 if use_fp64_gumbel else torch.float32

    def new_draws(self, generator: torch.Generator | None) -> RowDraws:
        return RowDraws(generator, self.vocab_size, self.dtype, self.device)

    def sample(
        self, logits: torch.Tensor, draws: Sequence[PositionDraws], depths: Sequence[int]
    ) -> torch.Tensor:
        noise = self._noise_rows(draws, depths)
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        if noise.dtype == probabilities.dtype:
            scores = probabilities.div_(noise)
        else:
            scores = noise.reciprocal_().mul_(probabilities)
        return scores.argmax(dim=-1)

    def _noise_rows(
        self, draws: Sequence[PositionDraws], depths: Sequence[int]
    ) -> torch.Tensor:  # [rows, vocab]
        seeded: list[int] = []
        # Position (request, depth) -> its row in the fresh noise of unseeded requests.
        fresh: dict[tuple[int, int], int] = {}
        for i, (draw, depth) in enumerate(zip(draws, depths, strict=True)):
            if draw.generator is None:
                fresh.setdefault((id(draw), depth), len(fresh))
            else:
                seeded.append(i)
        if not seeded or fresh:
            shape = (len(fresh), self.vocab_size)
            drawn = torch.empty(shape, dtype=self.dtype, device=self.device).exponential_()
            index = [
                fresh.get((id(draw), depth), 0) for draw, depth in zip(draws, depths, strict=True)
            ]
            noise = drawn[torch.tensor(index, device=self.device)]
        else:
            shape = (len(draws), self.vocab_size)
            noise = torch.empty(shape, dtype=self.dtype, device=self.device)
        for i in seeded:
            draw = draws[i]
            assert isinstance(draw, RowDraws)
            noise[i] = draw.row_at(depths[i])
        return noise


def noise_sampler(vocab_size: int, device: torch.device, use_fp64_gumbel: bool) -> NoiseSampler:
    """The kind of noise that ``TopKTopPSampler`` of plain vLLM uses on this machine.

    Args:
        vocab_size: width of the logits.
        device: of the logits.
        use_fp64_gumbel: vLLM's option of this name.

    Returns:
        A sampler whose seeded draws are those of plain decoding
        (vllm/v1/sample/ops/topk_topp_sampler.py).
    """
    native_architectures = (CpuArchEnum.RISCV, CpuArchEnum.POWERPC)
    if (
        current_platform.is_cpu()
        and current_platform.get_cpu_architecture() not in native_architectures
        and not use_fp64_gumbel
    ):
        return GumbelSeedSampler()
    return ExponentialSampler(vocab_size, device, use_fp64_gumbel)
