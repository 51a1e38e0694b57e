"""Sequential heads as one CUDA graph: every head, both paths, one copy in and one back.

From head to head a dozen small launches and a look at the result cost the host a millisecond;
here the choice of paths is made on the device too (``cuda/heads/beam_kernels.py``). There is a
graph for each of a few numbers of requests. Larger batches, whose passes are long, and requests
whose constraints need the whole vocabulary go from head to head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from vllm.utils.torch_utils import current_stream

from vllm_tokenswift.common.staged_arrays import ArrayShape, StagedArrays
from vllm_tokenswift.cuda.graphs.capture import captured
from vllm_tokenswift.cuda.heads.beam_kernels import (
    ENTRY,
    SCALES,
    WIDTH,
    choose_paths,
    enter_head,
    leave_head,
    top_tokens,
)
from vllm_tokenswift.cuda.sampling.seed_noise import SeedNoise
from vllm_tokenswift.draft.gumbel_noise import noise_power
from vllm_tokenswift.engine.head_beam import BEAM_WIDTH, BeamRoot, BeamRow, Embed
from vllm_tokenswift.heads.model import DraftHeads, SequentialHead
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary
from vllm_tokenswift.sampling.sampling_state import SamplingState

_COUNTS = (1, 2, 4, 8, 16)  # requests of a captured search
# The likeliest tokens are found by one program a path: beyond this its registers run out.
MAX_VOCABULARY = 32768


class HeadBeamGraphs:
    """See :class:`~vllm_tokenswift.engine.head_beam.HeadBeam`.

    Args:
        heads: of the sequential form.
        part: the vocabulary they propose, at most ``MAX_VOCABULARY`` tokens.
        lm_rows: ``[part, hidden]``, the LM head's rows of it.
        embed: of the target's input tokens.
        least_chance: of a path that is followed, 0 to 1.
        max_requests: most requests of a batch.
    """

    runs_ahead = True

    @torch.inference_mode()
    def __init__(
        self,
        heads: DraftHeads,
        part: DraftVocabulary,
        lm_rows: torch.Tensor,
        embed: Embed,
        least_chance: float,
        max_requests: int,
    ) -> None:
        counts = [count for count in _COUNTS if count <= max_requests]
        self._beams = [
            _BeamGraph(heads, part, lm_rows, embed, least_chance, count) for count in counts
        ]
        self._last = self._beams[0]
        largest_first = self._beams[::-1]
        runs = captured([beam.launch for beam in largest_first], lm_rows.device)
        for beam, run_all in zip(largest_first, runs, strict=True):
            beam.run_all = run_all

    @torch.inference_mode()
    def launch_search(
        self,
        states: Sequence[SamplingState],
        sees_noise: Sequence[bool],
        roots: Sequence[BeamRoot],
        hidden: torch.Tensor,
        depth: int,
    ) -> bool:
        if len(states) > self._beams[-1].count:
            return False
        self._last = next(beam for beam in self._beams if beam.count >= len(states))
        self._last.fill(states, sees_noise, roots, depth)
        self._last.run(hidden)
        return True

    def found_rows(self) -> list[list[BeamRow]]:
        return self._last.found_rows()

    @torch.inference_mode()
    def dummy_run(self) -> object:
        beam = self._beams[0]
        beam.entries[0].fill(0)
        beam.chances[0, 0, 0] = 1.0
        beam.run(torch.ones_like(beam.start))
        return beam.found_rows()


class _BeamGraph:
    """The search of ``count`` requests: its buffers, and on a GPU the graph that reads them.

    The arguments are those of :class:`HeadBeamGraphs`; see there.
    """

    def __init__(
        self,
        heads: DraftHeads,
        part: DraftVocabulary,
        lm_rows: torch.Tensor,
        embed: Embed,
        least_chance: float,
        count: int,
    ) -> None:
        self.count = count
        self._layers = [cast(SequentialHead, layer) for layer in heads.layers]
        self._eps, self._part, self._embed = heads.eps, part, embed
        self._lm_rows, self._least_chance = lm_rows, least_chance
        self.run_all = self.launch
        device, num_paths, size = lm_rows.device, BEAM_WIDTH * count, heads.hidden_size
        self._done = torch.cuda.Event() if lm_rows.is_cuda else None

        # What the host gives, and behind it the levels, whose first is given in part.
        shapes = {
            "seeds": ArrayShape((count,), np.int64),
            "positions": ArrayShape((count,), np.int64),
            "tokens": ArrayShape((num_paths,), np.int64),
            "scales": ArrayShape((count, SCALES), np.float32),
            "penalised": ArrayShape((count, len(part.tokens)), np.uint8),
            "entries": ArrayShape((len(self._layers), num_paths, ENTRY), np.int32),
        }
        self._staged = StagedArrays(device, shapes)
        self._given_bytes = self._staged.start("entries") + num_paths * ENTRY * 4
        host, on_device = self._staged.host, self._staged.device
        self._seeds, self._positions = host["seeds"], host["positions"]
        self._tokens, self._scales = host["tokens"], host["scales"]
        self._penalised, self.entries = host["penalised"], host["entries"]
        self.chances = self.entries.view(np.float32)
        self._seeds_d, self._positions_d = on_device["seeds"], on_device["positions"]
        self._scales_d, self._penalised_d = on_device["scales"], on_device["penalised"]
        self._entries_d = on_device["entries"]

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=lm_rows.dtype, device=device)

        self.start = empty(count, size).zero_()
        later = torch.zeros(len(self._layers), num_paths, dtype=torch.int64, device=device)
        self._tokens_d = [on_device["tokens"], *later.unbind()]
        self._hidden = [empty(num_paths, size), empty(num_paths, size)]
        self._both = empty(num_paths, 2 * size)
        self._wide = empty(num_paths, self._layers[0].up.weight.shape[0])
        self._moved, self._read = empty(num_paths, size), empty(num_paths, size)
        self._logits = empty(num_paths, len(part.tokens))

    def fill(
        self,
        states: Sequence[SamplingState],
        sees_noise: Sequence[bool],
        roots: Sequence[BeamRoot],
        depth: int,
    ) -> None:
        """Lays out the inputs on the host; see :meth:`HeadBeam.launch_search`."""
        if self._done is not None:
            self._done.synchronize()  # a search that nobody asked about may still read this
        entries, chances = self.entries[0], self.chances[0]
        chances[:, 0] = 0.0
        entries[:, 1] = 0
        self._tokens.fill(0)
        for index, (state, sees) in enumerate(zip(states, sees_noise, strict=True)):
            if sees:
                assert isinstance(state.draws, SeedNoise)
                self._seeds[index] = state.draws.seed
                self._positions[index] = state.num_prompt + state.num_output - 1 + depth
            plain, positive, negative = self._part.scales_of(state)
            power = noise_power(state.cuts_unlikely) if sees else 0.0
            self._scales[index] = (plain, positive, negative, power)
            self._penalised[index] = self._part.in_window(state)
        rank = 0
        for number, root in enumerate(roots):
            rank = rank + 1 if number and roots[number - 1].request == root.request else 0
            path = root.request * BEAM_WIDTH + rank
            self._tokens[path] = root.token
            chances[path, 0] = root.chance
            entries[path, 1] = root.request

    def run(self, hidden: torch.Tensor) -> None:
        """Launches the search; hidden: ``[requests, hidden]``, at most ``count`` of them."""
        self.start[: len(hidden)].copy_(hidden)
        self.run_all()
        if self._done is not None:
            self._done.record(current_stream())

    def launch(self) -> None:
        """All heads, with the copies in and back; launches alone."""
        self._staged.to_device(self._given_bytes)
        states = self.start
        for level, layer in enumerate(self._layers):
            entries, hidden = self._entries_d[level], self._hidden[level % 2]
            embedded = self._embed(self._tokens_d[level])
            enter_head(
                entries,
                states,
                embedded,
                layer.input_layernorm.weight,
                layer.token_layernorm.weight,
                self._eps,
                hidden,
                self._both,
            )
            torch.mm(self._both, layer.up.weight.T, out=self._wide)
            torch.nn.functional.silu(self._wide, inplace=True)
            torch.mm(self._wide, layer.down.weight.T, out=self._moved)
            leave_head(hidden, self._moved, layer.post_layernorm.weight, self._eps, self._read)
            torch.mm(self._read, self._lm_rows.T, out=self._logits)
            top_tokens(
                self._logits,
                self._penalised_d,
                self._scales_d,
                self._part.tokens,
                entries,
                self._seeds_d,
                self._positions_d,
                level,
            )
            if level + 1 < len(self._layers):
                choose_paths(
                    self._entries_d[level : level + 2],
                    self._tokens_d[level + 1],
                    self._least_chance,
                )
            states = hidden
        self._staged.to_host("entries")

    def found_rows(self) -> list[list[BeamRow]]:
        """Waits for the run, and reads what it wrote."""
        if self._done is not None:
            self._done.synchronize()
        levels: list[list[BeamRow]] = []
        above: dict[int, int] = {}  # of the level above: path -> its place in the list
        # As lists at once: from an array each row takes the host longer than all of it.
        for entries, chances in zip(self.entries.tolist(), self.chances.tolist(), strict=True):
            level: list[BeamRow] = []
            listed: dict[int, int] = {}
            for path, (words, values) in enumerate(zip(entries, chances, strict=True)):
                if not values[0] > 0.0:
                    continue
                row = above[words[1]] if levels else len(level)
                listed[path] = len(level)
                level.append(BeamRow(row, words[2], words[4 : 4 + WIDTH], values[4 + WIDTH :]))
            if not level:
                break
            levels.append(level)
            above = listed
        return levels
