"""The windowed penalty over the rows of draft trees, in two launches.

Maths. For each *distinct* token among the last ``W`` tokens of a row's text (the
request's history, then the path of drafts down to the row's node), a positive
logit is divided by ``theta`` and a negative one multiplied
(:mod:`vllm_tokenswift.sampling.penalty.window`).

A token that stands in the window several times gets the same new value from each
of its places, because the first kernel computes all of them from the old logits
before the second writes any: no counting, no sorting.

Memory. ``W`` scattered logits a row, read and written once (one 32-byte sector
each), and as many float32 written and read contiguously. 33 rows at W = 1,024:
2.4 MB, whatever the vocabulary and the length of the text. In PyTorch: 12
launches and six small host-to-device copies for the same.

Aliasing. ``logits`` is changed in place; nothing else may overlap it.

Sentinels. ``theta`` 1 leaves a row as it is. Positions of ``history`` left of a
request's text and of ``path`` beyond a row's depth are never read as tokens.

CUDA graphs. The launch depends on shapes alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_tokenswift.cuda.sampling.row_parameters import RowWindows


def penalise_windows_reference(
    logits: torch.Tensor, windows: RowWindows[torch.Tensor], theta: torch.Tensor
) -> None:
    """Eager twin of :func:`penalise_windows`: same arguments."""
    history, history_lens, window_sizes, owners, path, depths = windows
    for row in range(len(logits)):
        owner, depth = int(owners[row]), int(depths[row])
        text = history[owner, history.shape[1] - int(history_lens[owner]) :]
        text = torch.cat([text, path[row, :depth]])[-int(window_sizes[owner]) :]
        tokens = text.unique().long()
        old = logits[row, tokens]
        logits[row, tokens] = torch.where(old > 0, old / theta[row], old * theta[row])


@triton.jit
def _window_token(
    history_ptr, history_lens_ptr, window_sizes_ptr, owners_ptr, path_ptr, depths_ptr,
    row, place, width, max_depth,
):  # fmt: skip
    """The token at ``place`` of ``history + path`` of a row, and whether its window holds it."""
    owner = tl.load(owners_ptr + row)
    depth = tl.load(depths_ptr + row)
    first = width + depth - tl.load(window_sizes_ptr + owner)
    first = tl.maximum(first, width - tl.load(history_lens_ptr + owner))
    inside = (place >= first) & (place < width + depth)
    in_history = inside & (place < width)
    in_path = inside & (place >= width)
    token = tl.load(history_ptr + owner.to(tl.int64) * width + place, mask=in_history, other=0)
    drafted = tl.load(path_ptr + row * max_depth + place - width, mask=in_path, other=0)
    return tl.where(in_path, drafted, token), inside


@triton.jit(do_not_specialize=["width", "max_depth"])
def _penalised_values_kernel(
    logits_ptr,  # [num_rows, vocab]
    values_ptr,  # [num_rows, width + max_depth]
    history_ptr, history_lens_ptr, window_sizes_ptr, owners_ptr, path_ptr, depths_ptr, theta_ptr,
    row_stride, width, max_depth,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    theta = tl.load(theta_ptr + row)
    if theta == 1.0:
        return
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    token, inside = _window_token(
        history_ptr, history_lens_ptr, window_sizes_ptr, owners_ptr, path_ptr, depths_ptr,
        row, place, width, max_depth,
    )  # fmt: skip
    old = tl.load(logits_ptr + row.to(tl.int64) * row_stride + token, mask=inside, other=0.0)
    # Correctly rounded, as PyTorch divides: plain decoding must see the same logits.
    new = tl.where(old > 0, tl.div_rn(old, tl.broadcast_to(theta, old.shape)), old * theta)
    tl.store(values_ptr + row * (width + max_depth) + place, new, mask=inside)


@triton.jit(do_not_specialize=["width", "max_depth"])
def _write_values_kernel(
    logits_ptr,  # [num_rows, vocab]
    values_ptr,  # [num_rows, width + max_depth]
    history_ptr, history_lens_ptr, window_sizes_ptr, owners_ptr, path_ptr, depths_ptr, theta_ptr,
    row_stride, width, max_depth,
    CHUNK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if tl.load(theta_ptr + row) == 1.0:
        return
    place = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    token, inside = _window_token(
        history_ptr, history_lens_ptr, window_sizes_ptr, owners_ptr, path_ptr, depths_ptr,
        row, place, width, max_depth,
    )  # fmt: skip
    new = tl.load(values_ptr + row * (width + max_depth) + place, mask=inside, other=0.0)
    tl.store(logits_ptr + row.to(tl.int64) * row_stride + token, new, mask=inside)


def penalise_windows(
    logits: torch.Tensor, windows: RowWindows[torch.Tensor], theta: torch.Tensor, chunk: int = 256
) -> None:
    """Apply the windowed penalty in place; see the module's header.

    Args:
        logits: float32 ``[num_rows, vocab]``, rows contiguous.
        windows: of every row.
        theta: float32 ``[num_rows]``, the penalty of each row, at least 1.
        chunk: places of a window that one program looks at, a power of 2.
    """
    history, path = windows.history, windows.path
    width, max_depth = history.shape[1], path.shape[1]
    num_rows = logits.shape[0]
    values = logits.new_empty(num_rows, width + max_depth)
    grid = (num_rows, triton.cdiv(width + max_depth, chunk))
    arguments = (
        logits, values, *windows, theta, logits.stride(0), width, max_depth,
    )  # fmt: skip
    _penalised_values_kernel[grid](*arguments, CHUNK=chunk)
    _write_values_kernel[grid](*arguments, CHUNK=chunk)
