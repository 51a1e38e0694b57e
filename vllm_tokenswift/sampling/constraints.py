"""vLLM's logits processing and eta-sampling, for rows at any depth of a draft tree.

The order and the float32 operations are those of plain vLLM's
``Sampler.forward`` (vllm/v1/sample/sampler.py), so that equal logits give
bit-identical samples. A *row* here is one node: its request's state, and the
draft tokens on the path from the root's child down to it (empty for node 0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from vllm_tokenswift.sampling.penalty.window import TokenWindow, penalise, window_indices
from vllm_tokenswift.sampling.sampling_state import SamplingNumbers, SamplingState
from vllm_tokenswift.sampling.token_counts import apply_count_penalties

_MASKED = -float("inf")


@dataclass(frozen=True)
class Rows:
    """The nodes that the rows of a logits tensor belong to.

    Args:
        states: of each row, its request's sampling state.
        paths: of each row, the draft tokens from the root's child down to its node.
        device: of the logits.
    """

    states: Sequence[SamplingState]
    paths: Sequence[Sequence[int]]
    device: torch.device

    def __len__(self) -> int:
        return len(self.states)

    @cached_property
    def numbers(self) -> SamplingNumbers[torch.Tensor]:
        """Each parameter as float32 ``[rows]``."""
        return _columns(tuple(state.numbers for state in self.states), self.device)

    def where(self, uses: Callable[[SamplingState], bool]) -> list[int]:
        """The rows, ascending, whose request's state ``uses`` something."""
        return [row for row, state in enumerate(self.states) if uses(state)]

    def subset(self, rows: Sequence[int]) -> Rows:
        """These rows alone, in this order."""
        return Rows(
            [self.states[row] for row in rows], [self.paths[row] for row in rows], self.device
        )


# A batch's requests stay the same for many steps, and some of them share deeper rows.
@lru_cache(maxsize=16)
def _columns(
    numbers: tuple[SamplingNumbers[float], ...], device: torch.device
) -> SamplingNumbers[torch.Tensor]:
    """To be read only: whoever asks for the same numbers gets the same tensors."""
    table = torch.tensor(numbers, dtype=torch.float32)
    return SamplingNumbers(*table.t().contiguous().to(device))


def apply_constraints(logits: torch.Tensor, rows: Rows) -> None:
    """Everything that also bears on greedy requests, in place.

    In vLLM's order (``Sampler.apply_logits_processors``): allowed tokens, bad words, minimum
    tokens, bias, the windowed penalty, vLLM's penalties.

    Args:
        logits: float32 ``[rows, vocab]``, changed in place.
        rows: what the rows belong to.
    """
    if not any(state.is_constrained for state in rows.states):
        return
    _apply_allowed_tokens(logits, rows)
    _apply_bad_words(logits, rows)
    _apply_min_tokens(logits, rows)
    _apply_logit_bias(logits, rows)
    _apply_windowed_penalty(logits, rows)
    _apply_penalties(logits, rows)


def shape_distribution(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Temperature, min-p, eta, top-k and top-p, for rows that are not greedy.

    Args:
        logits: float32 ``[rows, vocab]``, may be overwritten.
        rows: what the rows belong to; none of a greedy request.

    Returns:
        float32 ``[rows, vocab]``: logits, -inf where a token is cut.
    """
    numbers = rows.numbers
    logits.div_(numbers.temperature.unsqueeze(1))
    if rows.where(lambda state: state.numbers.min_p > 0):
        probabilities = logits.softmax(dim=-1)
        limit = probabilities.amax(dim=-1, keepdim=True) * numbers.min_p.unsqueeze(1)
        logits.masked_fill_(probabilities < limit, _MASKED)
    if rows.where(lambda state: state.numbers.eta_epsilon > 0):
        apply_eta(logits, numbers.eta_epsilon.unsqueeze(1), numbers.eta_alpha.unsqueeze(1))
    sorted_rows = rows.where(lambda state: state.uses_top_k or state.uses_top_p)
    if not sorted_rows:
        return logits
    use_k = any(rows.states[row].uses_top_k for row in sorted_rows)
    use_p = any(rows.states[row].uses_top_p for row in sorted_rows)
    # Sorting a vocabulary takes longest of all: only the rows that ask for it.
    every = len(sorted_rows) == len(rows)
    index = torch.tensor(sorted_rows, device=logits.device)
    shaped: torch.Tensor = apply_top_k_top_p(
        logits if every else logits.index_select(0, index),
        numbers.top_k[index].int() if use_k else None,
        numbers.top_p[index] if use_p else None,
    )
    if every:
        return shaped
    logits[index] = shaped
    return logits


def apply_eta(logits: torch.Tensor, epsilon: torch.Tensor, alpha: torch.Tensor) -> None:
    """Eta-sampling: mask, in place, the tokens below eta; the likeliest always stays.

    A token stays if its probability is at least ``eta = min(epsilon, alpha * exp(-entropy))``
    (Hewitt et al., 2022; the paper's appendix D.1).

    Args:
        logits: float32 ``[rows, vocab]``, after temperature; changed in place.
        epsilon: float32 ``[rows, 1]``; rows with 0 stay as they are.
        alpha: float32 ``[rows, 1]``.
    """
    probabilities = logits.softmax(dim=-1)
    # Summed in float64: how a float32 sum over the vocabulary is split depends on
    # the number of rows, and a row must come out the same in every batch.
    entropy = torch.special.entr(probabilities).sum(dim=-1, keepdim=True, dtype=torch.float64)
    eta = torch.minimum(epsilon.double(), alpha.double() * torch.exp(-entropy)).float()
    # exp(-entropy) can exceed the top probability by a rounding error where all are equal.
    eta = torch.minimum(eta, probabilities.amax(dim=-1, keepdim=True))
    logits.masked_fill_(probabilities < eta, _MASKED)


def _apply_allowed_tokens(logits: torch.Tensor, rows: Rows) -> None:
    for row, state in enumerate(rows.states):
        if state.forbidden is not None:
            logits[row].masked_fill_(state.forbidden, _MASKED)


def _apply_bad_words(logits: torch.Tensor, rows: Rows) -> None:
    places: list[tuple[int, int]] = []
    for row in rows.where(lambda state: bool(state.bad_words)):
        state = rows.states[row]
        past = [*state.tail, *rows.paths[row]]
        for *prefix, last in state.bad_words:
            if not prefix or past[-len(prefix) :] == prefix:
                places.append((row, last))
    _fill(logits, places)


def _apply_min_tokens(logits: torch.Tensor, rows: Rows) -> None:
    """Stop tokens are out until min_tokens (``MinTokensLogitsProcessor``)."""
    places: list[tuple[int, int]] = []
    for row, (state, path) in enumerate(zip(rows.states, rows.paths, strict=True)):
        if state.num_output + len(path) >= state.min_tokens:
            continue
        stops = state.stop_token_ids
        if state.structured and stops:
            # A grammar may allow nothing but the end: then the end wins.
            index = torch.tensor(stops, device=logits.device)
            ends = logits[row, index]
            logits[row, index] = _MASKED
            if bool(torch.isneginf(logits[row]).all()):
                logits[row, index] = ends
        else:
            places.extend((row, token) for token in stops)
    _fill(logits, places)


def _apply_logit_bias(logits: torch.Tensor, rows: Rows) -> None:
    entries = [
        (row, token, bias)
        for row, state in enumerate(rows.states)
        for token, bias in state.bias.items()
    ]
    if entries:
        row, token, bias = zip(*entries, strict=True)
        index = torch.tensor([row, token], device=logits.device)
        logits[index[0], index[1]] += torch.tensor(bias, dtype=torch.float32, device=logits.device)


def _apply_windowed_penalty(logits: torch.Tensor, rows: Rows) -> None:
    chosen = rows.where(lambda state: state.window is not None)
    if not chosen:
        return
    windows: list[TokenWindow] = []
    position: dict[int, int] = {}  # id of a request's state -> its index in windows
    owners = []
    for row in chosen:
        state = rows.states[row]
        assert state.window is not None
        if id(state) not in position:
            position[id(state)] = len(windows)
            windows.append(state.window)
        owners.append(position[id(state)])
    tokens = window_indices(windows, owners, [rows.paths[row] for row in chosen], logits.device)
    index = torch.tensor(chosen, device=logits.device).unsqueeze(1)
    penalise(logits, index, tokens, rows.numbers.theta[index])


def _apply_penalties(logits: torch.Tensor, rows: Rows) -> None:
    chosen = rows.where(lambda state: state.counts is not None)
    if not chosen:
        return
    counts = [state.counts for state in rows.states if state.counts is not None]
    index = torch.tensor(chosen, device=logits.device)
    every = len(chosen) == len(rows)
    part = logits if every else logits.index_select(0, index)
    apply_count_penalties(
        part,
        counts,
        [rows.paths[row] for row in chosen],
        rows.numbers.repetition[index],
        rows.numbers.frequency[index],
        rows.numbers.presence[index],
    )
    if not every:
        logits[index] = part


def _fill(logits: torch.Tensor, places: Sequence[tuple[int, int]]) -> None:
    if places:
        row, token = torch.tensor(places, device=logits.device).t()
        logits[row, token] = _MASKED
