"""What the host takes, from the samples of a step to the launch of the next pass with drafts.

The device waits for that long in every step with drafts; steps without them are launched
before the last one's samples are read (``next_step.py``). Hosts differ by more than two times,
so it is measured, once, with the engine's own parts: requests that are not there loop, and
what a step does after sampling is done for them over the empty cache, for one and for several,
without heads and with them: these work while the host takes the tokens in, so what they cost is
less than what they take.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_tokenswift.draft.cost import CostModel
from vllm_tokenswift.draft.likeliest import COLUMNS, NOTHING, NUM_LIKELIEST
from vllm_tokenswift.draft.planner import DraftRequest, Planner
from vllm_tokenswift.engine.next_step import NextStep
from vllm_tokenswift.metrics import Stats
from vllm_tokenswift.sampling.walk import Accepted, RowGroup
from vllm_tokenswift.tree import EMPTY_TREE

if TYPE_CHECKING:
    from vllm_tokenswift.engine.drafting import Drafter
    from vllm_tokenswift.engine.runner import TokenSwiftRunnerMixin

_REQ_ID = "tokenswift host time"
_MANY = 8  # requests of the second trial
_PERIOD = 40
_PROMPT_TOKENS = 4 * _PERIOD
_ACCEPTED = 3  # tokens of a step
_WARM_UP, _STEPS = 8, 15
# What an engine's step leaves of our code and data in the processor's caches: hardly anything.
# Without that, drafting for one request took a quarter of what it takes in an engine; after a
# pass over so many bytes and so much of Python's own code it took as long.
_OTHERS_BYTES = 8 << 20
_OTHERS_NUMBERS = 20_000


class _TrialPlanner(Planner):
    """Plans as ever, but heads are asked in every step or in none, and there is no draft pass."""

    asks_heads = False

    def wants_self_draft(
        self, requests: Sequence[DraftRequest], num_other_tokens: int = 0, may: bool = True
    ) -> list[bool]:
        return [False] * len(requests)

    def wants_free_heads(
        self, requests: Sequence[DraftRequest], num_other_tokens: int = 0, may: bool = True
    ) -> list[bool]:
        return [self.asks_heads] * len(requests)


@torch.inference_mode()
def with_host_times(runner: TokenSwiftRunnerMixin, drafting: Drafter, cost: CostModel) -> CostModel:
    """A cost model whose fields that depend on the host are what they are here.

    Unchanged where passes are not launched ahead of their step, or model and cache are too small
    for a trial. To be called with no request about; ``drafting`` has another planner afterwards.
    """
    block_size = runner.tree_attention.block_size
    num_tokens = _PROMPT_TOKENS + _ACCEPTED * (_WARM_UP + _STEPS) + 1 + runner.num_spec_tokens
    num_blocks = -(-num_tokens // block_size)
    # Block 0 is vLLM's null block.
    room = (runner.kv_cache_config.num_blocks - 1) // num_blocks
    if not runner.launches_ahead or num_tokens > runner.max_model_len or room < 1:
        return cost
    many = min(_MANY, room, runner.max_num_reqs)
    planner = _TrialPlanner(cost, drafting.options.budget_tokens, shapes_of=runner.padded_shapes)
    drafting.planner = planner

    def first_and_further_ms() -> tuple[float, float]:
        first_ms = _trial_ms(runner, drafting, 1, num_tokens, num_blocks, planner.asks_heads)
        if many == 1:
            return first_ms, 0.0
        many_ms = _trial_ms(runner, drafting, many, num_tokens, num_blocks, planner.asks_heads)
        return first_ms, max(0.0, many_ms - first_ms) / (many - 1)

    first_ms, further_ms = first_and_further_ms()
    cost = replace(
        cost,
        drafting_ms=first_ms,
        drafting_request_ms=further_ms,
        # The device's work is shared; the host reads what heads say, and plans once more.
        heads_request_ms=further_ms,
    )
    if not (drafting.asks_free_heads and drafting.head_drafts.runs_ahead):
        return cost
    planner.asks_heads = True
    with_heads_ms, further_with_heads_ms = first_and_further_ms()
    return replace(
        cost,
        heads_ms=max(0.0, with_heads_ms - first_ms),
        heads_request_ms=max(0.0, further_with_heads_ms - further_ms),
    )


def _trial_ms(
    runner: TokenSwiftRunnerMixin,
    drafting: Drafter,
    num_requests: int,
    num_tokens: int,
    num_blocks: int,
    asks_heads: bool,
) -> float:
    """num_tokens, num_blocks: of each request."""
    period = min(_PERIOD, runner.model_config.get_vocab_size())
    text = [i % period for i in range(num_tokens)]
    req_ids = [f"{_REQ_ID} {number}" for number in range(num_requests)]
    for number, req_id in enumerate(req_ids):
        first_block = 1 + number * num_blocks
        runner.requests[req_id] = request = CachedRequestState(
            req_id=req_id,
            prompt_token_ids=text[:_PROMPT_TOKENS],
            mm_features=[],
            sampling_params=SamplingParams(temperature=1.0, max_tokens=num_tokens),
            generator=torch.Generator(runner.device).manual_seed(0),
            block_ids=(list(range(first_block, first_block + num_blocks)),),
            num_computed_tokens=_PROMPT_TOKENS,
            output_token_ids=[],
        )
        runner.input_batch.add_request(request)
        runner.start_request(req_id)
    runner.input_batch.refresh_metadata()
    # Where a step's states lie is told by the batch that was launched last.
    runner.query_start_loc.np[: num_requests + 1] = np.arange(num_requests + 1)
    next_step = NextStep(runner, drafting)
    try:
        times = [
            _step_ms(runner, next_step, req_ids, text[at : at + _ACCEPTED], asks_heads)
            for at in range(
                _PROMPT_TOKENS, _PROMPT_TOKENS + _ACCEPTED * (_WARM_UP + _STEPS), _ACCEPTED
            )
        ]
    finally:
        for req_id in req_ids:
            runner.forget_request(req_id)
            runner.input_batch.remove_request(req_id)
            del runner.requests[req_id]
        runner.input_batch.condense()
        runner.input_batch.refresh_metadata()
        runner.stats = Stats()
    return median(times[_WARM_UP:])


def _step_ms(
    runner: TokenSwiftRunnerMixin,
    next_step: NextStep,
    req_ids: Sequence[str],
    tokens: list[int],
    asks_heads: bool,
) -> float:
    groups = [RowGroup(req_id, EMPTY_TREE) for req_id in req_ids]
    said = np.full((1, COLUMNS), NOTHING, np.int32)
    said[0, 0], said[0, NUM_LIKELIEST] = tokens[0], np.float32(1.0).view(np.int32)
    heard = [said if runner.request_states[req_id].hears else None for req_id in req_ids]
    accepted = [Accepted([], tokens, of_request) for of_request in heard]
    num_rows = len(req_ids) * (1 + runner.num_spec_tokens)
    shape = (num_rows, runner.model_config.get_hidden_size())
    states = torch.zeros(shape, dtype=runner.model_config.dtype, device=runner.device)
    for req_id in req_ids:  # heads that were asked last begin at once
        runner.request_states[req_id].draft.free_heads.asked_last = asks_heads
    _leave_caches_as_a_step_does()
    torch.accelerator.synchronize()
    start = time.perf_counter()
    runner.follow(next_step, groups, accepted, states)
    next_step.draft()
    ms = 1e3 * (time.perf_counter() - start)
    torch.accelerator.synchronize()
    runner.ahead.forget()  # nobody comes for its pass
    return ms


def _leave_caches_as_a_step_does() -> None:
    np.ones(_OTHERS_BYTES, np.uint8).sum()
    json.loads(json.dumps([str(number) for number in range(_OTHERS_NUMBERS)]))
