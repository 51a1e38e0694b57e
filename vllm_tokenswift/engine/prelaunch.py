"""The next verify pass, launched before the scheduler asks for it.

What a step accepted and what is drafted next is known in the runner long before vLLM's
scheduler has made the next step of it, and all that time a GPU would wait. Where the next
step can be foreseen (the same requests, each with its drafts), its inputs are laid out and
its pass is launched right after drafting, or, where nothing is drafted, even before the
samples have been read. When the step comes as it was foreseen, vLLM's code finds inputs,
metadata and output ready. Otherwise the pass is dropped: all that it wrote is KV behind every
request's computed tokens, where a step's own pass writes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.sampling_params import SamplingParams

from vllm_tokenswift.engine.drafted_trees import DraftedTrees
from vllm_tokenswift.engine.pass_launch import OrdinaryLauncher
from vllm_tokenswift.engine.runner_view import PassLauncher, RunnerView
from vllm_tokenswift.engine.step import LaunchedPass
from vllm_tokenswift.engine.step_inputs import StepInputs
from vllm_tokenswift.engine.step_trees import StepTrees
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

# Steps without a prelaunched pass after one that was dropped; twice as many each time it happens
# again, so that requests that come and go all the time cost few passes.
_FIRST_PAUSE = 4
_LONGEST_PAUSE = 64
# Shapes kept by (requests, most rows, rows) of a step; most batches see a few hundred.
_MAX_SHAPES = 1024


@dataclass(frozen=True)
class PrelaunchedPass:
    """A launched pass and the step it is for.

    Attributes:
        req_ids: the batch, by batch row.
        num_rows: int32 ``[requests]``, query rows of each.
        computed: int32 ``[requests]``, tokens whose KV is there before the pass.
        drafts: by request, as the scheduler will list them.
        launched: the pass.
    """

    req_ids: list[str]
    num_rows: npt.NDArray[np.int32]
    computed: npt.NDArray[np.int32]
    drafts: dict[str, list[int]]
    launched: LaunchedPass

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


class Prelauncher:
    """Launches the passes of a runner's coming steps and hands them out.

    Args:
        runner: whose batch it is.
        step_inputs: which lays steps out.
        drafted_trees: where the trees of a pass that is dropped wait for their step.
    """

    def __init__(
        self, runner: RunnerView, step_inputs: StepInputs, drafted_trees: DraftedTrees
    ) -> None:
        self.runner = runner
        self.step_inputs = step_inputs
        self.drafted_trees = drafted_trees
        self._launched: PrelaunchedPass | None = None
        self._shapes: dict[tuple[int, int, int], tuple[CUDAGraphMode, BatchDescriptor]] = {}
        self._pause = 0
        self._next_pause = _FIRST_PAUSE

    def launch(self, trees: Mapping[str, DraftTree], accepted: Sequence[Sequence[int]]) -> bool:
        """To be called when a step has accepted, committed and drafted.

        Args:
            trees: of the next step, by request.
            accepted: by batch row, the tokens that the step emitted.

        Returns:
            Whether its pass was launched: not where a request is not known to go on, or the pass
            would not be launched at once.
        """
        if self._pause:
            self._pause -= 1
            return False
        runner = self.runner
        next_trees = [trees.get(req_id, EMPTY_TREE) for req_id in runner.input_batch.req_ids]
        rows = zip(runner.input_batch.req_ids, next_trees, accepted, strict=True)
        return all(
            bool(tokens)
            and self._params(req_id).all_stop_token_ids.isdisjoint(tokens)
            and self._has_room(req_id, runner.request_states[req_id].draft.num_tokens, len(tree))
            for req_id, tree, tokens in rows
        ) and self._launch(next_trees, [tokens[-1] for tokens in accepted])

    def launch_undrafted(self, tokens: torch.Tensor) -> bool:
        """To be called when a step without drafts has been sampled, before it is read.

        Args:
            tokens: int64 ``[requests]`` on the device, one sample of each, by batch row.

        Returns:
            Whether the pass of the next step was launched, which has no drafts then.
        """
        if self._pause:
            return False
        runner = self.runner
        req_ids = runner.input_batch.req_ids
        return all(
            self._has_room(req_id, runner.request_states[req_id].draft.num_tokens + 1, 0)
            for req_id in req_ids
        ) and self._launch([EMPTY_TREE] * len(req_ids), tokens)

    def _params(self, req_id: str) -> SamplingParams:
        params = self.runner.requests[req_id].sampling_params
        assert params is not None
        return params

    def _has_room(self, req_id: str, num_tokens: int, num_drafts: int) -> bool:
        """Whether a request of that many tokens, the newest not computed, goes on with drafts."""
        runner = self.runner
        request, state = runner.requests[req_id], runner.request_states[req_id]
        room = len(request.block_ids[0]) * runner.tree_attention.block_size
        return (
            not state.chain_only  # a grammar may cut its drafts
            and num_tokens < state.max_tokens
            and num_tokens + num_drafts <= room
        )

    def _launch(
        self, next_trees: Sequence[DraftTree], newest: Sequence[int] | torch.Tensor
    ) -> bool:
        """newest: the requests' newest tokens, or int64 ``[requests]`` on the device where the
        host does not know them, nor has committed them."""
        runner = self.runner
        batch = runner.input_batch
        req_ids = list(batch.req_ids)
        num_rows = np.array([1 + len(tree) for tree in next_trees], np.int32)
        mode, shape = self._shape_of(num_rows)
        if not runner.launches_at_once(mode):
            return False

        computed = np.array([runner.request_states[r].draft.num_tokens for r in req_ids], np.int32)
        unread = newest if isinstance(newest, torch.Tensor) else None
        if not isinstance(newest, torch.Tensor):
            computed -= 1
            for row, (token, tree) in enumerate(zip(newest, next_trees, strict=True)):
                start = int(computed[row])
                tokens = batch.token_ids_cpu[row, start : start + 1 + len(tree)]
                tokens[0], tokens[1:] = token, tree.tokens
        batch.num_computed_tokens_cpu[: len(req_ids)] = computed
        trees = StepTrees.of_decodes(req_ids, next_trees, num_rows, computed)
        launcher: PassLauncher | None = runner.verify_graph(shape)
        if launcher is None:
            launcher = OrdinaryLauncher(runner, self.step_inputs, mode, shape)
        launched = launcher.launch(num_rows, trees, unread)
        runner.stats.num_passes_ahead += 1
        runner.stats.num_passes_unread += unread is not None
        self._launched = PrelaunchedPass(
            req_ids,
            num_rows,
            computed,
            {rows.req_id: rows.tree.tokens.tolist() for rows in trees.trees},
            launched,
        )
        return True

    def _shape_of(self, num_rows: npt.NDArray[np.int32]) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """How vLLM runs a step of these rows; asking it takes longer than looking it up."""
        key = len(num_rows), int(num_rows.max()), int(num_rows.sum())
        found = self._shapes.get(key)
        if found is None:
            num_reqs, most_rows, total = key
            mode, shape, *_ = self.runner._determine_batch_execution_and_padding(
                num_tokens=total,
                num_reqs=num_reqs,
                num_scheduled_tokens_np=num_rows,
                max_num_scheduled_tokens=most_rows,
                use_cascade_attn=False,
                allow_microbatching=False,
            )
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            found = self._shapes[key] = mode, shape
        return found

    def take(
        self, scheduler_output: SchedulerOutput, num_rows: npt.NDArray[np.int32]
    ) -> LaunchedPass | None:
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
        return launched.launched

    def forget(self) -> LaunchedPass | None:
        """Hands out the launched pass, whichever step it is for; None where there is none."""
        launched, self._launched = self._launched, None
        return None if launched is None else launched.launched

    def drop(self) -> None:
        """Forgets a launched pass: the step is another, or the model or its cache changes."""
        launched = self.forget()
        if launched is None:
            return
        # The next step may still bring them.
        self.drafted_trees.expect({rows.req_id: rows.tree for rows in launched.trees.trees})
        self.runner.stats.num_passes_dropped += 1
        self._pause = self._next_pause
        self._next_pause = min(2 * self._next_pause, _LONGEST_PAUSE)
