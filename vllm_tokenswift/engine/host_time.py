"""What the host takes, from the samples of a step to the launch of the next pass with drafts.

The device waits for that long in every step with drafts; steps without them are launched
before the last one's samples are read (``next_step.py``). Hosts differ by more than two times,
so it is measured, once, with the engine's own parts: a request that is not there loops, and
what a step does after sampling is done for it over the empty cache.
"""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_tokenswift.engine.next_step import NextStep
from vllm_tokenswift.metrics import Stats
from vllm_tokenswift.sampling.walk import Accepted, RowGroup
from vllm_tokenswift.tree import EMPTY_TREE

if TYPE_CHECKING:
    from vllm_tokenswift.engine.drafting import Drafter
    from vllm_tokenswift.engine.runner import TokenSwiftRunnerMixin

_REQ_ID = "tokenswift host time"
_PERIOD = 40
_PROMPT_TOKENS = 4 * _PERIOD
_ACCEPTED = 3  # tokens of a step
_WARM_UP, _STEPS = 8, 15
# Here steps follow one another; in an engine vLLM's own code runs between them, and ours is no
# longer in the processor's caches: on two hosts a step took that much longer than its trial.
_COLD = 1.7


@torch.inference_mode()
def drafting_ms(runner: TokenSwiftRunnerMixin, drafting: Drafter) -> float:
    """Milliseconds from samples to launch; 0 where passes are not launched ahead of their step,
    or model and cache are too small for a trial.

    To be called with no request about.
    """
    block_size = runner.tree_attention.block_size
    num_tokens = _PROMPT_TOKENS + _ACCEPTED * (_WARM_UP + _STEPS) + 1 + runner.num_spec_tokens
    num_blocks = -(-num_tokens // block_size)
    if (
        not runner.launches_ahead
        or num_tokens > runner.max_model_len
        or num_blocks >= runner.kv_cache_config.num_blocks
    ):
        return 0.0
    period = min(_PERIOD, runner.model_config.get_vocab_size())
    text = [i % period for i in range(num_tokens)]
    request = CachedRequestState(
        req_id=_REQ_ID,
        prompt_token_ids=text[:_PROMPT_TOKENS],
        mm_features=[],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=num_tokens),
        generator=None,
        block_ids=(list(range(1, num_blocks + 1)),),  # block 0 is vLLM's null block
        num_computed_tokens=_PROMPT_TOKENS,
        output_token_ids=[],
    )
    runner.requests[_REQ_ID] = request
    runner.input_batch.add_request(request)
    runner.input_batch.refresh_metadata()
    runner.start_request(_REQ_ID)
    next_step = NextStep(runner, drafting)
    try:
        times = [
            _step_ms(runner, next_step, text[at : at + _ACCEPTED])
            for at in range(
                _PROMPT_TOKENS, _PROMPT_TOKENS + _ACCEPTED * (_WARM_UP + _STEPS), _ACCEPTED
            )
        ]
    finally:
        runner.forget_request(_REQ_ID)
        runner.input_batch.remove_request(_REQ_ID)
        runner.input_batch.condense()
        runner.input_batch.refresh_metadata()
        del runner.requests[_REQ_ID]
        runner.stats = Stats()
    return _COLD * median(times[_WARM_UP:])


def _step_ms(runner: TokenSwiftRunnerMixin, next_step: NextStep, tokens: list[int]) -> float:
    groups, accepted = [RowGroup(_REQ_ID, EMPTY_TREE)], [Accepted([], tokens)]
    shape = (1, runner.model_config.get_hidden_size())
    states = torch.zeros(shape, dtype=runner.model_config.dtype, device=runner.device)
    torch.accelerator.synchronize()
    start = time.perf_counter()
    runner.follow(next_step, groups, accepted, states)
    next_step.draft()
    ms = 1e3 * (time.perf_counter() - start)
    torch.accelerator.synchronize()
    runner.ahead.forget()  # nobody comes for its pass
    return ms
