"""What a draft pass and the heads propose: from hidden states to rows of likely tokens.

Heads that do not look at tokens answer for every depth at once: one pass of the LM head over
all of them. Sequential heads go depth by depth along the likeliest paths, since each has to
know the token before the one it predicts; their rows of all paths and requests share one
pass over the weights, which is what a head costs. Where the platform can, it runs them all at
once (``engine/head_beam.py``); the way from head to head is for fixed plans, large batches, and
constraints that need the whole vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from vllm_tokenswift.common.staging import Staging
from vllm_tokenswift.draft.proposals.head_proposals import NO_ROW, HeadProposals
from vllm_tokenswift.engine.draft_request import HeadRequest
from vllm_tokenswift.engine.head_beam import BEAM_WIDTH, PROPOSED_TOKENS, BeamRoot, HeadBeam
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary

# The least chance of a path that sequential heads go on with: below it a head costs more
# than the token it might bring.
_LEAST_CHANCE = 0.1
# Rows of the LM head that are read at a time, as logits of that many unit vectors.
_UNIT_ROWS = 256


@dataclass
class SelfDraftRows:
    """What draft passes in a row say of one request, a row for each pass.

    followed: the place in each row of the token that the next pass goes on from; heads go on
    from all tokens of the last row.
    """

    tokens: list[list[int]] = field(default_factory=list)
    probabilities: list[list[float]] = field(default_factory=list)
    followed: list[int] = field(default_factory=list)

    def add(self, tokens: list[int], probabilities: list[float], followed: int) -> None:
        self.tokens.append(tokens)
        self.probabilities.append(probabilities)
        self.followed.append(followed)


@dataclass
class _Rows:
    """The rows of one request's candidates, as they grow."""

    tokens: list[list[int]] = field(default_factory=list)
    probabilities: list[list[float]] = field(default_factory=list)
    below: list[list[int]] = field(default_factory=list)

    def add(self, tokens: list[int], probabilities: list[float], path: _Path) -> int:
        row = len(self.tokens)
        self.tokens.append(tokens)
        self.probabilities.append(probabilities)
        self.below.append([NO_ROW] * len(tokens))
        if path.row != NO_ROW:
            self.below[path.row][path.place] = row
        return row


@dataclass(frozen=True)
class _Path:
    """A way down the rows: its last token stands in ``row`` at ``place``.

    state: row of the heads' states that it goes on from.
    """

    request: int
    token: int
    chance: float
    state: int
    row: int = NO_ROW
    place: int = 0


def _roots(requests: Sequence[HeadRequest]) -> list[_Path]:
    """The paths that end with the bonus tokens, one for each request."""
    return [_Path(i, request.bonus_token, 1.0, i) for i, request in enumerate(requests)]


class HeadDrafter:
    """Makes the :class:`HeadProposals` of an engine's requests."""

    def __init__(self, runner: RunnerView) -> None:
        self.model: Any = runner.model
        self.tree_sampler = runner.tree_sampler
        self.options = runner.options
        self.heads: DraftHeads | None = runner.heads
        self.hidden_size = runner.model_config.get_hidden_size()
        self.dtype, self.device = runner.model_config.dtype, runner.device
        self._staging = Staging(runner.device)
        self._part: DraftVocabulary | None = None
        self._lm_rows: torch.Tensor | None = None  # [vocabulary of the heads, hidden]
        if self.heads is not None and (vocabulary := self.heads.vocabulary) is not None:
            self._part = DraftVocabulary(vocabulary, self.tree_sampler.vocab_size)
            self._lm_rows = self._rows_of_lm_head(vocabulary)
        self._head_beam = self._make_head_beam(runner)
        self._launched: tuple[HeadRequest, ...] = ()

    def _make_head_beam(self, runner: RunnerView) -> HeadBeam | None:
        if self.heads is None or not self.heads.is_sequential or self.options.plan != "auto":
            return None
        if self._part is None or self._lm_rows is None:
            return None
        return runner.make_head_beam(self.heads, self._part, self._lm_rows, _LEAST_CHANCE)

    def candidates(
        self,
        requests: Sequence[HeadRequest],
        own: torch.Tensor | None,
        start: torch.Tensor | None,
    ) -> list[HeadProposals]:
        """Candidates of each request, under its sampling constraints.

        own: ``[requests, hidden]``, the draft pass's states after the final norm; None where
            there was no pass. start: the states that the heads start from, None for no heads.
        """
        free = own is None
        widths = list(self.options.head_tree[1:] if free else self.options.head_tree)
        if self.options.plan == "auto":
            # Every head has its say, and the noise picks among many what deserves a node.
            depths = (self.heads.num_heads if self.heads is not None else 0) + (not free)
            widths = [PROPOSED_TOKENS] * depths
        if start is not None and self.heads is not None and self.heads.is_sequential:
            rows = [SelfDraftRows() for _ in requests]
            if own is not None:
                top = self.own_top(requests, own, widths[0])
                for one, tokens, values in zip(rows, *top, strict=True):
                    one.add(tokens, values, followed=0)
            return self._along_paths(requests, rows, start, widths[len(rows[0].tokens) :])
        states = [] if own is None else [own]
        if start is not None and self.heads is not None:
            states += self.heads(start)
        return self._at_once(requests, states[: len(widths)], widths, free)

    def own_top(
        self, requests: Sequence[HeadRequest], own: torch.Tensor, width: int = PROPOSED_TOKENS
    ) -> tuple[list[list[int]], list[list[float]]]:
        """What a draft pass says of each request: tokens and probabilities, ``[requests][width]``.

        own: as in :meth:`candidates`.
        """
        req_ids = [request.req_id for request in requests]
        return self._top(
            self.tree_sampler.draft_probabilities(self.model.compute_logits(own), req_ids), width
        )

    def candidates_below(
        self,
        requests: Sequence[HeadRequest],
        own: Sequence[SelfDraftRows],
        start: torch.Tensor | None,
    ) -> list[HeadProposals]:
        """Candidates of plan "auto" whose first rows are known.

        own: at least a row of each request. start: as in :meth:`candidates`, of its last pass.
        """
        if start is None or self.heads is None:
            return [_below_passes(rows, [], []) for rows in own]
        if not self.heads.is_sequential:
            logits = self.model.compute_logits(torch.cat(self.heads(start)))
            req_ids = [request.req_id for request in requests] * self.heads.num_heads
            tokens, values = self._top(
                self.tree_sampler.draft_probabilities(logits, req_ids), PROPOSED_TOKENS
            )
            return [
                _below_passes(rows, tokens[i :: len(requests)], values[i :: len(requests)])
                for i, rows in enumerate(own)
            ]
        found: dict[int, HeadProposals] = {}
        widths = [PROPOSED_TOKENS] * self.heads.num_heads
        # Heads of a head beam are all at one depth.
        for depth in sorted({len(rows.tokens) for rows in own}):
            places = [i for i, rows in enumerate(own) if len(rows.tokens) == depth]
            at_depth = [requests[i] for i in places]
            states = start if len(places) == len(own) else torch.stack([start[i] for i in places])
            candidates = self._along_paths(at_depth, [own[i] for i in places], states, widths)
            found.update(zip(places, candidates, strict=True))
        # Each depth has waited for the others.
        num_passes = sum({c.own_depths: c.num_passes for c in found.values()}.values())
        return [replace(found[i], num_passes=num_passes) for i in range(len(own))]

    def dummy_run(self) -> object:
        """What heads do in one pass for one request, apart from its constraints (cost curve)."""
        assert self.heads is not None
        if self._head_beam is not None:
            return self._head_beam.dummy_run()
        start = torch.ones(1, self.hidden_size, dtype=self.dtype, device=self.device)
        if self.heads.is_sequential:
            _, reads = self.heads.run_head(0, start, self._embedded([0]))
        else:
            reads = torch.cat(self.heads(start))
        return self._top(self._own_logits(reads).float().softmax(dim=-1), PROPOSED_TOKENS)[0]

    def _at_once(
        self,
        requests: Sequence[HeadRequest],
        states: list[torch.Tensor],
        widths: Sequence[int],
        free: bool,
    ) -> list[HeadProposals]:
        """states: per depth ``[requests, hidden]``, what the LM head reads."""
        logits = self.model.compute_logits(torch.cat(states))
        req_ids = [request.req_id for request in requests] * len(states)
        tokens, values = self._top(
            self.tree_sampler.draft_probabilities(logits, req_ids), max(widths)
        )
        places = range(0, len(states) * len(requests), len(requests))
        return [
            HeadProposals(
                [tokens[place + i][:width] for place, width in zip(places, widths, strict=False)],
                [values[place + i][:width] for place, width in zip(places, widths, strict=False)],
                free=free,
            )
            for i in range(len(requests))
        ]

    def _along_paths(
        self,
        requests: Sequence[HeadRequest],
        own: Sequence[SelfDraftRows],
        start: torch.Tensor,
        widths: Sequence[int],
    ) -> list[HeadProposals]:
        """own: as many rows of each request; widths: of the heads' rows below."""
        assert self.heads is not None
        grown = [_Rows() for _ in requests]
        own_depths = len(own[0].tokens)
        paths = self._below_own_rows(grown, requests, own)
        num_passes = 0
        sees_noise = False
        if self._head_beam is not None and paths:
            num_passes = self._descend(grown, requests, paths, start, own_depths)
            sees_noise = num_passes > 0
        if not sees_noise:
            num_passes = self._step_by_step(grown, requests, paths, start, own_depths, widths)
        return [
            HeadProposals(
                rows.tokens,
                rows.probabilities,
                own_depths == 0,
                rows.below,
                num_passes,
                sees_noise=sees_noise and request.noise is not None,
                own_depths=own_depths,
            )
            for rows, request in zip(grown, requests, strict=True)
        ]

    def _below_own_rows(
        self, grown: Sequence[_Rows], requests: Sequence[HeadRequest], own: Sequence[SelfDraftRows]
    ) -> list[_Path]:
        """Adds what passes say; returns the paths below it that heads go on with."""
        paths = _roots(requests)
        last = len(own[0].tokens) - 1
        for depth in range(last + 1):
            top = [rows.tokens[depth] for rows in own], [rows.probabilities[depth] for rows in own]
            extended = self._extend(grown, requests, paths, top, depth, own=True)
            if depth == last:
                return extended
            paths = [
                _Path(
                    path.request,
                    rows.tokens[depth][rows.followed[depth]],
                    path.chance * _chance(request, rows, depth),
                    path.state,
                    row=depth,
                    place=rows.followed[depth],
                )
                for path, request, rows in zip(paths, requests, own, strict=True)
            ]
        return paths

    def _step_by_step(
        self,
        grown: Sequence[_Rows],
        requests: Sequence[HeadRequest],
        paths: list[_Path],
        start: torch.Tensor,
        depth: int,
        widths: Sequence[int],
    ) -> int:
        """Adds the heads' rows, head by head; returns the passes it took."""
        assert self.heads is not None
        num_passes = 0
        scales = self._scales(requests)
        states = start
        for index, width in enumerate(widths[: self.heads.num_heads]):
            if not paths:
                break
            before = [path.state for path in paths]
            if before != list(range(len(states))):
                [rows] = self._staging.to_device(np.array(before, np.int64))
                states = states[rows]
            embedded = self._embedded([path.token for path in paths])
            states, read = self.heads.run_head(index, states, embedded)
            if scales is None:
                req_ids = [requests[path.request].req_id for path in paths]
                top = self._top(
                    self.tree_sampler.draft_probabilities(self._logits(read), req_ids), width
                )
            else:
                top = self._top_of_part(read, scales, paths, width)
            paths = self._extend(grown, requests, paths, top, depth + index)
            num_passes += 1
        return num_passes

    def _descend(
        self,
        grown: Sequence[_Rows],
        requests: Sequence[HeadRequest],
        paths: list[_Path],
        start: torch.Tensor,
        depth: int,
    ) -> int:
        """Adds what all heads find below the paths, where the platform runs them at once.

        Returns the passes it took; 0: nothing was done, these requests need another way.
        """
        assert self._head_beam is not None
        launched, self._launched = self._launched, ()
        started = {id(request): place for place, request in enumerate(launched)}
        if depth == 0 and all(id(request) in started for request in requests):
            places = [started[id(request)] for request in requests]
        elif self._launch(requests, paths, start, depth):
            places = list(range(len(paths)))
        else:
            return 0
        # By place in the level above: the path, and the row that it leads to. Who was launched and
        # is not asked about has none.
        above = {place: (path, path.row) for place, path in zip(places, paths, strict=True)}
        levels = self._head_beam.found_rows()
        for number, level in enumerate(levels):
            below: dict[int, tuple[_Path, int]] = {}
            for place, found in enumerate(level):
                if found.above not in above:
                    continue
                path, row = above[found.above]
                if number > 0:
                    path = replace(path, row=row, place=found.place)
                row = grown[path.request].add(found.tokens, found.probabilities, path)
                below[place] = (path, row)
            above = below
        return 1 if self._head_beam.runs_ahead else len(levels)

    @property
    def runs_ahead(self) -> bool:
        """Whether :meth:`launch_free` may do anything."""
        return self._head_beam is not None and self._head_beam.runs_ahead

    def may_begin(self, req_id: str) -> bool:
        """Whether :meth:`launch_free` serves a request: not one whose constraints need the whole
        vocabulary."""
        assert self._part is not None
        return self._part.suffices(self.tree_sampler.states([req_id]))

    def launch_free(self, requests: Sequence[HeadRequest], start: torch.Tensor) -> None:
        """Begins what :meth:`candidates` may be asked about any of these same request objects.

        So that the device works on it while the host decides for whom it asks. requests: all
        of them :meth:`may_begin`. start: ``[requests, hidden]``, of the verify pass.
        """
        if self._launch(requests, _roots(requests), start, depth=0):
            self._launched = tuple(requests)

    def _launch(
        self,
        requests: Sequence[HeadRequest],
        paths: Sequence[_Path],
        start: torch.Tensor,
        depth: int,
    ) -> bool:
        assert self._head_beam is not None
        assert self._part is not None
        states = self.tree_sampler.states([request.req_id for request in requests])
        return self._part.suffices(states) and self._head_beam.launch_search(
            states,
            [request.noise is not None for request in requests],
            [BeamRoot(path.request, path.token, path.chance) for path in paths],
            start,
            depth,
        )

    def _extend(
        self,
        grown: Sequence[_Rows],
        requests: Sequence[HeadRequest],
        paths: Sequence[_Path],
        top: tuple[list[list[int]], list[list[float]]],
        depth: int,
        own: bool = False,
    ) -> list[_Path]:
        """Adds a row below each path; returns the paths to go on with, in the rows' order.

        top: tokens and probabilities, ``[paths][width]``. depth: of these tokens, from 0. own:
        they are a draft pass's.
        """
        tokens, values = top
        found: list[list[_Path]] = [[] for _ in grown]
        for state, path in enumerate(paths):
            row = grown[path.request].add(tokens[state], values[state], path)
            noise = requests[path.request].noise
            for place, (token, chance) in enumerate(zip(tokens[state], values[state], strict=True)):
                if noise is not None and own:  # luck may make an unlikely token sure
                    chance = noise.chance(chance, depth, token)
                elif path.chance * chance < _LEAST_CHANCE:
                    break
                elif noise is not None:
                    chance = noise.weighed(chance, depth, token)
                if (chance := path.chance * chance) >= _LEAST_CHANCE:
                    found[path.request].append(
                        _Path(path.request, token, chance, state, row, place)
                    )
        return [
            path
            for of_request in found
            for path in sorted(of_request, key=lambda path: -path.chance)[:BEAM_WIDTH]
        ]

    def _scales(self, requests: Sequence[HeadRequest]) -> torch.Tensor | None:
        """float32 ``[requests, 2, part of the vocabulary]``; None where the tree sampler's own
        constraints have to be applied, over the whole of it."""
        states = self.tree_sampler.states([request.req_id for request in requests])
        if self._part is None or not self._part.suffices(states):
            return None
        return self._part.scales(states)

    def _top_of_part(
        self, read: torch.Tensor, scales: torch.Tensor, paths: Sequence[_Path], width: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        assert self._part is not None
        if len(scales) > 1:
            owners = np.array([path.request for path in paths], np.int64)
            scales = scales[self._staging.to_device(owners)[0]]
        top = self._part.probabilities(self._own_logits(read), scales).topk(width, dim=-1)
        return self._part.tokens[top.indices].tolist(), top.values.tolist()

    def _embedded(self, tokens: Sequence[int]) -> torch.Tensor:
        """``[tokens, hidden]``, by the target."""
        [token_ids] = self._staging.to_device(np.array(tokens, np.int64))
        embedded: torch.Tensor = self.model.embed_input_ids(token_ids)
        return embedded

    def _own_logits(self, read: torch.Tensor) -> torch.Tensor:
        """``[rows, vocabulary of the heads]``."""
        if self._lm_rows is not None:
            return torch.nn.functional.linear(read, self._lm_rows)
        logits: torch.Tensor = self.model.compute_logits(read)
        return logits

    def _logits(self, read: torch.Tensor) -> torch.Tensor:
        """``[rows, vocab]``; minus infinity where the heads propose nothing."""
        own = self._own_logits(read)
        if self._part is None:
            return own
        every = own.new_full((len(read), self.tree_sampler.vocab_size), -float("inf"))
        return every.index_copy_(1, self._part.tokens, own)

    def _rows_of_lm_head(self, vocabulary: torch.Tensor) -> torch.Tensor:
        """The LM head's rows of some tokens, whatever form vLLM keeps its weights in.

        Logits of unit vectors are its columns, exactly; under tensor parallelism they are
        gathered, so that every rank has them.
        """
        parts = []
        for first in range(0, self.hidden_size, _UNIT_ROWS):
            count = min(_UNIT_ROWS, self.hidden_size - first)
            units = torch.zeros(count, self.hidden_size, dtype=self.dtype, device=self.device)
            units[:, first : first + count].fill_diagonal_(1)
            parts.append(self.model.compute_logits(units)[:, vocabulary].T)
        return torch.cat(parts, dim=1).to(self.dtype)

    @staticmethod
    def _top(probabilities: torch.Tensor, width: int) -> tuple[list[list[int]], list[list[float]]]:
        top = probabilities.topk(width, dim=-1)
        return top.indices.tolist(), top.values.tolist()


def _chance(request: HeadRequest, rows: SelfDraftRows, depth: int) -> float:
    """That the token which was followed at ``depth`` comes, by what its pass says."""
    place = rows.followed[depth]
    token, chance = rows.tokens[depth][place], rows.probabilities[depth][place]
    return chance if request.noise is None else request.noise.chance(chance, depth, token)


def _below_passes(
    own: SelfDraftRows, tokens: list[list[int]], probabilities: list[list[float]]
) -> HeadProposals:
    """What passes say, and below the last of them rows that do not look at tokens."""
    tokens, own_depths = own.tokens + tokens, len(own.tokens)
    last = len(tokens) - 1
    below = [[NO_ROW if row == last else row + 1] * len(of) for row, of in enumerate(tokens)]
    for row, place in enumerate(own.followed[:-1]):
        below[row] = [row + 1 if i == place else NO_ROW for i in range(len(tokens[row]))]
    return HeadProposals(
        tokens, own.probabilities + probabilities, False, below, own_depths=own_depths
    )
