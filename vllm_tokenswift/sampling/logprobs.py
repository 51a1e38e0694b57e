"""Logprobs of the emitted tokens, in the layout that vLLM's bookkeeping reads.

``RejectionSampler.parse_output`` takes one row for every place of the padded
``[groups, width]`` token matrix and filters them with the matrix; where width is
1 ``_bookkeeping_sync`` takes the rows as they are, one per batch row. Rows of
padding, and of requests that did not ask, are zeros nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from vllm.config.model import LogprobsMode
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.logprobs import batched_count_greater_than
from vllm.v1.sample.sampler import Sampler

from vllm_tokenswift.sampling.sampling_state import SamplingState


def wants_logprobs(state: SamplingState) -> bool:
    """Whether a request asks for logprobs of its tokens, by number or by a list of ids."""
    return state.num_logprobs is not None or bool(state.logprob_token_ids)


@dataclass(frozen=True)
class EmittedToken:
    """A token that was emitted, and where its logprobs come from and go to.

    Args:
        state: its request's.
        token: its id.
        slot: its place in the flattened padded token matrix.
        row: its logits row.
    """

    state: SamplingState
    token: int
    slot: int
    row: int


def gather_logprobs(
    logits: torch.Tensor, emitted: Sequence[EmittedToken], num_slots: int, mode: LogprobsMode
) -> LogprobsTensors:
    """Logprobs of emitted tokens: the token first, then what its request asked for.

    Args:
        logits: ``[rows, vocab]``, raw or processed as ``mode`` says.
        emitted: the tokens whose requests want logprobs, at least one.
        num_slots: places of the padded token matrix.
        mode: vLLM's ``logprobs_mode``.

    Returns:
        Token ids int32 and logprobs float32 ``[num_slots, width]``, and ranks int64
        ``[num_slots]``; a row narrower than the widest is padded with token 0 at -inf. On the
        host: vLLM reads them there, and a pass launched in between would be waited for.
    """
    widths = [len(e.state.logprob_token_ids) or e.state.num_logprobs or 0 for e in emitted]
    width = max(widths) + 1
    device = logits.device
    token_ids = torch.zeros(num_slots, width, dtype=torch.int32, device=device)
    values = torch.zeros(num_slots, width, dtype=torch.float32, device=device)
    ranks = torch.zeros(num_slots, dtype=torch.int64, device=device)

    listed = [e for e in emitted if e.state.logprob_token_ids]
    top = [e for e in emitted if not e.state.logprob_token_ids]
    if top:
        slots, scores, tokens = _scores(logits, top, mode)
        most = max(e.state.num_logprobs or 0 for e in top)
        found = Sampler.gather_logprobs(scores, most, tokens)
        values[slots, most + 1 :] = -float("inf")
        token_ids[slots, : most + 1] = found.logprob_token_ids
        values[slots, : most + 1] = found.logprobs
        ranks[slots] = found.selected_token_ranks
    if listed:
        slots, scores, tokens = _scores(logits, listed, mode)
        wanted = torch.zeros(len(listed), width, dtype=torch.int64)
        valid = torch.zeros(len(listed), width, dtype=torch.bool)
        for i, e in enumerate(listed):
            ids = [e.token, *e.state.logprob_token_ids]
            wanted[i, : len(ids)] = torch.tensor(ids)
            valid[i, : len(ids)] = True
        wanted = wanted.to(device)
        gathered = scores.gather(1, wanted)
        token_ids[slots] = wanted.int()
        values[slots] = gathered.masked_fill(~valid.to(device), -float("inf"))
        ranks[slots] = batched_count_greater_than(scores, gathered[:, :1])
    return LogprobsTensors(token_ids.cpu(), values.cpu(), ranks.cpu())


def _scores(
    logits: torch.Tensor, emitted: Sequence[EmittedToken], mode: LogprobsMode
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots int64 ``[n]``, scores float32 ``[n, vocab]`` and tokens int64 ``[n]``."""
    places = [(e.slot, e.row, e.token) for e in emitted]
    slots, rows, tokens = torch.tensor(places, device=logits.device).t()
    scores = logits[rows].to(torch.float32)
    if mode in ("raw_logprobs", "processed_logprobs"):
        scores = Sampler.compute_logprobs(scores)
    return slots, scores, tokens
