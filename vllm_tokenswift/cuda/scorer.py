"""Temperature, min-p, eta and the sample of every tree row, in two passes over the logits.

Maths. With ``x = logit / temperature``, ``p = softmax(x)`` and noise ``q`` (one row of
exponential draws for each sequence position, shared by the nodes of a depth), the
sampled token is vLLM's ``random_sample``: ``argmax p / q`` over the tokens that stay:

    min-p:  p >= min_p * max p
    eta:    p >= min(epsilon, alpha * exp(-entropy(p))), and the likeliest stays

Neither needs ``p`` itself: with ``m = max x`` the first is ``exp(x - m) >= min_p``, the
second follows from ``s = sum exp(x - m)`` and ``t = sum (x - m) exp(x - m)``, since the
entropy is ``log s - t / s``; and ``argmax p / q = argmax exp(x - m) / q``. So one pass
collects ``m, s, t`` and a second finds the sample. A token whose ``p`` lies
within a rounding error of a threshold, or whose ``p / q`` lies within one of the
largest, may come out differently than in the eager order of operations.

Both constraints look at the unconstrained ``p``: a row should have one of them (the
eager order takes eta's entropy from what min-p left).

With top-k or top-p the caller masks the logits first (vLLM's own Triton kernel
does that without sorting) and passes temperature 1, min-p 0 and epsilon 0.

Memory. Logits twice, noise once: 33 rows of 128,256 in float32 move 51 MB
(logits stay in L2 for the second pass where they fit). PyTorch's operations for the
same (copy, divide, softmax, maximum, compare, mask, softmax, divide, argmax, in
12 launches) move 250 MB; counted for an H100, 100 microseconds and as much host time.

Aliasing. Inputs are only read. Sentinels: temperature 0 takes the argmax of the
logits; logits of -inf are never sampled (while another is finite).

CUDA graphs. The launch depends on shapes alone.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
from __future__ import annotations

import torch
import triton
import triton.language as tl


def sample_rows_reference(
    logits: torch.Tensor,
    noise: torch.Tensor,
    noise_rows: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    eta_epsilon: torch.Tensor,
    eta_alpha: torch.Tensor,
) -> torch.Tensor:
    """Eager twin of :func:`sample_rows`: same arguments, in vLLM's order of operations."""
    greedy = temperature == 0
    x = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    p = x.softmax(-1)
    x = x.masked_fill(p < min_p[:, None] * p.amax(-1, keepdim=True), float("-inf"))
    p = x.softmax(-1)
    entropy = torch.special.entr(p).sum(-1)
    eta = torch.minimum(eta_epsilon, eta_alpha * torch.exp(-entropy))
    eta = torch.minimum(eta, p.amax(-1))
    x = x.masked_fill(p < eta[:, None], float("-inf"))
    sampled = x.softmax(-1).div(noise[noise_rows.long()]).argmax(-1)
    return torch.where(greedy, logits.argmax(-1), sampled)


@triton.jit
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
    temperature = tl.load(temperature_ptr + row)
    scale = 1.0 / tl.where(temperature == 0.0, 1.0, temperature)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    logit = tl.load(
        logits_ptr + row.to(tl.int64) * row_stride + token,
        mask=token < vocab,
        other=float("-inf"),
    ).to(tl.float32)
    x = logit * scale
    # A chunk may hold nothing but masked tokens: -inf minus -inf must not arise.
    maximum = tl.maximum(tl.max(x, 0), -1e30)
    weight = tl.exp(x - maximum)
    entry_ptr = statistics_ptr + row * 3 * num_chunks + chunk
    tl.store(entry_ptr, maximum)
    tl.store(entry_ptr + num_chunks, tl.sum(weight, 0))
    shift = tl.where(weight > 0.0, x - maximum, 0.0)
    tl.store(entry_ptr + 2 * num_chunks, tl.sum(shift * weight, 0))


@triton.jit
def _chunk_samples_kernel(
    logits_ptr,  # [num_rows, vocab]
    noise_ptr,  # [num_noise_rows, vocab]
    noise_rows_ptr,  # [num_rows]
    temperature_ptr,
    min_p_ptr,
    eta_epsilon_ptr,
    eta_alpha_ptr,
    statistics_ptr,  # [num_rows, 3, num_chunks]
    scores_ptr,  # [num_rows, num_chunks]
    tokens_ptr,  # [num_rows, num_chunks]
    row_stride,
    noise_stride,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    CHUNKS_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0.0
    scale = 1.0 / tl.where(greedy, 1.0, temperature)

    other = tl.arange(0, CHUNKS_PADDED)
    other_ok = other < num_chunks
    entry_ptr = statistics_ptr + row * 3 * num_chunks + other
    maxima = tl.load(entry_ptr, mask=other_ok, other=-1e30)
    sums = tl.load(entry_ptr + num_chunks, mask=other_ok, other=0.0)
    weighted = tl.load(entry_ptr + 2 * num_chunks, mask=other_ok, other=0.0)
    maximum = tl.max(maxima, 0)
    shift = tl.where(sums > 0.0, maxima - maximum, 0.0)
    keep = tl.where(sums > 0.0, tl.exp(shift), 0.0)
    total = tl.sum(sums * keep, 0)
    mean = tl.sum(keep * (weighted + shift * sums), 0) / total

    # Both thresholds on the weight exp(x - maximum) = p / max p; 1 is the likeliest's.
    epsilon = tl.load(eta_epsilon_ptr + row)
    alpha = tl.load(eta_alpha_ptr + row)
    eta = tl.minimum(epsilon, alpha * tl.exp(mean - tl.log(total))) * total
    threshold = tl.minimum(tl.maximum(tl.load(min_p_ptr + row), eta), 1.0)

    token = chunk * CHUNK + tl.arange(0, CHUNK)
    token_ok = token < vocab
    logit = tl.load(
        logits_ptr + row.to(tl.int64) * row_stride + token,
        mask=token_ok,
        other=float("-inf"),
    ).to(tl.float32)
    weight = tl.exp(logit * scale - maximum)
    noise_row = tl.load(noise_rows_ptr + row).to(tl.int64)
    noise = tl.load(noise_ptr + noise_row * noise_stride + token, mask=token_ok, other=1.0)
    # Unsampled tokens lose to every sampled one, whose score is not negative.
    score = tl.where(weight >= threshold, tl.div_rn(weight, noise), -1.0)
    score = tl.where(token_ok & (logit > float("-inf")), score, -1.0)
    score = tl.where(greedy, logit, score)
    best = tl.argmax(score, 0)
    tl.store(scores_ptr + row * num_chunks + chunk, tl.max(score, 0))
    tl.store(tokens_ptr + row * num_chunks + chunk, chunk * CHUNK + best)


@triton.jit
def _row_samples_kernel(
    scores_ptr,  # [num_rows, num_chunks]
    tokens_ptr,  # [num_rows, num_chunks]
    sampled_ptr,  # [num_rows]
    num_chunks,
    CHUNKS_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS_PADDED)
    score = tl.load(
        scores_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf")
    )
    best = tl.argmax(score, 0)
    tl.store(sampled_ptr + row, tl.load(tokens_ptr + row * num_chunks + best).to(tl.int64))


def sample_rows(
    logits: torch.Tensor,
    noise: torch.Tensor,
    noise_rows: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    eta_epsilon: torch.Tensor,
    eta_alpha: torch.Tensor,
    chunk: int = 4096,
    num_warps: int = 4,
) -> torch.Tensor:
    """Sample every row; see the module's header.

    logits: ``[num_rows, vocab]`` float32, bf16 or fp16, rows contiguous, before temperature.
    noise: float32 ``[num_noise_rows, vocab]``, exponential draws, positive.
    noise_rows: int32 ``[num_rows]``, the noise row of each logits row.
    temperature, min_p, eta_epsilon, eta_alpha: float32 ``[num_rows]``; 0 of the first is
        greedy, 0 of min_p and of eta_epsilon switches that constraint off.
    Returns int64 ``[num_rows]``.
    """
    num_rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, chunk)
    padded = triton.next_power_of_2(num_chunks)
    statistics = logits.new_empty(num_rows, 3, num_chunks, dtype=torch.float32)
    scores = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
    tokens = logits.new_empty(num_rows, num_chunks, dtype=torch.int32)
    sampled = logits.new_empty(num_rows, dtype=torch.int64)
    _row_statistics_kernel[(num_rows, num_chunks)](
        logits,
        temperature,
        statistics,
        logits.stride(0),
        vocab,
        num_chunks,
        CHUNK=chunk,
        num_warps=num_warps,
    )
    _chunk_samples_kernel[(num_rows, num_chunks)](
        logits,
        noise,
        noise_rows,
        temperature,
        min_p,
        eta_epsilon,
        eta_alpha,
        statistics,
        scores,
        tokens,
        logits.stride(0),
        noise.stride(0),
        vocab,
        num_chunks,
        CHUNK=chunk,
        CHUNKS_PADDED=padded,
        num_warps=num_warps,
    )
    _row_samples_kernel[(num_rows,)](scores, tokens, sampled, num_chunks, CHUNKS_PADDED=padded)
    return sampled
