"""What the sampling kernels need to know of each logits row, laid out on the host.

Index spaces: a *request* is one of the call's, in order; a *logits row* is a node of its
tree; requests' rows follow one another.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from vllm_tokenswift.cuda.sampling.seed_noise import SeedNoise
from vllm_tokenswift.sampling.sampling_state import SamplingState
from vllm_tokenswift.tree import DraftTree

Array = TypeVar("Array", npt.NDArray[np.int32], torch.Tensor)


class RowSampling(NamedTuple):
    """How each logits row is sampled, on the device.

    Each is a tensor of its own: rows of one array begin at any multiple of 4 bytes, and Triton
    compiles a kernel for every pattern of addresses that 16 divides.

    Args:
        seeds: int64 ``[rows]``, the request's seed.
        positions: int64 ``[rows]``, the sequence position of the row's own token (the
            sample's position is the next one).
        temperature: float32 ``[rows]``; 0 is greedy.
        min_p: float32 ``[rows]``; 0 is off.
        eta_epsilon: float32 ``[rows]``; 0 is off.
        eta_alpha: float32 ``[rows]``.
    """

    seeds: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor
    min_p: torch.Tensor
    eta_epsilon: torch.Tensor
    eta_alpha: torch.Tensor


class RowWindows(NamedTuple, Generic[Array]):
    """The penalty's window of each logits row: its request's history, and its path of drafts.

    Args:
        history: int32 ``[requests, width]``, contiguous, the newest committed tokens of each
            request, right-aligned; width is at least the largest window or text.
        history_lens: int32 ``[requests]``, tokens of it that are text.
        window_sizes: int32 ``[requests]``, the paper's W of each request.
        owners: int32 ``[rows]``, the request of each row.
        path: int32 ``[rows, deepest]``, contiguous; the drafts from the root's child down to
            the row's node, left-aligned.
        depths: int32 ``[rows]``, how many of them.
    """

    history: Array
    history_lens: Array
    window_sizes: Array
    owners: Array
    path: Array
    depths: Array


class Parameter(enum.IntEnum):
    """Rows of :attr:`RowParameters.parameters`."""

    TEMPERATURE = 0  # 0: greedy
    MIN_P = 1
    ETA_EPSILON = 2
    ETA_ALPHA = 3
    THETA = 4


@dataclass(frozen=True)
class RowParameters:
    """What is laid out on the host: arrays by logits row, and the requests' windows.

    Args:
        general: bool ``[rows]``, whether PyTorch operations shape the row (see
            :func:`is_general`); its parameters then leave to the kernels nothing but the
            sample.
        seeds: int64 ``[rows]``, see :class:`RowSampling`.
        positions: int64 ``[rows]``, likewise.
        parameters: float32 ``[5, rows]``, by :class:`Parameter`.
        windows: None where no row is penalised.
    """

    general: npt.NDArray[np.bool_]
    seeds: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    parameters: npt.NDArray[np.float32]
    windows: RowWindows[npt.NDArray[np.int32]] | None

    @property
    def has_random(self) -> bool:
        """Whether a row is not greedy."""
        return bool(self.parameters[Parameter.TEMPERATURE].any())

    @property
    def has_constraints(self) -> bool:
        """Whether the kernels apply min-p or eta to a row."""
        return bool(self.parameters[[Parameter.MIN_P, Parameter.ETA_EPSILON]].any())

    @classmethod
    def from_states(
        cls, states: Sequence[SamplingState], trees: Sequence[DraftTree], all_general: bool = False
    ) -> RowParameters:
        """The rows of requests' trees.

        Args:
            states: the requests' sampling states.
            trees: the requests' draft trees, whose nodes are the rows.
            all_general: whether the whole distribution is asked for, not the sample alone.
        """
        widths = [len(tree) + 1 for tree in trees]
        owners = np.repeat(np.arange(len(states), dtype=np.int32), widths)
        depths = np.concatenate([tree.depths for tree in trees])
        general = np.array([all_general or is_general(state) for state in states])
        by_request = np.array(
            [_parameters(state, g) for state, g in zip(states, general, strict=True)], np.float32
        )
        first = np.array([s.num_prompt + s.num_output - 1 for s in states], np.int64)
        return cls(
            general[owners],
            np.array([_seed(state) for state in states], np.int64)[owners],
            first[owners] + depths,
            np.ascontiguousarray(by_request[owners].T),
            _windows(states, trees, owners, depths)
            if (by_request[:, Parameter.THETA] != 1).any()
            else None,
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
    """The drafts from the root's child to each node, left-aligned.

    Args:
        tree: its placeholders (-1), which nothing is verified under, are given as token 0.

    Returns:
        int32 ``[nodes, deepest]``, at least one column.
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


def _windows(
    states: Sequence[SamplingState],
    trees: Sequence[DraftTree],
    owners: npt.NDArray[np.int32],
    depths: npt.NDArray[np.int32],
) -> RowWindows[npt.NDArray[np.int32]]:
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
    return RowWindows(
        history,
        np.array([len(text) for text in texts], np.int32),
        np.array(sizes, np.int32),
        owners,
        path,
        depths,
    )
