"""The windowed penalty (the paper's contextual penalty, its Eq. 4).

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

    Args:
        size: the paper's W, at least 1.
        history: the sequence so far, or its end.
    """

    def __init__(self, size: int, history: Sequence[int]) -> None:
        self.size = size
        self._buffer = np.zeros(2 * size, np.int64)
        self._end = 0
        self.append_tokens(history[-size:])

    @classmethod
    def over(cls, size: int, prompt: Sequence[int], output: Sequence[int]) -> TokenWindow:
        """The window at the end of ``prompt + output``, reading only what it needs.

        Args:
            size: the paper's W in tokens, at least 1.
            prompt: token ids.
            output: token ids.
        """
        missing = max(size - len(output), 0)
        return cls(size, [*(prompt[-missing:] if missing else ()), *output[-size:]])

    def append_tokens(self, tokens: Sequence[int]) -> None:
        """The sequence goes on with these tokens; the oldest leave the window."""
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
    """The tokens to penalise in each row.

    Args:
        windows: one per request, none empty.
        owners: for each row, its request's index in ``windows``.
        paths: for each row, the draft tokens from the root's child down to its node.
        device: of the result.

    Returns:
        int64 ``[rows, W + depth]``, with repeats; W is that of the largest window, depth the
        longest path's length.
    """
    texts = [window.tokens for window in windows]
    length = np.array([[len(text)] for text in texts])[owners]  # [rows, 1]
    size = np.array([[window.size] for window in windows])[owners]  # [rows, 1]
    depth = np.array([[len(path)] for path in paths])  # [rows, 1]
    width, deepest = max(map(len, texts)), int(depth.max())

    base = np.zeros((len(windows), width), np.int64)  # right-aligned
    for row, text in zip(base, texts, strict=True):
        row[width - len(text) :] = text
    on_path = np.zeros((len(paths), deepest + 1), np.int64)  # left-aligned after the newest
    on_path[:, 0] = base[owners, -1]
    for row, path in zip(on_path, paths, strict=True):
        row[1 : len(path) + 1] = path
    # The newest token is always in the window: it fills the places that are not.
    newest = np.take_along_axis(on_path, depth, axis=1)  # [rows, 1]

    oldest_base = np.maximum(width - size + depth, width - length)  # [rows, 1], a column
    oldest_path = depth - size  # [rows, 1], a column
    bounds = np.concatenate((newest, oldest_base, oldest_path, depth), axis=1)
    bounds_d = torch.from_numpy(bounds).to(device)  # [rows, 4], in one transfer
    newest_d, oldest_base_d = bounds_d[:, 0:1], bounds_d[:, 1:2]
    oldest_path_d, depth_d = bounds_d[:, 2:3], bounds_d[:, 3:4]
    rows = torch.from_numpy(base).to(device)[torch.tensor(owners, device=device)]
    column = torch.arange(width, device=device)
    rows = torch.where(column >= oldest_base_d, rows, newest_d)  # [rows, width]
    if not deepest:
        return rows
    drafts = torch.from_numpy(on_path[:, 1:]).to(device)  # [rows, deepest]
    column = torch.arange(deepest, device=device)
    inside = (column >= oldest_path_d) & (column < depth_d)
    return torch.cat((rows, torch.where(inside, drafts, newest_d)), dim=1)


def penalise(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, theta: torch.Tensor
) -> None:
    """Apply the penalty in place.

    Args:
        logits: float32 ``[num_rows, vocab]``.
        rows: int64 ``[n, 1]``, the logits rows to change.
        tokens: int64 ``[n, m]``, what to penalise in each; repeats are allowed.
        theta: float32 ``[n, 1]``, at least 1.
    """
    values = logits[rows, tokens]  # [n, m]
    logits[rows, tokens] = torch.where(values > 0, values / theta, values * theta)
