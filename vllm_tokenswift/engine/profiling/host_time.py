"""What the host takes, from the samples of a step to the launch of the next pass with drafts.

The device waits for that long in every step with drafts; steps without them are launched
before the last one's samples are read (``next_step.py``). Hosts differ by more than two times,
so it is measured, once, with the engine's own parts: requests that are not there loop, and
what a step does after sampling is done for them over the empty cache, for one and for several.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from vllm_tokenswift.draft.top_tokens import NO_TOKEN, TOP_K, TOP_K_COLUMNS
from vllm_tokenswift.engine.drafter import Drafter
from vllm_tokenswift.engine.next_step import NextStep
from vllm_tokenswift.engine.prelaunch import Prelauncher
from vllm_tokenswift.engine.request_states import RequestStates
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.engine.step_trees import NO_TREES, StepTrees
from vllm_tokenswift.engine.verify import Verifier
from vllm_tokenswift.metrics import Stats
from vllm_tokenswift.sampling.acceptance_walk import VerifyResult, VerifyRows
from vllm_tokenswift.tree import EMPTY_TREE

_REQ_ID = "tokenswift host time"
_MANY = 8  # requests of the second trial
_PERIOD = 40
_PROMPT_TOKENS = 4 * _PERIOD
_ACCEPTED = 3  # tokens of a step
_WARM_UP, _STEPS = 8, 15
# Here steps follow one another; in an engine vLLM's own code runs between them, and ours is no
# longer in the processor's caches (docs/design-notes.md).
_COLD = 1.7


@torch.inference_mode()
def drafting_ms(
    runner: RunnerView,
    drafter: Drafter,
    prelauncher: Prelauncher,
    verifier: Verifier,
    request_states: RequestStates,
) -> tuple[float, float]:
    """Milliseconds from samples to launch: of one request, and what each further one adds.

    0 where passes are not launched ahead of their step, or model and cache are too small for a
    trial. To be called with no request about.
    """
    trial = _Trial(runner, drafter, prelauncher, verifier, request_states)
    # Block 0 is vLLM's null block.
    room = (runner.kv_cache_config.num_blocks - 1) // trial.num_blocks
    if not runner.prelaunches or trial.num_tokens > runner.max_model_len or room < 1:
        return 0.0, 0.0
    first_ms = trial.ms(1)
    many = min(_MANY, room, runner.max_num_reqs)
    if many == 1:
        return first_ms, 0.0
    return first_ms, max(0.0, trial.ms(many) - first_ms) / (many - 1)


@dataclass(frozen=True)
class _Trial:
    """Steps of requests that loop; what they are timed with."""

    runner: RunnerView
    drafter: Drafter
    prelauncher: Prelauncher
    verifier: Verifier
    request_states: RequestStates

    @property
    def num_tokens(self) -> int:
        """Of each request."""
        return _PROMPT_TOKENS + _ACCEPTED * (_WARM_UP + _STEPS) + 1 + self.runner.num_spec_tokens

    @property
    def num_blocks(self) -> int:
        """Of each request."""
        return -(-self.num_tokens // self.runner.tree_attention.block_size)

    def ms(self, num_requests: int) -> float:
        """Of a step with so many requests."""
        runner = self.runner
        period = min(_PERIOD, runner.model_config.get_vocab_size())
        text = [i % period for i in range(self.num_tokens)]
        req_ids = [f"{_REQ_ID} {number}" for number in range(num_requests)]
        for number, req_id in enumerate(req_ids):
            self._start(req_id, text, first_block=1 + number * self.num_blocks)
        runner.input_batch.refresh_metadata()
        # Where a step's states lie is told by the batch that was launched last.
        runner.query_start_loc.np[: num_requests + 1] = np.arange(num_requests + 1)
        next_step = NextStep(runner, self.drafter, self.prelauncher)
        end = _PROMPT_TOKENS + _ACCEPTED * (_WARM_UP + _STEPS)
        times, trees = [], NO_TREES
        try:
            for at in range(_PROMPT_TOKENS, end, _ACCEPTED):
                ms, trees = self._step_ms(next_step, trees, req_ids, text[at : at + _ACCEPTED])
                times.append(ms)
        finally:
            for req_id in req_ids:
                self.request_states.forget(req_id)
                runner.input_batch.remove_request(req_id)
                del runner.requests[req_id]
            runner.input_batch.condense()
            runner.input_batch.refresh_metadata()
            runner.stats = Stats()
        return _COLD * median(times[_WARM_UP:])

    def _start(self, req_id: str, text: list[int], first_block: int) -> None:
        runner = self.runner
        runner.requests[req_id] = request = CachedRequestState(
            req_id=req_id,
            prompt_token_ids=text[:_PROMPT_TOKENS],
            mm_features=[],
            sampling_params=SamplingParams(temperature=1.0, max_tokens=self.num_tokens),
            generator=torch.Generator(runner.device).manual_seed(0),
            block_ids=(list(range(first_block, first_block + self.num_blocks)),),
            num_computed_tokens=_PROMPT_TOKENS,
            output_token_ids=[],
        )
        runner.input_batch.add_request(request)
        self.request_states.start(req_id)

    def _step_ms(
        self, next_step: NextStep, trees: StepTrees, req_ids: Sequence[str], tokens: list[int]
    ) -> tuple[float, StepTrees]:
        """What a step takes that had verified ``trees`` and emitted ``tokens`` for each request,
        though it accepted no node; and the trees that it drafted."""
        runner = self.runner
        groups = [VerifyRows(req_id, EMPTY_TREE) for req_id in req_ids]
        top_k = np.full((1, TOP_K_COLUMNS), NO_TOKEN, np.int32)
        top_k[0, 0], top_k[0, TOP_K] = tokens[0], np.float32(1.0).view(np.int32)
        results = [
            VerifyResult([], tokens, top_k if self.request_states[req_id].wants_top_k else None)
            for req_id in req_ids
        ]
        num_rows = len(req_ids) * (1 + runner.num_spec_tokens)
        shape = (num_rows, runner.model_config.get_hidden_size())
        states = torch.zeros(shape, dtype=runner.model_config.dtype, device=runner.device)
        torch.accelerator.synchronize()
        start = time.perf_counter()
        self.verifier.commit(trees, groups, results, states, next_step)
        next_step.draft()
        ms = 1e3 * (time.perf_counter() - start)
        torch.accelerator.synchronize()
        launched = self.prelauncher.forget()  # nobody comes for its pass
        return ms, NO_TREES if launched is None else launched.trees
