"""Sequential heads on a CPU in one call of compiled code (``cpu/head_chain.py``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from vllm_tokenswift.cpu.head_chain import (
    BEAM_WIDTH,
    MAX_ROWS,
    CpuHeadChain,
    HeadNoise,
    LogitScales,
)
from vllm_tokenswift.draft.gumbel_noise import noise_power
from vllm_tokenswift.engine.head_beam import BeamRoot, BeamRow, Embed
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary
from vllm_tokenswift.sampling.position_noise import SeedDraws
from vllm_tokenswift.sampling.sampling_state import SamplingState


class CPUHeadBeam:
    """See :class:`~vllm_tokenswift.engine.head_beam.HeadBeam`.

    Args:
        heads: of the sequential form.
        part: the vocabulary they propose.
        lm_rows: ``[part, hidden]``, the LM head's rows of it.
        embed: of the target's input tokens.
        least_chance: of a path that is followed, 0 to 1.
    """

    runs_ahead = False

    def __init__(
        self,
        heads: DraftHeads,
        part: DraftVocabulary,
        lm_rows: torch.Tensor,
        embed: Embed,
        least_chance: float,
    ) -> None:
        embeddings = embed(part.tokens).to(torch.bfloat16)
        self._chain = CpuHeadChain(heads, lm_rows, embeddings)
        self._embeddings = _bits(embeddings)  # [part, hidden]
        self._num_heads = heads.num_heads
        self._part, self._embed = part, embed
        self._least_chance = least_chance
        self._dummy_hidden = torch.ones(1, heads.hidden_size)
        self._levels: list[np.ndarray] = []

    def launch_search(
        self,
        states: Sequence[SamplingState],
        sees_noise: Sequence[bool],
        roots: Sequence[BeamRoot],
        hidden: torch.Tensor,
        depth: int,
    ) -> bool:
        if len(states) * BEAM_WIDTH > MAX_ROWS:
            return False
        noises = [
            self._noise(state, depth) if sees else None
            for state, sees in zip(states, sees_noise, strict=True)
        ]
        self._levels = self._chain.search(
            hidden,
            [(root.request, root.chance) for root in roots],
            self._embedded(roots),
            [self._scales(state) for state in states],
            noises,
            self._least_chance,
        )
        return True

    def _embedded(self, roots: Sequence[BeamRoot]) -> npt.NDArray[np.int16]:
        """``[roots, hidden]``. Most tokens are of the part: their rows are at hand, and every
        torch operation right after a pass of the model takes long (its code is out of cache)."""
        rows = np.empty((len(roots), self._embeddings.shape[1]), np.int16)
        for row, root in zip(rows, roots, strict=True):
            place = self._part.place(root.token)
            if place < len(self._embeddings):
                row[:] = self._embeddings[place]
            else:
                embedded = self._embed(torch.tensor([root.token]))
                row[:] = _bits(embedded.to(torch.bfloat16))[0]
        return rows

    def _scales(self, state: SamplingState) -> LogitScales:
        outside, positive, negative = map(float, self._part.scales_of(state))
        return LogitScales(self._part.in_window(state), outside, positive, negative)

    def found_rows(self) -> list[list[BeamRow]]:
        found: list[list[BeamRow]] = []
        for level, rows in enumerate(self._levels):
            above = rows["above"].tolist() if level > 0 else range(len(rows))
            columns = (rows[name].tolist() for name in ("place", "tokens", "chances"))
            found.append([_row(*row) for row in zip(above, *columns, strict=True)])
        return found

    def _noise(self, state: SamplingState, depth: int) -> HeadNoise:
        assert isinstance(state.draws, SeedDraws)
        keys = [state.draws.key_at(depth + level) for level in range(self._num_heads)]
        return HeadNoise(keys, noise_power(state.cuts_unlikely))

    def dummy_run(self) -> object:
        scales = LogitScales(np.zeros(len(self._part.tokens), np.uint8), 1.0, 1.0, 1.0)
        embedded = self._embeddings[:1]
        impossible = 2.0  # no path is followed
        return self._chain.search(
            self._dummy_hidden, [(0, 1.0)], embedded, [scales], [None], impossible
        )


def _bits(tensor: torch.Tensor) -> npt.NDArray[np.int16]:
    """The bits of a bfloat16 tensor, which numpy has no type for."""
    bits: npt.NDArray[np.int16] = tensor.detach().contiguous().view(torch.int16).numpy()
    return bits


def _row(above: int, place: int, tokens: list[int], chances: list[float]) -> BeamRow:
    number = sum(chance > 0.0 for chance in chances)
    return BeamRow(above, place, tokens[:number], chances[:number])
