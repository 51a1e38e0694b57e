"""The small steps of sequential heads between their matrix products, one launch each.

A *path* is a way down from a request's bonus token along drafted tokens; each request has
``BEAM_WIDTH`` places for paths, path ``p`` being request ``p // BEAM_WIDTH``'s. A *level* is
what one head adds below all paths: an *entry* of ``ENTRY`` 32-bit words a path, read back by
the host in one copy (``cuda/heads/beam_graph.py``):

    0        the path's chance (float32; 0: no path stands here)
    1        the state it goes on from: a row of the level above (of the requests, at level 0)
    2        which of that row's tokens it follows
    3        unused
    4..11    the ``WIDTH`` likeliest tokens below it, likeliest first
    12..19   their chances (float32)

Maths. As ``engine/head_drafter.py`` and ``draft/gumbel_noise.py`` have it, in float32: the norm
rounds once; a positive and a negative logit are scaled by temperature and penalty; where the
noise E counts that will decide the sample (MurmurHash3 of seed, position and token, see
``cuda/sampling/seed_noise.py``), a token's chance is its share of ``q / E^power``, else its
probability q; the ``BEAM_WIDTH`` paths with the best products of chances, of at least
``LEAST_CHANCE``, are followed. Of equals the first counts.

CUDA graphs. Launches depend on shapes alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import murmur3_uniform32

from vllm_tokenswift.cuda.top_entries import keep_largest, kept_of_row
from vllm_tokenswift.engine.head_beam import BEAM_WIDTH, PROPOSED_TOKENS

WIDTH = PROPOSED_TOKENS
ENTRY = 4 + 2 * WIDTH
# Scales of a request, and the power of its noise: see :func:`top_tokens`.
SCALES = 4
# Tokens that one program looks through: few, since it goes through them WIDTH times.
_CHUNK = 1024

_PATHS = tl.constexpr(BEAM_WIDTH)
_WIDTH = tl.constexpr(WIDTH)
_ENTRY = tl.constexpr(ENTRY)
_SCALES = tl.constexpr(SCALES)


@triton.jit
def _normed(x, weight_ptr, element, element_ok, hidden, eps):
    """``HeadNorm`` of a row in float32 (``heads/model.py``)."""
    scale = tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
    weight = tl.load(weight_ptr + element, mask=element_ok, other=0.0).to(tl.float32)
    return x * scale * weight


@triton.jit(do_not_specialize=["hidden"])
def _enter_kernel(
    entries_ptr,  # [paths, ENTRY]
    states_ptr,  # [rows, hidden]
    embedded_ptr,  # [paths, hidden]
    state_weight_ptr, token_weight_ptr,  # [hidden]
    hidden_ptr,  # [paths, hidden]
    both_ptr,  # [paths, 2 * hidden]
    hidden, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    path = tl.program_id(0)
    state = tl.load(entries_ptr + path * _ENTRY + 1)
    element = tl.arange(0, BLOCK)
    ok = element < hidden
    x = tl.load(states_ptr + state * hidden + element, mask=ok, other=0.0)
    tl.store(hidden_ptr + path * hidden + element, x, mask=ok)
    both = _normed(x.to(tl.float32), state_weight_ptr, element, ok, hidden, eps)
    tl.store(both_ptr + path * 2 * hidden + element, both, mask=ok)
    token = tl.load(embedded_ptr + path * hidden + element, mask=ok, other=0.0).to(tl.float32)
    both = _normed(token, token_weight_ptr, element, ok, hidden, eps)
    tl.store(both_ptr + path * 2 * hidden + hidden + element, both, mask=ok)


@triton.jit(do_not_specialize=["hidden"])
def _leave_kernel(
    hidden_ptr,  # [paths, hidden], the old state; the new one
    moved_ptr,  # [paths, hidden]
    weight_ptr,  # [hidden]
    read_ptr,  # [paths, hidden]
    hidden, eps,
    BLOCK: tl.constexpr,
):  # fmt: skip
    path = tl.program_id(0)
    element = tl.arange(0, BLOCK)
    ok = element < hidden
    x = tl.load(hidden_ptr + path * hidden + element, mask=ok, other=0.0)
    moved = tl.load(moved_ptr + path * hidden + element, mask=ok, other=0.0)
    new = (x.to(tl.float32) + moved.to(tl.float32)).to(x.dtype)
    tl.store(hidden_ptr + path * hidden + element, new, mask=ok)
    read = _normed(new.to(tl.float32), weight_ptr, element, ok, hidden, eps)
    tl.store(read_ptr + path * hidden + element, read, mask=ok)


@triton.jit(do_not_specialize=["part", "level", "num_chunks"])
def _chunk_top_kernel(
    logits_ptr,  # [paths, part]
    penalised_ptr,  # uint8 [requests, part]
    scales_ptr,  # [requests, SCALES]
    vocabulary_ptr,  # [part]
    seeds_ptr,  # int64 [requests]
    positions_ptr,  # int64 [requests], of the token before the first level's tokens
    scores_ptr,  # [paths, num_chunks, WIDTH]
    places_ptr,  # int32 [paths, num_chunks, WIDTH]
    sums_ptr,  # [paths, num_chunks]
    part, level, num_chunks,
    CHUNK: tl.constexpr,
):  # fmt: skip
    path = tl.program_id(0)
    chunk = tl.program_id(1)
    request = path // _PATHS
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    ok = place < part
    x = tl.load(logits_ptr + path * part + place, mask=ok, other=float("-inf")).to(tl.float32)
    penalised = tl.load(penalised_ptr + request * part + place, mask=ok, other=0) != 0
    scale_ptr = scales_ptr + request * _SCALES
    plain = tl.load(scale_ptr)
    scale = tl.where(
        penalised, tl.where(x > 0, tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)), plain
    )
    # Tokens that are no more than padding stay below all that are.
    x = tl.where(ok, tl.maximum(x * scale, -1e30), float("-inf"))
    power = tl.load(scale_ptr + 3)
    if power > 0.0:
        token = tl.load(vocabulary_ptr + place, mask=ok, other=0).to(tl.int32)
        position = tl.load(positions_ptr + request) + level
        uniform = murmur3_uniform32(tl.load(seeds_ptr + request), position, token)
        # -log(1 - u), exact where u is small.
        noise = tl.where(uniform < 1e-3, uniform * (1.0 + 0.5 * uniform), -tl.log(1.0 - uniform))
        x = tl.where(ok, x - power * tl.log(tl.maximum(noise, 1e-12)), float("-inf"))
    keep_largest(x, place, path * num_chunks + chunk, scores_ptr, places_ptr, sums_ptr, _WIDTH)


@triton.jit(do_not_specialize=["num_chunks"])
def _top_kernel(
    scores_ptr,  # [paths, num_chunks, WIDTH], each chunk's largest first
    places_ptr,  # int32 [paths, num_chunks, WIDTH]
    sums_ptr,  # [paths, num_chunks], of exp(x - the chunk's largest)
    vocabulary_ptr,  # [part]
    entries_ptr,  # int32 [paths, ENTRY]
    chances_ptr,  # the same memory as float32
    num_chunks,
    CHUNKS_PADDED: tl.constexpr,
):  # fmt: skip
    path = tl.program_id(0)
    first = path * num_chunks
    x, maximum, total = kept_of_row(scores_ptr, sums_ptr, first, num_chunks, _WIDTH, CHUNKS_PADDED)
    candidate = tl.arange(0, CHUNKS_PADDED * _WIDTH)
    entry = path * _ENTRY + 4
    for i in tl.static_range(_WIDTH):
        best = tl.argmax(x, 0)
        tl.store(chances_ptr + entry + _WIDTH + i, tl.exp(tl.max(x, 0) - maximum) / total)
        token = tl.load(vocabulary_ptr + tl.load(places_ptr + first * _WIDTH + best))
        tl.store(entries_ptr + entry + i, token.to(tl.int32))
        x = tl.where(candidate == best, float("-inf"), x)


@triton.jit
def _choose_kernel(
    entries_ptr,  # int32 [paths, ENTRY] of a level; the next level's lie behind them
    chances_ptr,  # the same memory as float32
    tokens_ptr,  # int64 [paths], the tokens that the next level's paths end with
    num_paths,
    LEAST_CHANCE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    candidate = tl.arange(0, _PATHS * _WIDTH)
    path = request * _PATHS + candidate // _WIDTH
    place = candidate % _WIDTH
    above = tl.load(chances_ptr + path * _ENTRY)
    token = tl.load(entries_ptr + path * _ENTRY + 4 + place)
    chance = above * tl.load(chances_ptr + path * _ENTRY + 4 + _WIDTH + place)
    chance = tl.where(chance >= LEAST_CHANCE, chance, 0.0)
    for rank in tl.static_range(_PATHS):
        best = tl.argmax(chance, 0)
        is_best = candidate == best
        next_path = request * _PATHS + rank
        entry = (num_paths + next_path) * _ENTRY
        tl.store(chances_ptr + entry, tl.max(chance, 0))
        tl.store(entries_ptr + entry + 1, request * _PATHS + best // _WIDTH)
        tl.store(entries_ptr + entry + 2, best % _WIDTH)
        best_token = tl.sum(tl.where(is_best, token, 0), 0)
        tl.store(tokens_ptr + next_path, best_token.to(tl.int64))
        chance = tl.where(is_best, 0.0, chance)


def enter_head(
    entries: torch.Tensor,
    states: torch.Tensor,
    embedded: torch.Tensor,
    state_weight: torch.Tensor,
    token_weight: torch.Tensor,
    eps: float,
    hidden: torch.Tensor,
    both: torch.Tensor,
) -> None:
    """Fetches each path's state into ``hidden``, and into ``both`` what the head reads.

    Args:
        entries: int32 ``[paths, ENTRY]``, of this level; read.
        states: ``[rows, hidden]``, of the level above.
        embedded: ``[paths, hidden]``, of the token that each path ends with.
        state_weight: ``[hidden]``, of the state's norm.
        token_weight: ``[hidden]``, of the token's norm.
        eps: of both norms.
        hidden: ``[paths, hidden]``, written; must not overlap ``states``.
        both: ``[paths, 2 * hidden]``, written.
    """
    paths, size = hidden.shape
    _enter_kernel[(paths,)](
        entries, states, embedded, state_weight, token_weight, hidden, both, size, eps,
        BLOCK=triton.next_power_of_2(size), num_warps=4,
    )  # fmt: skip


def leave_head(
    hidden: torch.Tensor, moved: torch.Tensor, weight: torch.Tensor, eps: float, read: torch.Tensor
) -> None:
    """Adds what the head found to the states, and norms them for the LM head.

    Args:
        hidden: ``[paths, hidden]``, the states, changed in place.
        moved: ``[paths, hidden]``, what the head found.
        weight: ``[hidden]``, of the norm.
        eps: of the norm.
        read: ``[paths, hidden]``, what the LM head reads, written.
    """
    paths, size = hidden.shape
    _leave_kernel[(paths,)](
        hidden, moved, weight, read, size, eps, BLOCK=triton.next_power_of_2(size), num_warps=4
    )


def top_tokens(
    logits: torch.Tensor,
    penalised: torch.Tensor,
    scales: torch.Tensor,
    vocabulary: torch.Tensor,
    entries: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    level: int,
) -> None:
    """Writes each path's likeliest tokens and their chances into its entry.

    Args:
        logits: ``[paths, part]``.
        penalised: uint8 ``[requests, part]``, 1 for tokens in the window.
        scales: float32 ``[requests, SCALES]``: what logits are multiplied by; penalised
            positive ones; penalised negative ones; the power of the noise (0: none is looked
            at).
        vocabulary: int64 ``[part]``, token ids.
        entries: int32 ``[paths, ENTRY]``, written.
        seeds: int64 ``[requests]``.
        positions: int64 ``[requests]``, of the token before the first level's.
        level: of the entries, from 0.
    """
    paths, part = logits.shape
    num_chunks = triton.cdiv(part, _CHUNK)
    scores = logits.new_empty(paths, num_chunks, WIDTH, dtype=torch.float32)
    places = logits.new_empty(paths, num_chunks, WIDTH, dtype=torch.int32)
    sums = logits.new_empty(paths, num_chunks, dtype=torch.float32)
    _chunk_top_kernel[(paths, num_chunks)](
        logits, penalised, scales, vocabulary, seeds, positions, scores, places, sums,
        part, level, num_chunks, CHUNK=_CHUNK, num_warps=4,
    )  # fmt: skip
    _top_kernel[(paths,)](
        scores, places, sums, vocabulary, entries, entries.view(torch.float32), num_chunks,
        CHUNKS_PADDED=triton.next_power_of_2(num_chunks), num_warps=1,
    )  # fmt: skip


def choose_paths(entries: torch.Tensor, tokens: torch.Tensor, least_chance: float) -> None:
    """Chooses the paths of the next level; writes the first words of its entries.

    Args:
        entries: int32 ``[2, paths, ENTRY]``, this level and the next.
        tokens: int64 ``[paths]``, takes the tokens that the next level's paths end with.
        least_chance: of a path that is followed, 0 to 1.
    """
    paths = entries.shape[1]
    _choose_kernel[(paths // BEAM_WIDTH,)](
        entries, entries.view(torch.float32), tokens, paths, LEAST_CHANCE=least_chance, num_warps=1
    )
