"""Temperature, min-p, eta, the sample of every tree row and its likeliest tokens, in two passes
over the logits.

Maths. That of vLLM's model runner V2 (``vllm/v1/worker/gpu/sample/sampler.py``), which
serves plain decoding on CUDA: with ``x = logit / temperature`` and Gumbel noise ``g``,
the token is ``argmax x + g`` over the tokens that stay:

    min-p:  x >= max x + log(min_p)
    eta:    p >= min(epsilon, alpha * exp(-entropy(p))), p = softmax(x), and the likeliest

The noise is vLLM's own function of (the request's seed, the position, the token)
(``gumbel_noised_argmax``): nothing is drawn, stored or consumed, every node of a depth
has its position's noise, and a seeded request samples what it samples without drafts.

Eta needs no ``p``: with ``m = max x``, ``s = sum exp(x - m)``, ``t = sum (x - m) exp(x - m)``
the entropy is ``log s - t / s``. So one pass collects ``m, s, t`` (left out where no row has a
constraint) and a second finds the sample. A token whose ``p`` lies within a rounding
error of eta may come out differently than in the eager order of operations.

The likeliest tokens (``draft/top_tokens.py``) are those of every chunk, of which the best are
chosen with the samples. Their probabilities need the sum over what stays, which the second pass
collects.

Both constraints look at the unconstrained ``x``: a row should have one of them (the
eager order takes eta's entropy from what min-p left). Rows with other constraints are
shaped by the caller, who then passes temperature 1 and neither.

Memory. Logits twice: 33 rows of 128,256 in float32 move 34 MB (they stay in L2 for the
second pass where they fit).

Aliasing. Inputs are only read. Sentinels: temperature 0 takes the argmax of the
logits; min_p 0 and epsilon 0 are off; logits of -inf are never sampled (while another is
finite).

CUDA graphs. The launch depends on shapes, on ``has_constraints`` and on whether there is a
``verify_top_k``.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl
from vllm.v1.worker.gpu.sample.gumbel import (
    apply_temperature,
    gumbel_noised_argmax,
    gumbel_sample,
)
from vllm.v1.worker.gpu.sample.min_p import apply_min_p

from vllm_tokenswift.cuda.sampling.row_parameters import RowSampling
from vllm_tokenswift.cuda.top_entries import keep_largest, kept_of_row
from vllm_tokenswift.draft.top_tokens import LEAST_PROBABILITY, NO_TOKEN, TOP_K, TOP_K_COLUMNS
from vllm_tokenswift.sampling.constraints import apply_eta
from vllm_tokenswift.sampling.tree_sampler import top_k_rows

_TOP_K = tl.constexpr(TOP_K)
_COLUMNS = tl.constexpr(TOP_K_COLUMNS)
_LEAST = tl.constexpr(LEAST_PROBABILITY)
_NO_TOKEN = tl.constexpr(NO_TOKEN)


def sample_rows_reference(
    logits: torch.Tensor,
    rows: RowSampling,
    use_fp64: bool = False,
    verify_top_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of :func:`sample_rows` in vLLM's own launches: same arguments."""
    temperature = rows.temperature
    x = logits.to(torch.float32, copy=True)
    every = torch.arange(len(x), dtype=torch.int32, device=x.device)
    apply_temperature(x, every, temperature)
    apply_min_p(x, every, rows.min_p)
    apply_eta(x, rows.eta_epsilon[:, None], rows.eta_alpha[:, None])
    if verify_top_k is not None:
        verify_top_k.copy_(torch.from_numpy(top_k_rows(x)))
    return gumbel_sample(
        x,
        every,
        temperature,
        rows.seeds,
        rows.positions,
        apply_temperature=False,
        is_drafting=False,
        use_fp64=use_fp64,
    )


@triton.jit
def _scaled_logits(logits_ptr, row, token, token_ok, row_stride, temperature):
    """Logits over temperature, in the operation of vLLM's ``_temperature_kernel``."""
    x = tl.load(
        logits_ptr + row.to(tl.int64) * row_stride + token, mask=token_ok, other=float("-inf")
    ).to(tl.float32)
    if temperature != 0.0 and temperature != 1.0:
        x = x / temperature
    return x


@triton.jit(do_not_specialize=["vocab", "num_chunks"])
def _row_statistics_kernel(
    logits_ptr,  # [num_rows, vocab]
    temperature_ptr,  # [num_rows]
    statistics_ptr,  # [num_rows, 3, num_chunks]: m, s and t of each chunk
    row_stride,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    temperature = tl.load(temperature_ptr + row)
    x = _scaled_logits(logits_ptr, row, token, token < vocab, row_stride, temperature)
    # A chunk may hold nothing but masked tokens: -inf minus -inf must not arise.
    maximum = tl.maximum(tl.max(x, 0), -1e30)
    weight = tl.exp(x - maximum)
    entry_ptr = statistics_ptr + row * 3 * num_chunks + chunk
    tl.store(entry_ptr, maximum)
    tl.store(entry_ptr + num_chunks, tl.sum(weight, 0))
    shift = tl.where(weight > 0.0, x - maximum, 0.0)
    tl.store(entry_ptr + 2 * num_chunks, tl.sum(shift * weight, 0))


@triton.jit
def _least_logit(
    statistics_ptr, min_p_ptr, eta_epsilon_ptr, eta_alpha_ptr, row, num_chunks,
    CHUNKS_PADDED: tl.constexpr,
):  # fmt: skip
    """What a scaled logit of a row has to reach to stay."""
    other = tl.arange(0, CHUNKS_PADDED)
    other_ok = other < num_chunks
    entry_ptr = statistics_ptr + row * 3 * num_chunks + other
    maxima = tl.load(entry_ptr, mask=other_ok, other=-1e30)
    sums = tl.load(entry_ptr + num_chunks, mask=other_ok, other=0.0)
    weighted = tl.load(entry_ptr + 2 * num_chunks, mask=other_ok, other=0.0)
    maximum = tl.max(maxima, 0)
    least = float("-inf")
    min_p = tl.load(min_p_ptr + row)
    if min_p > 0.0:
        least = maximum + tl.log(min_p)
    epsilon = tl.load(eta_epsilon_ptr + row)
    if epsilon > 0.0:
        shift = tl.where(sums > 0.0, maxima - maximum, 0.0)
        keep = tl.where(sums > 0.0, tl.exp(shift), 0.0)
        total = tl.sum(sums * keep, 0)
        mean = tl.sum(keep * (weighted + shift * sums), 0) / total
        alpha = tl.load(eta_alpha_ptr + row)
        # On the weight exp(x - maximum) = p / max p, whose largest is 1.
        eta = tl.minimum(epsilon, alpha * tl.exp(mean - tl.log(total))) * total
        least = tl.maximum(least, maximum + tl.log(tl.minimum(eta, 1.0)))
    return least


@triton.jit(do_not_specialize=["vocab", "num_chunks"])
def _chunk_samples_kernel(
    logits_ptr,  # [num_rows, vocab]
    seeds_ptr,  # [num_rows]
    positions_ptr,  # [num_rows]
    temperature_ptr,
    min_p_ptr,
    eta_epsilon_ptr,
    eta_alpha_ptr,
    statistics_ptr,  # [num_rows, 3, num_chunks]
    scores_ptr,  # [num_rows, num_chunks]
    tokens_ptr,  # [num_rows, num_chunks]
    likely_ptr,  # [num_rows, num_chunks, TOP_K], see keep_largest
    likely_tokens_ptr,  # [num_rows, num_chunks, TOP_K]
    sums_ptr,  # [num_rows, num_chunks]
    row_stride,
    vocab,
    num_chunks,
    KEEPS_TOP_K: tl.constexpr,
    HAS_CONSTRAINTS: tl.constexpr,
    USE_FP64: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    token_ok = token < vocab
    temperature = tl.load(temperature_ptr + row)
    x = _scaled_logits(logits_ptr, row, token, token_ok, row_stride, temperature)
    if HAS_CONSTRAINTS:
        least = _least_logit(
            statistics_ptr, min_p_ptr, eta_epsilon_ptr, eta_alpha_ptr, row, num_chunks,
            CHUNKS_PADDED,
        )  # fmt: skip
        x = tl.where(x >= least, x, float("-inf"))
    score, best = gumbel_noised_argmax(
        x,
        token,
        token_ok,
        tl.load(seeds_ptr + row),
        tl.load(positions_ptr + row),
        temperature,
        IS_DRAFTING=False,
        USE_FP64=USE_FP64,
        APPLY_TEMPERATURE=False,
    )
    tl.store(scores_ptr + row * num_chunks + chunk, score)
    tl.store(tokens_ptr + row * num_chunks + chunk, chunk * CHUNK + best)
    if KEEPS_TOP_K:
        entry = row * num_chunks + chunk
        keep_largest(x, token, entry, likely_ptr, likely_tokens_ptr, sums_ptr, _TOP_K)


@triton.jit(do_not_specialize=["num_chunks"])
def _row_samples_kernel(
    scores_ptr,  # [num_rows, num_chunks]
    tokens_ptr,  # [num_rows, num_chunks]
    sampled_ptr,  # [num_rows]
    likely_ptr,  # [num_rows, num_chunks, TOP_K]
    likely_tokens_ptr,  # [num_rows, num_chunks, TOP_K]
    sums_ptr,  # [num_rows, num_chunks]
    top_k_ptr,  # int32 [num_rows, TOP_K_COLUMNS]
    probabilities_ptr,  # the same memory as float32
    num_chunks,
    KEEPS_TOP_K: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PADDED)
    score = tl.load(
        scores_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf")
    )
    best = tl.argmax(score, 0)
    tl.store(sampled_ptr + row, tl.load(tokens_ptr + row * num_chunks + best).to(tl.int64))
    if KEEPS_TOP_K:
        first = row * num_chunks
        x, maximum, total = kept_of_row(
            likely_ptr, sums_ptr, first, num_chunks, _TOP_K, CHUNKS_PADDED
        )
        candidate = tl.arange(0, CHUNKS_PADDED * _TOP_K)
        for i in tl.static_range(_TOP_K):
            likeliest = tl.argmax(x, 0)
            probability = tl.exp(tl.max(x, 0) - maximum) / total
            token = tl.load(likely_tokens_ptr + first * _TOP_K + likeliest)
            token = tl.where(probability >= _LEAST, token, _NO_TOKEN)
            tl.store(top_k_ptr + row * _COLUMNS + i, token)
            tl.store(probabilities_ptr + row * _COLUMNS + _TOP_K + i, probability)
            x = tl.where(candidate == likeliest, float("-inf"), x)


def sample_rows(
    logits: torch.Tensor,
    rows: RowSampling,
    use_fp64: bool = False,
    has_constraints: bool = True,
    verify_top_k: torch.Tensor | None = None,
    chunk: int = 4096,
    num_warps: int = 4,
) -> torch.Tensor:
    """Sample every row; see the module's header.

    Args:
        logits: ``[num_rows, vocab]`` float32, bf16 or fp16, rows contiguous, before
            temperature.
        rows: how each is sampled.
        use_fp64: noise and its sum with the logits in float64 (vLLM's ``use_fp64_gumbel``).
        has_constraints: False promises that min_p and eta_epsilon are 0 in every row.
        verify_top_k: int32 ``[num_rows, TOP_K_COLUMNS]``, takes each row's likeliest tokens
            (``draft/top_tokens.py``; behind an id of -1 stands no probability); None where
            nobody asks for them.
        chunk: tokens that one program looks at, a power of 2.
        num_warps: of such a program.

    Returns:
        int64 ``[num_rows]``.
    """
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, chunk)
    padded = triton.next_power_of_2(num_chunks)
    statistics = logits.new_empty(num_rows, 3, num_chunks, dtype=torch.float32)
    scores = logits.new_empty(
        num_rows, num_chunks, dtype=torch.float64 if use_fp64 else torch.float32
    )
    tokens = logits.new_empty(num_rows, num_chunks, dtype=torch.int32)
    sampled = logits.new_empty(num_rows, dtype=torch.int64)
    sums = likely = likely_tokens = None
    if verify_top_k is not None:
        sums = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
        likely = logits.new_empty(num_rows, num_chunks, TOP_K, dtype=torch.float32)
        likely_tokens = torch.empty_like(likely, dtype=torch.int32)
    if has_constraints:
        _row_statistics_kernel[(num_rows, num_chunks)](
            logits,
            rows.temperature,
            statistics,
            logits.stride(0),
            vocab,
            num_chunks,
            CHUNK=chunk,
            num_warps=num_warps,
        )
    _chunk_samples_kernel[(num_rows, num_chunks)](
        logits,
        *rows,
        statistics,
        scores,
        tokens,
        likely,
        likely_tokens,
        sums,
        logits.stride(0),
        vocab,
        num_chunks,
        KEEPS_TOP_K=verify_top_k is not None,
        HAS_CONSTRAINTS=has_constraints,
        USE_FP64=use_fp64,
        CHUNK=chunk,
        CHUNKS_PADDED=padded,
        num_warps=num_warps,
    )
    _row_samples_kernel[(num_rows,)](
        scores,
        tokens,
        sampled,
        likely,
        likely_tokens,
        sums,
        verify_top_k,
        None if verify_top_k is None else verify_top_k.view(torch.float32),
        num_chunks,
        KEEPS_TOP_K=verify_top_k is not None,
        CHUNKS_PADDED=padded,
    )
    return sampled
