"""The next verify pass, launched before the scheduler asks for it.

What a step accepted and what is drafted next is known in the runner long before vLLM's
scheduler has made the next step of it, and all that time a GPU would wait. Where the next
step can be foreseen (the same requests, each with its drafts), its inputs are laid out and
its pass is launched right after drafting. When the step comes as it was foreseen, vLLM's code
finds inputs, metadata and output ready. Otherwise the pass is dropped: all that it wrote is
KV behind every request's computed tokens, where a step's own pass writes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context

from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from vllm_tokenswift.engine.runner import TokenSwiftRunnerMixin

# Steps without a pass ahead after one that was dropped; twice as many each time it happens
# again, so that requests that come and go all the time cost few passes.
_FIRST_PAUSE = 4
_LONGEST_PAUSE = 64


@dataclass(frozen=True)
class PassAhead:
    """A launched pass and the step it is for.

    num_rows: int32 ``[requests]``, query rows of each; computed: ``[requests]``, tokens whose
    KV is there before the pass; drafts: as the scheduler will list them; trees: what they are.
    inputs, metadata, output: what ``_prepare_inputs``, ``_build_attention_metadata`` and
    ``_model_forward`` return for the step.
    """

    req_ids: list[str]
    num_rows: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]
    drafts: dict[str, list[int]]
    trees: dict[str, DraftTree]
    inputs: Any
    metadata: Any
    output: Any

    def is_for(
        self,
        scheduler_output: SchedulerOutput,
        num_rows: npt.NDArray[np.int32],
        req_ids: list[str],
        computed: npt.NDArray[np.int32],
    ) -> bool:
        """Whether this is the pass of a step, given as the runner's batch has it by now."""
        return (
            not scheduler_output.scheduled_new_reqs
            and not scheduler_output.scheduled_cached_reqs.resumed_req_ids
            and req_ids == self.req_ids
            and np.array_equal(num_rows, self.num_rows)
            and np.array_equal(computed, self.computed)
            and scheduler_output.scheduled_spec_decode_tokens == self.drafts
        )


class PassesAhead:
    """Launches passes ahead of a runner's steps and hands them out."""

    def __init__(self, runner: TokenSwiftRunnerMixin) -> None:
        self.runner = runner
        self._launched: PassAhead | None = None
        self._pause = 0
        self._next_pause = _FIRST_PAUSE

    def launch(self, trees: Mapping[str, DraftTree]) -> None:
        """To be called when a step has accepted and drafted; trees: of the next step.

        Leaves it where a request is not known to go on, or the pass would not be launched
        at once.
        """
        runner = self.runner
        if self._pause:
            self._pause -= 1
            return
        batch = runner.input_batch
        req_ids = list(batch.req_ids)
        num_reqs = len(req_ids)
        next_trees = [trees.get(req_id, EMPTY_TREE) for req_id in req_ids]
        if not all(
            self._goes_on(row, req_id, len(tree))
            for row, (req_id, tree) in enumerate(zip(req_ids, next_trees, strict=True))
        ):
            return
        drafted = {r: tree for r, tree in zip(req_ids, next_trees, strict=True) if len(tree)}
        drafts = {req_id: tree.tokens.tolist() for req_id, tree in drafted.items()}
        num_rows = np.array([1 + len(tree) for tree in next_trees], np.int32)
        most_rows, total = int(num_rows.max()), int(num_rows.sum())
        mode, shape, *_ = runner._determine_batch_execution_and_padding(
            num_tokens=total,
            num_reqs=num_reqs,
            num_scheduled_tokens_np=num_rows,
            max_num_scheduled_tokens=most_rows,
            use_cascade_attn=False,
            allow_microbatching=False,
        )
        if not runner.launches_at_once(mode):
            return

        computed = (batch.num_tokens_no_spec[:num_reqs] - 1).astype(np.int32)
        batch.num_computed_tokens_cpu[:num_reqs] = computed
        for row, req_id in enumerate(req_ids):
            tokens = drafts.get(req_id, ())
            start = int(computed[row]) + 1
            batch.token_ids_cpu[row, start : start + len(tokens)] = tokens
        inputs = runner.lay_out(drafts, num_rows)
        is_full = mode is CUDAGraphMode.FULL
        padded, padded_reqs = shape.num_tokens, shape.num_reqs or num_reqs
        slots_by_group, slots = runner._get_slot_mappings(
            num_tokens_padded=padded, num_reqs_padded=padded_reqs, num_tokens_unpadded=total
        )
        metadata = runner._build_attention_metadata(
            num_tokens=total,
            num_tokens_padded=padded if is_full else None,
            num_reqs=num_reqs,
            num_reqs_padded=padded_reqs if is_full else None,
            max_query_len=most_rows,
            logits_indices=inputs[0],
            max_num_sampled_tokens=inputs[2],
            use_spec_decode=True,
            num_scheduled_tokens=dict(zip(req_ids, num_rows.tolist(), strict=True)),
            slot_mappings=slots_by_group,
        )
        with set_forward_context(
            metadata[0],
            runner.vllm_config,
            num_tokens=padded,
            cudagraph_runtime_mode=mode,
            batch_descriptor=shape,
            slot_mapping=slots,
            is_padding=runner._prepare_padding_mask(total, padded),
        ):
            output = runner._model_forward(
                input_ids=runner.input_ids.gpu[:padded], positions=runner.positions[:padded]
            )
        runner.stats.num_passes_ahead += 1
        self._launched = PassAhead(
            req_ids,
            num_rows,
            computed,
            drafts,
            drafted,
            inputs,
            metadata,
            output,
        )

    def _goes_on(self, row: int, req_id: str, num_drafts: int) -> bool:
        """Whether a request will decode in the next step, as far as the runner can know."""
        runner = self.runner
        request, state = runner.requests[req_id], runner.request_states[req_id]
        params = request.sampling_params
        assert params is not None
        accepted = runner.accepted_tokens(row)
        num_tokens = int(runner.input_batch.num_tokens_no_spec[row])
        room = len(request.block_ids[0]) * runner.tree_attention.block_size
        return (
            bool(accepted)
            and not state.chain_only  # a grammar may cut its drafts
            and len(request.output_token_ids) < state.max_output_tokens
            and num_tokens < runner.max_model_len
            and num_tokens + num_drafts <= room
            and params.all_stop_token_ids.isdisjoint(accepted)
        )

    def take(
        self, scheduler_output: SchedulerOutput, num_rows: npt.NDArray[np.int32]
    ) -> PassAhead | None:
        """The pass of the step, where it was launched; any other is dropped."""
        launched, batch = self._launched, self.runner.input_batch
        if launched is None:
            return None
        computed = batch.num_computed_tokens_cpu[: len(num_rows)]
        if not launched.is_for(scheduler_output, num_rows, list(batch.req_ids), computed):
            self.drop()
            return None
        self._launched = None
        self._next_pause = _FIRST_PAUSE
        return launched

    def drop(self) -> None:
        """Forgets a launched pass: the step is another, or the model or its cache changes."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        self.runner.take_back(launched.trees)
        self.runner.stats.num_passes_dropped += 1
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
