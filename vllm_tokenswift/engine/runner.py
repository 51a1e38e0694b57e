"""TokenSwift's hooks into vLLM's V1 model runner, the same for CPU and CUDA.

The data's way through one step (:class:`~vllm_tokenswift.engine.step.Step`): ``execute_model`` (it
is scheduled) → ``_update_states`` (requests come and go) → ``_prepare_inputs`` (which drafts were
scheduled; RoPE positions by depth) → ``_build_attention_metadata`` (trees) → vLLM's forward →
``_sample`` (sample at the nodes, accept, commit, draft the next trees; on a GPU also launch their
pass, ``prelaunch.py``, which the hooks up to the forward then hand out) → vLLM's bookkeeping →
``propose_draft_token_ids`` (hand out the drafts).

All of ours is done before vLLM's bookkeeping, its outputs and its scheduler, so that on a GPU
these run while the next pass does.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed import get_tp_group
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_tokenswift.draft.gumbel_noise import GumbelNoise
from vllm_tokenswift.engine import row_layout
from vllm_tokenswift.engine.drafter import Drafter
from vllm_tokenswift.engine.next_step import NextStep
from vllm_tokenswift.engine.platform import Platform
from vllm_tokenswift.engine.prelaunch import Prelauncher
from vllm_tokenswift.engine.profiling.host_time import drafting_ms
from vllm_tokenswift.engine.recorder import Recorder
from vllm_tokenswift.engine.request_states import RequestStates
from vllm_tokenswift.engine.step import Stage, Step
from vllm_tokenswift.engine.step_inputs import StepInputs
from vllm_tokenswift.engine.step_trees import StepTrees
from vllm_tokenswift.engine.verify import Verifier
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.heads.skip_weights import head_weights_skipped
from vllm_tokenswift.metrics import Stats
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.sampling.tree_sampler import sampled_token_ids

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import ExecuteModelState

PLACEHOLDER_TOKEN_ID = -1


class TokenSwiftRunnerMixin(Platform):
    """To be placed before a V1 runner class in the bases.

    A platform supplies ``_make_tree_attention`` and may extend the loading hooks.
    """

    drafter: Any
    """vLLM's name for the proposer, which owns the heads; ours is ``tree_drafter``."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.options = TokenSwiftOptions.from_dict(vllm_config.additional_config["tokenswift"])
        self.stats = Stats()
        self.recorder: Recorder | None = None
        self.tree_sampler = self.tree_sampler_cls(
            self.model_config.get_vocab_size(),
            device,
            self.options,
            logprobs_mode=self.sampler.logprobs_mode,
            use_fp64_gumbel=self.sampler.use_fp64_gumbel,
        )
        self.request_states = RequestStates(self)
        self.step_inputs = StepInputs(self)
        self.verifier = Verifier(self)
        self.prelauncher = self._make_prelauncher()
        self.step = Step.over()

    # -- start-up ---------------------------------------------------------------

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with head_weights_skipped():  # a released checkpoint holds target and heads in one folder
            super().load_model(*args, **kwargs)
        heads = self.heads
        if heads is not None and heads.reads == "pre_norm":
            num_layers = self.model_config.hf_text_config.num_hidden_layers
            self.use_aux_hidden_state_outputs = True
            self.get_model().set_aux_hidden_state_layers((num_layers,))

    def start_drafting(self) -> None:
        """Called once the KV cache stands and the model is compiled."""
        self.tree_attention = self._make_tree_attention()
        row_layout.warm_up()
        self.make_verify_graphs()
        self.draft_pass = self.make_draft_pass()
        self.draft_with(self.make_drafter())
        if self.options.record is not None and get_tp_group().rank_in_group == 0:
            folder = Path(self.options.record)
            self.recorder = Recorder(folder, self.options, self.tree_drafter.planner)

    def make_drafter(self) -> Drafter:
        """As the options say; measures costs that are not known, over the empty cache."""
        return Drafter(
            self,
            self.draft_pass,
            lambda drafter: drafting_ms(
                self, drafter, self.prelauncher, self.verifier, self.request_states
            ),
        )

    def draft_with(self, drafter: Drafter) -> None:
        """To be called while no request is running."""
        self.tree_drafter = drafter
        self.prelauncher = self._make_prelauncher()
        self.next_step = NextStep(self, drafter, self.prelauncher)

    def _make_prelauncher(self) -> Prelauncher:
        return Prelauncher(self, self.step_inputs, self.request_states.drafted_trees)

    # -- what collaborators read ------------------------------------------------------

    @property
    def heads(self) -> DraftHeads | None:
        """The draft heads, where there are any."""
        heads: DraftHeads | None = self.drafter.heads
        return heads

    def block_table(self) -> npt.NDArray[np.int32]:
        """int32 ``[batch rows, blocks]``: physical blocks of the one KV cache group."""
        table: npt.NDArray[np.int32] = self.input_batch.block_table[0].get_numpy_array()
        return table

    def visible_noise(self, req_id: str) -> GumbelNoise | None:
        """What drafts may see of the noise of a request's coming samples."""
        return self.tree_sampler.noise_of(req_id) if self.options.plan == "auto" else None

    def metadata_with_trees(
        self, trees: StepTrees, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, frozenset[int]]]:
        """vLLM's metadata of a step, in which all requests are chains, and these trees.

        Returns:
            What ``_build_attention_metadata`` returns, and by request the nodes that attention
            had no room for.
        """
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if not trees.branching:
            return (metadata, common), {}
        num_reqs = self.input_batch.num_reqs
        metadata, dead_nodes = self.tree_attention.with_trees(
            metadata,
            trees,
            self.query_start_loc.np[: num_reqs + 1],
            self.optimistic_seq_lens_cpu[:num_reqs].numpy(),
            self.block_table(),
        )
        return (metadata, common), dead_nodes

    # -- a step is scheduled, requests come and go --------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            self.prelauncher.drop()
        # vLLM pads a decode that newly joins the batch with drafts of token -1
        # (``Scheduler.schedule``, ``pad_spec_decode``). They must neither reach the embedding nor
        # be accepted: a token that exists takes their place, in nodes marked dead.
        drafts = scheduler_output.scheduled_spec_decode_tokens
        placeholders = {r for r, tokens in drafts.items() if PLACEHOLDER_TOKEN_ID in tokens}
        self.step = Step(frozenset(placeholders))
        if placeholders:
            drafts = {r: [max(token, 0) for token in tokens] for r, tokens in drafts.items()}
            scheduler_output = dataclasses.replace(
                scheduler_output, scheduled_spec_decode_tokens=drafts
            )
        return super().execute_model(scheduler_output, *args, **kwargs)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        states = self.request_states
        for req_id in scheduler_output.finished_req_ids:
            states.forget(req_id)
        corrections = super()._update_states(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            states.forget(new.req_id)  # a streaming request that goes on is a new one
            states.start(new.req_id)
        for req_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            states[req_id].table.forget()
        return corrections

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        if self.input_batch.num_reqs > 1:  # the one request's order costs as much as its inputs
            super()._may_reorder_batch(scheduler_output)

    # -- lay out, verify ----------------------------------------------------------------

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: npt.NDArray[np.int32]
    ) -> Any:
        prelaunched = self.prelauncher.take(scheduler_output, num_scheduled_tokens)
        if prelaunched is not None:
            self.step.take_over(prelaunched)
            return prelaunched.inputs
        batch = self.input_batch
        trees = self.request_states.drafted_trees.take_scheduled(
            scheduler_output.scheduled_spec_decode_tokens,
            batch.req_ids,
            num_scheduled_tokens,
            batch.num_computed_tokens_cpu,
        )
        self.step.lay_out(trees)
        if num_scheduled_tokens.max() <= 1 + self.num_spec_tokens:
            return self.step_inputs.fill(num_scheduled_tokens, trees)
        self.step_inputs.forget_tables()
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        self.step_inputs.fill_positions(trees)
        return prepared

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: npt.NDArray[Any], cu_num_scheduled_tokens: npt.NDArray[Any]
    ) -> SpecDecodeMetadata:
        return self.step_inputs.logits_metadata(num_draft_tokens, cu_num_scheduled_tokens)

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        step = self.step
        if step.stage is not Stage.LAID_OUT:  # vLLM warms up
            return super()._build_attention_metadata(*args, **kwargs)
        if step.prelaunched is not None:
            return step.prelaunched.metadata
        metadata, step.dead_nodes = self.metadata_with_trees(step.trees, *args, **kwargs)
        return metadata

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        # At other stages passes are run that are not the step's: draft passes, the next verify
        # pass, those that are timed.
        prelaunched = self.step.launch() if self.step.stage is Stage.LAID_OUT else None
        if prelaunched is not None:
            return prelaunched.output
        return super()._model_forward(*args, **kwargs)

    # -- accept, commit, draft ------------------------------------------------------

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self.execute_model_state is not None:
            self.step.hidden_states = self._states_for_heads(self.execute_model_state)
        return super().sample_tokens(grammar_output)

    def _states_for_heads(self, passed: ExecuteModelState) -> torch.Tensor:
        """``[query rows, hidden]``; passed: what ``execute_model`` left behind."""
        if self.heads is not None and self.heads.reads == "pre_norm":
            assert passed.aux_hidden_states is not None
            return passed.aux_hidden_states[0]
        return passed.hidden_states

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        step, next_step = self.step, self.next_step
        assert logits is not None
        assert step.hidden_states is not None
        groups = self.verifier.rows_of(step, next_step.skipped)
        # vLLM reads a prompt's logprobs from hidden states, over which the next pass may write.
        may_go_on = not self.num_prompt_logprobs
        feed = None
        if self.prelaunches and may_go_on and next_step.is_undrafted(groups):
            feed = next_step.launch_undrafted
        results, logprobs = self.tree_sampler.sample_trees(logits, groups, feed)
        self.verifier.commit(step.trees, groups, results, step.hidden_states, next_step)
        step.verify()
        if may_go_on:
            step.draft(self._draft())
        for rows, result in zip(groups, results, strict=True):  # while the device works
            if result.tokens and rows.req_id not in step.placeholders:
                self.stats.count_iteration(rows.tree, result.nodes, len(result.tokens))
        # On the host: vLLM's bookkeeping, their one reader, wants them there.
        return SamplerOutput(sampled_token_ids(results, torch.device("cpu")), logprobs)

    def _draft(self) -> list[list[int]]:
        """Drafts of the next step, by batch row; on a GPU their pass is under way."""
        drafted = self.next_step.draft()
        drafts = {req_id: tree.tokens.tolist() for req_id, tree in drafted.items()}
        return [drafts.get(req_id, []) for req_id in self.input_batch.req_ids]

    def _bookkeeping_sync(
        self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any
    ) -> Any:
        # vLLM rewinds the generator of a request whose sample it discards. The tree sampler draws
        # nothing for those, so there is nothing to rewind (and a CPU generator cannot be).
        generators = self.input_batch.generators
        discarded = {
            row: generators.pop(row)
            for row in np.flatnonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])
            if row in generators
        }
        try:
            return super()._bookkeeping_sync(scheduler_output, *args, **kwargs)
        finally:
            generators.update(discarded)

    def _to_list(self, sampled_token_ids: torch.Tensor) -> list[list[int]]:
        """vLLM waits here for all that was launched; ours lie on the host already."""
        tokens: list[list[int]] = sampled_token_ids.tolist()
        return tokens

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Each request is clipped on its own (vLLM would stop drafting for the whole batch)."""
        return common_attn_metadata is not None

    def propose_draft_token_ids(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        if self.step.stage is Stage.VERIFIED:
            self.step.draft(self._draft())
        return self.step.hand_out()
