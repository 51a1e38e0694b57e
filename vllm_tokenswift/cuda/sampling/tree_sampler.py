"""The tree sampler on CUDA: one copy to the device, a handful of launches, one copy back.

Requests whose parameters the kernels know (greedy; temperature, min-p or eta; the windowed
penalty; seeds) cost no PyTorch operation of their own. What else a request may ask for
(top-k, top-p, vLLM's penalties, biases, bad words, ...) is applied to its rows by the
operations of :mod:`vllm_tokenswift.sampling.constraints`, before all rows are sampled
together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from vllm.config.model import LogprobsMode
from vllm.sampling_params import SamplingParams
from vllm.utils.torch_utils import PIN_MEMORY, current_stream

from vllm_tokenswift.common.staging import Staging
from vllm_tokenswift.cuda.sampling.penalty_kernel import penalise_windows
from vllm_tokenswift.cuda.sampling.row_parameters import RowParameters, RowSampling, RowWindows
from vllm_tokenswift.cuda.sampling.sample_kernel import sample_rows
from vllm_tokenswift.cuda.sampling.seed_noise import SeedNoise
from vllm_tokenswift.draft.gumbel_noise import GumbelNoise
from vllm_tokenswift.draft.top_tokens import TOP_K_COLUMNS
from vllm_tokenswift.sampling.acceptance_walk import AcceptanceWalk, Place, VerifyRows
from vllm_tokenswift.sampling.constraints import Rows, apply_constraints
from vllm_tokenswift.sampling.position_noise import PositionDraws
from vllm_tokenswift.sampling.request_parameters import PenaltyDefaults
from vllm_tokenswift.sampling.tree_sampler import OnSampled, TreeSampler
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree


class CUDATreeSampler(TreeSampler):
    """See :class:`~vllm_tokenswift.sampling.tree_sampler.TreeSampler`.

    Samples with the noise of vLLM's model runner V2, plain decoding's on CUDA: a seeded
    request emits the tokens that it emits there. The arguments are that class's.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        options: PenaltyDefaults,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        use_fp64_gumbel: bool = False,
    ) -> None:
        super().__init__(vocab_size, device, options, logprobs_mode, use_fp64_gumbel)
        self._sample_whole_trees = True  # in Triton's interpreter on a CPU as well
        self._use_fp64 = use_fp64_gumbel
        self._row_staging = Staging(self.device)
        self._draft_staging = Staging(self.device)
        self._samples = torch.empty(0, dtype=torch.int64)
        self._top_k = torch.empty(0, TOP_K_COLUMNS, dtype=torch.int32)
        self._copied = torch.cuda.Event() if self.device.type == "cuda" else None

    def _new_draws(self, generator: torch.Generator | None) -> PositionDraws:
        return SeedNoise(generator)

    def noise_of(self, req_id: str) -> GumbelNoise | None:
        state = self._states[req_id]
        if state.greedy or self._use_fp64:
            return None
        assert isinstance(state.draws, SeedNoise)
        return state.draws.noise_from(state.num_prompt + state.num_output - 1)

    def draft_probabilities(self, logits: torch.Tensor, req_ids: Sequence[str]) -> torch.Tensor:
        states = [self._states[req_id] for req_id in req_ids]
        rows = RowParameters.from_states(states, [EMPTY_TREE] * len(states))
        temperature, min_p, _, _, theta, *windows = self._draft_staging.to_device(
            *rows.parameters, *(rows.windows or ())
        )
        shaped = logits.to(torch.float32, copy=True)
        shaped = self._shape_general(
            shaped,
            rows,
            lambda index: Rows([states[i] for i in index], [[]] * len(index), self.device),
        )
        if windows:
            penalise_windows(shaped, RowWindows(*windows), theta)
        if rows.has_random:
            # 0 stands for greedy; such a row keeps its shape.
            shaped.div_((temperature + (temperature == 0)).unsqueeze(1))
        probabilities = shaped.softmax(dim=-1)
        if rows.has_constraints:
            # Drafts need no eta: what it cuts is not among the likeliest.
            least = min_p * probabilities.amax(dim=-1)
            probabilities.masked_fill_(probabilities < least.unsqueeze(1), 0.0)
            probabilities.div_(probabilities.sum(dim=-1, keepdim=True))
        return probabilities

    def warm_up(self, logits: torch.Tensor) -> None:
        """Compiles what requests of all kinds launch, so that none of them waits for it.

        Args:
            logits: ``[2, vocab]``, as the model makes them; left unchanged.
        """
        penalty = {"penalty_theta": 1.5, "penalty_window": 16}
        for params in (
            SamplingParams(temperature=0.0, extra_args={"penalty_theta": 1.0}),
            SamplingParams(min_p=0.1, extra_args={"penalty_theta": 1.0}),
            SamplingParams(extra_args=penalty),
            SamplingParams(min_p=0.1, extra_args=penalty),
        ):
            name = "tokenswift warm-up"
            self.add_request(name, params, [0], [], torch.Generator().manual_seed(0))
            for wanted in (False, True):
                self.sample_trees(
                    logits, [VerifyRows(name, DraftTree.chain([0]), wants_top_k=wanted)]
                )
            self.remove_request(name)

    def _walk_sampled(self, walk: AcceptanceWalk, on_sampled: OnSampled | None) -> None:
        num_rows = len(walk.logits)
        top_k = None
        if walk.top_k is not None:
            top_k = torch.empty(num_rows, TOP_K_COLUMNS, dtype=torch.int32, device=self.device)
        sampled = self._sample_rows(walk, top_k)
        # Copied before anything that is launched behind it, and waited for alone.
        if num_rows > len(self._samples):
            size = 2 * num_rows
            self._samples = torch.empty(size, dtype=torch.int64, pin_memory=PIN_MEMORY)
            self._top_k = torch.empty(size, TOP_K_COLUMNS, dtype=torch.int32, pin_memory=PIN_MEMORY)
        on_host, top_k_on_host = self._samples[:num_rows], self._top_k[:num_rows]
        on_host.copy_(sampled, non_blocking=True)
        if top_k is not None:
            top_k_on_host.copy_(top_k, non_blocking=True)
        if self._copied is not None:
            self._copied.record(current_stream())
        if on_sampled is not None:
            on_sampled(sampled)
        if self._copied is not None:
            self._copied.synchronize()
        tokens = on_host.tolist()
        if walk.top_k is not None:
            walk.top_k[:] = top_k_on_host.numpy()
            walk.clear_dead_nodes()
        for root in walk.roots():
            place: Place | None = root
            while place is not None:
                place = walk.emit_token(place, tokens[walk.row_of(place)])

    def _sample_rows(self, walk: AcceptanceWalk, top_k: torch.Tensor | None) -> torch.Tensor:
        """The tokens of all logits rows, int64 ``[rows]``; top_k: see :func:`sample_rows`."""
        trees = [group.tree for group in walk.groups]
        all_general = walk.processed is not None
        rows = RowParameters.from_states(walk.states, trees, all_general)
        staged = self._row_staging.to_device(
            rows.seeds, rows.positions, *rows.parameters, *(rows.windows or ())
        )
        sampling, theta, windows = RowSampling(*staged[:6]), staged[6], staged[7:]
        logits = walk.logits
        if windows or rows.general.any():
            logits = self._shape_general(
                logits.to(torch.float32, copy=True),
                rows,
                lambda index: _rows_of(walk, index, self.device),
            )
        if windows:
            penalise_windows(logits, RowWindows(*windows), theta)
        if walk.processed is not None:
            walk.processed.copy_(logits)
        return sample_rows(
            logits,
            sampling,
            use_fp64=self._use_fp64,
            has_constraints=rows.has_constraints,
            verify_top_k=top_k,
        )

    def _shape_general(
        self,
        logits: torch.Tensor,
        rows: RowParameters,
        rows_at: Callable[[list[int]], Rows],
    ) -> torch.Tensor:
        """All constraints on the general rows; the others stay as they are.

        logits: float32 ``[rows, vocab]``, may be overwritten; returns the result.
        """
        chosen = np.flatnonzero(rows.general).tolist()
        if not chosen:
            return logits
        general = rows_at(chosen)
        every = len(chosen) == len(logits)
        index = None if every else torch.tensor(chosen, device=self.device)
        part = logits if index is None else logits.index_select(0, index)
        apply_constraints(part, general)
        part = self._shape_random(part, general)
        if index is None:
            return part
        logits[index] = part
        return logits


def _rows_of(walk: AcceptanceWalk, index: Sequence[int], device: torch.device) -> Rows:
    """The logits rows of a walk as the PyTorch operations take them."""
    states, paths = [], []
    for state, group in zip(walk.states, walk.groups, strict=True):
        tokens = group.tree.tokens.tolist()
        for node in range(len(tokens) + 1):
            states.append(state)
            # A placeholder (-1) is no token; nothing below it is walked to.
            paths.append([max(tokens[i - 1], 0) for i in group.tree.path(node)])
    return Rows([states[i] for i in index], [paths[i] for i in index], device)
