"""Samples at the nodes of verified draft trees, walks them, and returns what is emitted.

At every node the next token is the one that plain vLLM would sample there with
the same parameters and the same noise; the walk follows the tree as long as the
sampled token is a child of where it stands. What it emits is therefore what
plain decoding would have emitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from vllm.config.model import PROCESSED_LOGPROBS_MODES, LogprobsMode
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.sampler import Sampler

from vllm_tokenswift.draft.gumbel_noise import GumbelNoise
from vllm_tokenswift.draft.top_tokens import (
    LEAST_PROBABILITY,
    NO_TOKEN,
    TOP_K,
    TOP_K_COLUMNS,
    TopKRows,
)
from vllm_tokenswift.sampling.acceptance_walk import AcceptanceWalk, Place, VerifyResult, VerifyRows
from vllm_tokenswift.sampling.constraints import Rows, apply_constraints, shape_distribution
from vllm_tokenswift.sampling.logprobs import gather_logprobs, wants_logprobs
from vllm_tokenswift.sampling.position_noise import PositionDraws, noise_sampler
from vllm_tokenswift.sampling.request_parameters import PenaltyDefaults, RequestOptions, validate
from vllm_tokenswift.sampling.sampling_state import SamplingState

__all__ = ["TreeSampler", "VerifyResult", "VerifyRows", "sampled_token_ids"]

OnSampled = Callable[[torch.Tensor], None]
"""Takes int64 ``[groups]`` on the device: the sample of each group."""


class TreeSampler:
    """All requests' sampling state, and the sampling of their trees.

    Takes the place of vLLM's ``RejectionSampler`` (vllm/v1/sample/rejection_sampler.py). Here
    nothing is rejected by a coin of its own: the sample decides (the paper's appendix A shows
    the same losslessness for its walk).

    Args:
        vocab_size: width of the logits.
        device: of the logits.
        options: gives ``penalty_theta`` and ``penalty_window`` to requests that name none.
        logprobs_mode: as vLLM's ``Sampler`` takes it.
        use_fp64_gumbel: likewise.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        options: PenaltyDefaults,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        use_fp64_gumbel: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.options = options
        self.logprobs_mode = logprobs_mode
        self._noise = noise_sampler(vocab_size, device, use_fp64_gumbel)
        self._states: dict[str, SamplingState] = {}
        # On a CPU each row costs time, so only the rows on the walk are sampled, depth
        # by depth. On a GPU a round trip per depth costs more than all the rows.
        self._sample_whole_trees = device.type != "cpu"

    def add_request(
        self,
        req_id: str,
        sampling_params: SamplingParams,
        prompt_token_ids: list[int] | None,
        output_token_ids: Sequence[int],
        generator: torch.Generator | None,
    ) -> None:
        """Take in a request, new or resumed; its state is derived from the history given.

        A known ``req_id`` keeps its pending noise: its generator has already been
        drawn from.

        Args:
            req_id: the request's id.
            sampling_params: its parameters, TokenSwift's own in ``extra_args``.
            prompt_token_ids: its prompt.
            output_token_ids: what it has emitted so far.
            generator: of a seeded request; None where it has no seed.

        Raises:
            ValueError: TokenSwift cannot decode the request.
        """
        if prompt_token_ids is None:
            raise ValueError(
                f"request {req_id} has prompt embeddings and no prompt_token_ids: TokenSwift "
                "needs the prompt's tokens; send them, or serve without TokenSwift"
            )
        validate(sampling_params)
        options = RequestOptions.from_sampling_params(sampling_params, self.options)
        known = self._states.get(req_id)
        self._states[req_id] = SamplingState(
            sampling_params,
            options,
            prompt_token_ids,
            output_token_ids,
            self._new_draws(generator) if known is None else known.draws,
            self.vocab_size,
            self.device,
        )

    def _new_draws(self, generator: torch.Generator | None) -> PositionDraws:
        return self._noise.new_draws(generator)

    def noise_of(self, req_id: str) -> GumbelNoise | None:
        """The noise of a request's coming positions, from its next on, for drafting to look at.

        Returns:
            The noise; None where the request is greedy or its noise is not known beforehand.
        """
        state = self._states[req_id]
        return None if state.greedy else state.draws.coming_noise()

    def states(self, req_ids: Sequence[str]) -> list[SamplingState]:
        """The sampling states of requests, in the order asked for; only to be read."""
        return [self._states[req_id] for req_id in req_ids]

    def remove_request(self, req_id: str) -> None:
        """Forget a finished request; one that is not known is no error."""
        self._states.pop(req_id, None)

    def commit_tokens(self, req_id: str, tokens: Sequence[int]) -> None:
        """The request's history grows by the emitted tokens that vLLM kept."""
        self._states[req_id].commit_tokens(tokens)

    def sample_trees(
        self,
        logits: torch.Tensor,
        groups: Sequence[VerifyRows],
        on_sampled: OnSampled | None = None,
    ) -> tuple[list[VerifyResult], LogprobsTensors | None]:
        """Sample at the nodes of every group's tree, and walk it.

        Args:
            logits: ``[rows, vocab]``, any float dtype, left unchanged; the groups' rows
                one after another.
            groups: the batch rows.
            on_sampled: called with the samples before the host reads them, where it reads
                nothing else; for groups of which none has drafts or is discarded.

        Returns:
            What each group emits, and logprobs if a request of the batch asked for them, laid
            out as :func:`sampled_token_ids` lays out the tokens.
        """
        first_rows: list[int] = []
        num_rows = 0
        for group in groups:
            first_rows.append(num_rows)
            num_rows += len(group.tree) + 1
        assert logits.shape == (num_rows, self.vocab_size), (logits.shape, num_rows)
        states = [self._states[group.req_id] for group in groups]
        wanted = any(
            wants_logprobs(s) and not g.discard for s, g in zip(states, groups, strict=True)
        )
        # The logprobs' source: the caller's logits, or what the constraints made of them.
        processed: torch.Tensor | None = None
        if wanted and self.logprobs_mode in PROCESSED_LOGPROBS_MODES:
            processed = torch.empty(logits.shape, dtype=torch.float32, device=self.device)
        walk = AcceptanceWalk(groups, first_rows, states, logits, processed)
        if wanted:
            on_sampled = None
        if self._sample_whole_trees:
            self._walk_sampled(walk, on_sampled)
        else:
            self._walk_by_depth(walk, on_sampled)
        if not wanted:
            return walk.results, None
        source = logits if processed is None else processed
        emitted, num_slots = walk.emitted_with_logprobs()
        return walk.results, gather_logprobs(source, emitted, num_slots, self.logprobs_mode)

    def draft_probabilities(self, logits: torch.Tensor, req_ids: Sequence[str]) -> torch.Tensor:
        """Probabilities to draft from: the target's constraints on the drafter's logits.

        Every row is treated as its request's next position.

        Args:
            logits: ``[rows, vocab]``, any float dtype, left unchanged.
            req_ids: of each row its request; repeats are allowed.

        Returns:
            float32 ``[rows, vocab]``, each row's sum 1; for greedy requests the softmax after
            the penalties.
        """
        states = [self._states[req_id] for req_id in req_ids]
        rows = Rows(states, [[]] * len(states), self.device)
        shaped = logits.to(torch.float32, copy=True)
        apply_constraints(shaped, rows)
        return self._shape_random(shaped, rows).softmax(dim=-1)

    def _walk_by_depth(self, walk: AcceptanceWalk, on_sampled: OnSampled | None) -> None:
        frontier = walk.roots()
        while frontier:
            sampled = self._sample(walk, frontier)
            if on_sampled is not None:
                on_sampled(sampled)
            children = [
                walk.emit_token(place, token)
                for place, token in zip(frontier, sampled.tolist(), strict=True)
            ]
            frontier = [place for place in children if place is not None]

    def _walk_sampled(self, walk: AcceptanceWalk, on_sampled: OnSampled | None) -> None:
        """Sample at every node that the walk could reach, then walk."""
        places = [place for root in walk.roots() for place in walk.reachable_places(root)]
        if not places:
            return
        on_device = self._sample(walk, places)
        if on_sampled is not None:
            on_sampled(on_device)
        tokens = on_device.tolist()
        sampled = {
            (place.group, place.node): token for place, token in zip(places, tokens, strict=True)
        }
        for root in walk.roots():
            place: Place | None = root
            while place is not None:
                place = walk.emit_token(place, sampled[place.group, place.node])

    def _sample(self, walk: AcceptanceWalk, places: Sequence[Place]) -> torch.Tensor:
        """One token per place, int64 ``[places]``."""
        states = [walk.states[place.group] for place in places]
        rows = Rows(states, [place.path for place in places], self.device)
        shaped = walk.logits_of(places)
        apply_constraints(shaped, rows)
        shaped = self._shape_random(shaped, rows)
        walk.keep_processed(places, shaped)
        greedy = rows.where(lambda state: state.greedy)
        random = rows.where(lambda state: not state.greedy)
        if not random:
            return Sampler.greedy_sample(shaped).long()
        self._keep_top_k(walk, places, random, shaped)
        draws = [states[row].draws for row in random]
        depths = [len(places[row].path) for row in random]
        if not greedy:
            return self._noise.sample(shaped, draws, depths)
        tokens = torch.empty(len(places), dtype=torch.int64, device=self.device)
        tokens[greedy] = Sampler.greedy_sample(shaped[greedy]).long()
        tokens[random] = self._noise.sample(shaped[random], draws, depths)
        return tokens

    def _keep_top_k(
        self, walk: AcceptanceWalk, places: Sequence[Place], random: list[int], shaped: torch.Tensor
    ) -> None:
        """Writes down the verify top-k of the places whose groups want it.

        random: those that are sampled with noise; the others' rows have another shape.
        """
        if walk.top_k is None:
            return
        wanted = [row for row in random if walk.groups[places[row].group].wants_top_k]
        if wanted:
            logits = shaped if len(wanted) == len(places) else shaped[wanted]
            walk.top_k[[walk.row_of(places[row]) for row in wanted]] = top_k_rows(logits)

    def _shape_random(self, logits: torch.Tensor, rows: Rows) -> torch.Tensor:
        """The distribution's shape, for the rows of random requests."""
        random = rows.where(lambda state: not state.greedy)
        if not random:
            return logits
        if len(random) == len(rows):
            return shape_distribution(logits, rows)
        logits[random] = shape_distribution(logits[random], rows.subset(random))
        return logits


def top_k_rows(logits: torch.Tensor) -> TopKRows:
    """The likeliest tokens of each row and their probabilities (``draft/top_tokens.py``).

    Args:
        logits: float32 ``[rows, vocab]``, under all constraints and after temperature.

    Returns:
        int32 ``[rows, TOP_K_COLUMNS]`` on the host; of tokens that are equally likely the
        first stands first.
    """
    probabilities = logits.softmax(dim=-1).numpy(force=True)
    top_k = np.full((len(probabilities), TOP_K_COLUMNS), NO_TOKEN, np.int32)
    for row, chances in zip(top_k, probabilities, strict=True):
        likely = np.flatnonzero(chances >= LEAST_PROBABILITY).astype(np.int32)
        first = likely[np.argsort(-chances[likely], kind="stable")[:TOP_K]]
        row[: len(first)] = first
        row[TOP_K : TOP_K + len(first)] = chances[first].view(np.int32)
    return top_k


def sampled_token_ids(results: Sequence[VerifyResult], device: torch.device) -> torch.Tensor:
    """The emitted tokens as vLLM's bookkeeping takes them (``RejectionSampler.parse_output``).

    Args:
        results: what each group emits.
        device: of the tensor.

    Returns:
        int32 ``[groups, width]``, padded with -1; width is the longest group's number of
        tokens, at least 1.
    """
    width = max([1, *(len(result.tokens) for result in results)])
    padded = [result.tokens + [-1] * (width - len(result.tokens)) for result in results]
    return torch.tensor(padded, dtype=torch.int32, device=device).reshape(-1, width)
