"""The windowed penalty (the paper's contextual penalty, its equation "repeat").

For each *distinct* token among the last W tokens of the sequence (prompt
included), a positive logit is divided by theta and a negative one multiplied.
The window of a tree node ends with the tokens on its path: at depth d the d
oldest tokens of the request's window have left it.

A token that stands in the window several times needs no counting: each of its
places computes the same new value from the *old* logit, so writing it twice is
writing it once. So the cost per row is W, whatever the text's length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


class TokenWindow:
    """The last W tokens of one sequence, in order; appending costs amortised O(1).

    The buffer holds 2W tokens; when it is full the newest W move to its front.
    """

    def __init__(self, size: int, history: Sequence[int]) -> None:
        self.size = size
        self._buffer = np.zeros(2 * size, np.int64)
        self._end = 0
        self.extend(history[-size:])

    @classmethod
    def over(cls, size: int, prompt: Sequence[int], output: Sequence[int]) -> TokenWindow:
        """The window at the end of ``prompt + output``, reading only what it needs."""
        missing = max(size - len(output), 0)
        return cls(size, [*(prompt[-missing:] if missing else ()), *output[-size:]])

    def extend(self, tokens: Sequence[int]) -> None:
        tokens = tokens[-self.size :]
        if self._end + len(tokens) > len(self._buffer):
            kept = self.tokens.copy()
            self._buffer[: len(kept)] = kept
            self._end = len(kept)
        self._buffer[self._end : self._end + len(tokens)] = tokens
        self._end += len(tokens)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """int64 ``[min(W, sequence length)]``, oldest first (a view)."""
        return self._buffer[max(self._end - self.size, 0) : self._end]


def window_indices(
    windows: Sequence[TokenWindow],
    owners: Sequence[int],
    paths: Sequence[Sequence[int]],
    device: torch.device,
) -> torch.Tensor:
    """The tokens to penalise in each row: int64 ``[rows, W + depth]``, with repeats.

    windows: one per request, not empty; W here is the largest among them.
    owners: for each row, its request's index in ``windows``.
    paths: for each row, the draft tokens from the root's child down to its node.
    """
    width = max(len(window.tokens) for window in windows)
    depth = max(map(len, paths))
    base = np.zeros((len(windows), width), np.int64)  # right-aligned
    for row, window in zip(base, windows, strict=True):
        row[width - len(window.tokens) :] = window.tokens
    path_tokens = np.zeros((len(paths), depth), np.int64)  # left-aligned
    filler = np.empty((len(paths), 1), np.int64)
    first_base = np.empty((len(paths), 1), np.int64)
    first_path = np.empty((len(paths), 1), np.int64)
    for i, (owner, path) in enumerate(zip(owners, paths, strict=True)):
        window = windows[owner]
        path_tokens[i, : len(path)] = path
        # The newest token is always in the window: it stands where others are not.
        filler[i] = path[-1] if path else window.tokens[-1]
        oldest = max(width - window.size + len(path), width - len(window.tokens))
        first_base[i] = oldest
        first_path[i] = len(path) - window.size
    base_d = torch.from_numpy(base).to(device)  # [requests, width]
    filler_d = torch.from_numpy(filler).to(device)  # [rows, 1]
    rows = base_d[torch.tensor(owners, device=device)]  # [rows, width]
    column = torch.arange(width, device=device)
    rows = torch.where(column >= torch.from_numpy(first_base).to(device), rows, filler_d)
    if not depth:
        return rows
    path_d = torch.from_numpy(path_tokens).to(device)  # [rows, depth]
    lengths = torch.tensor([[len(path)] for path in paths], device=device)
    column = torch.arange(depth, device=device)
    inside = (column >= torch.from_numpy(first_path).to(device)) & (column < lengths)
    return torch.cat((rows, torch.where(inside, path_d, filler_d)), dim=1)


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, theta: torch.Tensor
) -> None:
    """Apply the penalty in place.

    logits: float32 ``[num_rows, vocab]``.
    rows: int64 ``[n, 1]``, the logits rows to change.
    tokens: int64 ``[n, m]``, what to penalise in each; repeats are allowed.
    theta: float32 ``[n, 1]``.
    """
    values = logits[rows, tokens]  # [n, m]
    logits[rows, tokens] = torch.where(values > 0, values / theta, values * theta)
