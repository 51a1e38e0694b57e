"""What the sampling kernels need to know of each logits row, laid out on the host.

Index spaces: a *request* is one of the call's, in order; a *logits row* is a node of its
tree; requests' rows follow one another.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.cuda.sampling.seed_noise import SeedNoise
from vllm_tokenswift.sampling.sampling_state import SamplingState
from vllm_tokenswift.tree import DraftTree


class Parameter(enum.IntEnum):
    """Rows of :attr:`ScoredRows.parameters`."""

    TEMPERATURE = 0  # 0: greedy
    MIN_P = 1
    ETA_EPSILON = 2
    ETA_ALPHA = 3
    THETA = 4


@dataclass(frozen=True)
class ScoredRows:
    """Arrays by logits row, and the requests' windows.

    general: by row, whether PyTorch operations shape it (see :func:`is_general`); its
        parameters then leave to the kernels nothing but the sample.
    seeds, positions: int64 ``[rows]``, see
        :func:`~vllm_tokenswift.cuda.sampling.sample_kernel.sample_rows`.
    parameters: float32 ``[5, rows]``, by :class:`Parameter`.
    window: arguments of
        :func:`~vllm_tokenswift.cuda.sampling.penalty_kernel.penalise_windows`, up to theta;
        empty where no row is penalised.
    """

    general: npt.NDArray[np.bool_]
    seeds: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    parameters: npt.NDArray[np.float32]
    window: tuple[npt.NDArray[np.int32], ...]

    @property
    def has_random(self) -> bool:
        return bool(self.parameters[Parameter.TEMPERATURE].any())

    @property
    def has_constraints(self) -> bool:
        return bool(self.parameters[[Parameter.MIN_P, Parameter.ETA_EPSILON]].any())

    @classmethod
    def of(
        cls, states: Sequence[SamplingState], trees: Sequence[DraftTree], all_general: bool = False
    ) -> ScoredRows:
        """all_general: the whole distribution is asked for, not the sample alone."""
        widths = [len(tree) + 1 for tree in trees]
        owners = np.repeat(np.arange(len(states), dtype=np.int32), widths)
        depths = np.concatenate([tree.depths for tree in trees])
        general = np.array([all_general or is_general(state) for state in states])
        of_request = np.array(
            [_parameters(state, g) for state, g in zip(states, general, strict=True)], np.float32
        )
        first = np.array([s.num_prompt + s.num_output - 1 for s in states], np.int64)
        return cls(
            general[owners],
            np.array([_seed(state) for state in states], np.int64)[owners],
            first[owners] + depths,
            np.ascontiguousarray(of_request[owners].T),
            _window(states, trees, owners, depths)
            if (of_request[:, Parameter.THETA] != 1).any()
            else (),
        )


def is_general(state: SamplingState) -> bool:
    """Whether a request asks for more than the kernels do in one go."""
    numbers = state.numbers
    return (
        state.uses_top_k
        or state.uses_top_p
        or state.edits_tokens
        or state.num_output < state.min_tokens
        # The kernel takes eta's entropy before min-p.
        or (numbers.min_p > 0 and numbers.eta_epsilon > 0)
    )


def path_tokens(tree: DraftTree) -> npt.NDArray[np.int32]:
    """int32 ``[nodes, at least 1]``: the drafts from the root's child to each node, from the left.

    A placeholder (-1), which nothing is verified under, is given as token 0.
    """
    depths = tree.depths
    paths = np.zeros((len(tree) + 1, max(int(depths.max()), 1)), np.int32)
    tokens = np.maximum(tree.tokens, 0)
    if tree.is_chain:
        n = len(tree)
        paths[1:, :n] = np.tril(np.broadcast_to(tokens, (n, n)))
        return paths
    for node, (token, parent) in enumerate(zip(tokens, tree.parents.tolist(), strict=True), 1):
        paths[node] = paths[parent]
        paths[node, depths[parent]] = token
    return paths


def _seed(state: SamplingState) -> int:
    assert isinstance(state.draws, SeedNoise)
    return state.draws.seed


def _parameters(state: SamplingState, general: bool) -> tuple[float, ...]:
    numbers = state.numbers
    if general:
        return (0.0 if state.greedy else 1.0, 0.0, 0.0, 0.0, 1.0)
    if state.greedy:
        return (0.0, 0.0, 0.0, 0.0, numbers.theta)
    return (
        numbers.temperature,
        numbers.min_p,
        numbers.eta_epsilon,
        numbers.eta_alpha,
        numbers.theta,
    )


def _window(
    states: Sequence[SamplingState],
    trees: Sequence[DraftTree],
    owners: npt.NDArray[np.int32],
    depths: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int32], ...]:
    texts = [() if state.window is None else state.window.tokens for state in states]
    width = max(1, *map(len, texts))
    history = np.zeros((len(states), width), np.int32)
    for row, text in zip(history, texts, strict=True):
        row[width - len(text) :] = text
    sizes = [1 if state.window is None else state.window.size for state in states]
    paths = [path_tokens(tree) for tree in trees]
    path = np.zeros((len(owners), max(p.shape[1] for p in paths)), np.int32)
    start = 0
    for part in paths:
        path[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    return (
        history,
        np.array([len(text) for text in texts], np.int32),
        np.array(sizes, np.int32),
        owners,
        path,
        depths,
    )
