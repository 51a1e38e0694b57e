"""The largest entries of rows that are read chunk by chunk, for kernels to call.

Each chunk keeps its own largest and the sum of ``exp(x - its largest)``; the largest of a row are
among these, and so is what a softmax over the row needs. Two launches of many programs take less
time than one program that reads a row of a whole vocabulary.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def keep_largest(x, place, entry, scores_ptr, places_ptr, sums_ptr, WIDTH: tl.constexpr):
    """Keeps a chunk's ``WIDTH`` largest of ``x``, the largest first, and where they stand.

    x, place: the chunk's entries (-inf: none) and their places in the row, ascending. entry: the
    chunk's number among those of all rows. scores, places: ``[rows, chunks, WIDTH]``. sums:
    ``[rows, chunks]``.
    """
    # A chunk may hold nothing but -inf, and -inf minus -inf must not arise.
    maximum = tl.maximum(tl.max(x, 0), -1e30)
    tl.store(sums_ptr + entry, tl.sum(tl.exp(x - maximum), 0))
    first = tl.min(place, 0)
    for i in tl.static_range(WIDTH):
        best = first + tl.argmax(x, 0)
        tl.store(scores_ptr + entry * WIDTH + i, tl.max(x, 0))
        tl.store(places_ptr + entry * WIDTH + i, best)
        x = tl.where(place == best, float("-inf"), x)


@triton.jit
def kept_of_row(
    scores_ptr, sums_ptr, first, num_chunks, WIDTH: tl.constexpr, CHUNKS_PADDED: tl.constexpr
):
    """What the chunks of a row kept: all scores, the largest, and the sum of ``exp(x - it)``.

    first: the row's first entry. Scores are ``[CHUNKS_PADDED * WIDTH]``, -inf beyond the chunks.
    """
    chunk = tl.arange(0, CHUNKS_PADDED)
    chunk_ok = chunk < num_chunks
    maxima = tl.load(scores_ptr + (first + chunk) * WIDTH, mask=chunk_ok, other=float("-inf"))
    sums = tl.load(sums_ptr + first + chunk, mask=chunk_ok, other=0.0)
    maximum = tl.max(maxima, 0)
    total = tl.sum(sums * tl.exp(maxima - maximum), 0)
    candidate = tl.arange(0, CHUNKS_PADDED * WIDTH)
    scores = tl.load(
        scores_ptr + first * WIDTH + candidate,
        mask=candidate < num_chunks * WIDTH,
        other=float("-inf"),
    )
    return scores, maximum, total
