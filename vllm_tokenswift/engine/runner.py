"""TokenSwift's hooks into vLLM's V1 model runner, the same for CPU and CUDA.

The data's way through one step: ``_update_states`` (requests come and go) →
``_prepare_inputs`` (which drafts were scheduled: the plan; RoPE positions by
depth) → ``_build_attention_metadata`` (trees) → vLLM's forward → ``_sample``
(score, accept, move KV, commit, draft the next trees; on a GPU also launch their pass,
``prelaunch.py``, which the hooks up to the forward then hand out) → vLLM's bookkeeping →
``propose_draft_token_ids`` (hand out the drafts).

All of ours is done before vLLM's bookkeeping, its outputs and its scheduler, so that on a GPU
these run while the next pass does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tp_group
from vllm.forward_context import BatchDescriptor
from vllm.utils.torch_utils import PIN_MEMORY
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from vllm_tokenswift.common.staging import Staging
from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.gumbel_noise import GumbelNoise
from vllm_tokenswift.draft.top_tokens import VerifyTopK
from vllm_tokenswift.engine import row_layout as step_layout
from vllm_tokenswift.engine.draft_pass import DraftPass
from vllm_tokenswift.engine.drafter import Drafter
from vllm_tokenswift.engine.head_beam import HeadBeam
from vllm_tokenswift.engine.next_step import NextStep
from vllm_tokenswift.engine.prelaunch import PrelaunchedPass, Prelauncher
from vllm_tokenswift.engine.profiling.host_time import drafting_ms
from vllm_tokenswift.engine.profiling.pass_times import (
    MakePass,
    Pass,
    Shape,
    attention_pass,
    single_request_shapes,
)
from vllm_tokenswift.engine.recorder import Recorder
from vllm_tokenswift.engine.request_state import RequestState
from vllm_tokenswift.engine.runner_view import PassLauncher
from vllm_tokenswift.engine.step import NO_TREES, RequestTree, StepTrees
from vllm_tokenswift.engine.step_inputs import StepInputs, logits_layout, logits_rows
from vllm_tokenswift.engine.tree_attention import TreeAttention
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.heads.skip_weights import head_weights_skipped
from vllm_tokenswift.metrics import Stats
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.partial_kv.table import DraftBlockTable, Mode
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary
from vllm_tokenswift.sampling.request_parameters import RequestOptions
from vllm_tokenswift.sampling.tree_sampler import (
    TreeSampler,
    VerifyResult,
    VerifyRows,
    sampled_token_ids,
)
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as _Runner
else:
    _Runner = object

PLACEHOLDER_TOKEN_ID = -1


class TokenSwiftRunnerMixin(_Runner):
    """To be placed before a V1 runner class in the bases.

    A platform supplies ``_make_tree_attention`` and may extend the loading hooks.
    """

    tree_sampler_cls: type[TreeSampler] = TreeSampler
    tree_attention: TreeAttention
    drafter: Any
    # int32 [most requests] on the device, tokens before each request's rows; where attention
    # reads it.
    prefix_lens: torch.Tensor | None = None

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        self.options = TokenSwiftOptions.from_dict(vllm_config.additional_config["tokenswift"])
        self.stats = Stats()
        self.tree_sampler = self.tree_sampler_cls(
            self.model_config.get_vocab_size(),
            device,
            self.options,
            logprobs_mode=self.sampler.logprobs_mode,
            use_fp64_gumbel=self.sampler.use_fp64_gumbel,
        )
        # Each query row's place in it is written again only after the step that read it.
        self._node_positions = torch.zeros(
            self.max_num_tokens, dtype=torch.int64, pin_memory=PIN_MEMORY
        )
        self._staging = Staging(device)
        self.step_inputs = StepInputs(self)
        self.request_states: dict[str, RequestState] = {}
        self._trees: dict[str, DraftTree] = {}  # drafted, not yet seen in a schedule
        self._plan: StepTrees = NO_TREES
        self._dead_nodes: dict[str, frozenset[int]] = {}
        self._placeholders: set[str] = set()
        self._drafts: list[list[int]] | None = None  # of the next step, from _sample on
        self.prelauncher = Prelauncher(self, self.step_inputs)
        self._ready: PrelaunchedPass | None = (
            None  # this step's pass, from its inputs to its forward
        )
        self.recorder: Recorder | None = None

    @property
    def heads(self) -> DraftHeads | None:
        """The draft heads, which vLLM's "drafter" owns."""
        heads: DraftHeads | None = self.drafter.heads
        return heads

    # -- start-up ---------------------------------------------------------------

    def _make_tree_attention(self) -> TreeAttention:
        raise NotImplementedError

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
        step_layout.warm_up()
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
            lambda drafter: drafting_ms(self, drafter, self.prelauncher, self.take_in),
        )

    def draft_with(self, drafter: Drafter) -> None:
        """To be called while no request is running."""
        self.tree_drafter = drafter
        self.prelauncher = Prelauncher(self, self.step_inputs)
        self.next_step = NextStep(self, drafter, self.prelauncher)

    def forward_rows(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """A pass of the target over some rows; call it inside a forward context."""
        return self._model_forward(input_ids=input_ids, positions=positions)

    def make_draft_pass(self) -> DraftPass:
        """Called once: the runner has one draft pass, whatever drafters it makes."""
        return DraftPass(self)

    def make_head_beam(
        self, heads: DraftHeads, part: DraftVocabulary, lm_rows: torch.Tensor, least_chance: float
    ) -> HeadBeam | None:
        """All sequential heads at once, where the platform has a way to run them so."""
        return None

    # What the cost curve times.

    host_bound_pass: MakePass | None = None

    def verify_shapes(self) -> list[Shape]:
        return single_request_shapes(self.num_spec_tokens)

    def trial_pass(self, query_lens: Sequence[int], context: int, tree: DraftTree | None) -> Pass:
        """A verify pass as a step runs it, of requests that have ``context`` tokens each."""
        return attention_pass(
            self.vllm_config,
            self.tree_attention,
            self.forward_rows,
            query_lens,
            context,
            tree,
            self.device,
        )

    # -- requests come and go ---------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        if not scheduler_output.total_num_scheduled_tokens:
            self.prelauncher.drop()
        return super().execute_model(self._without_placeholders(scheduler_output), *args, **kwargs)

    def _without_placeholders(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """vLLM pads a decode that newly joins the batch with drafts of token -1.

        (``Scheduler.schedule``, ``pad_spec_decode``.) They must neither reach the embedding nor
        be accepted: a token that exists takes their place, in nodes marked dead.
        """
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self._placeholders = {r for r, tokens in drafts.items() if PLACEHOLDER_TOKEN_ID in tokens}
        if not self._placeholders:
            return scheduler_output
        drafts = {req_id: [max(token, 0) for token in tokens] for req_id, tokens in drafts.items()}
        return dataclasses.replace(scheduler_output, scheduled_spec_decode_tokens=drafts)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        for req_id in scheduler_output.finished_req_ids:
            self.forget_request(req_id)
        corrections = super()._update_states(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            self.forget_request(new.req_id)  # a streaming request that goes on is a new one
            self.start_request(new.req_id)
        for req_id in scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self.request_states[req_id].table.forget()
        return corrections

    def start_request(self, req_id: str) -> None:
        """Takes in a request that the runner's batch has."""
        request = self.requests[req_id]
        params = request.sampling_params
        prompt = request.prompt_token_ids
        self.tree_sampler.add_request(
            req_id, params, prompt, request.output_token_ids, request.generator
        )
        options = self.options
        table = self.draft_table()
        sampled = params.temperature > 0
        draft = DraftState(options.ngram_n, options.ngram_k, options.suffix_max_match, sampled)
        if self.noise_of(req_id) is None:
            draft.contexts = None  # nobody would look at them
        draft.extend(prompt)
        draft.extend(request.output_token_ids)
        self.request_states[req_id] = RequestState(
            draft,
            table,
            speculate=RequestOptions.from_sampling_params(params, options).tokenswift,
            chain_only=params.structured_outputs is not None,
            max_tokens=min(
                self.max_model_len,
                len(prompt) + (params.max_tokens or self.max_model_len),
            ),
        )
        if self.recorder is not None:
            self.recorder.start(req_id, [*prompt, *request.output_token_ids], sampled)

    def noise_of(self, req_id: str) -> GumbelNoise | None:
        """What drafts may see of the noise of a request's coming samples."""
        return self.tree_sampler.noise_of(req_id) if self.options.plan == "auto" else None

    def draft_table(self) -> DraftBlockTable:
        """The draft block table of a new request."""
        options = self.options
        return DraftBlockTable(
            Mode(options.partial_kv),
            self.tree_attention.block_size,
            options.budget_tokens,
            options.sink_tokens,
            options.refresh_tokens,
        )

    def forget_request(self, req_id: str) -> None:
        if self.request_states.pop(req_id, None) is not None:
            self.tree_sampler.remove_request(req_id)
            self._trees.pop(req_id, None)
            if self.recorder is not None:
                self.recorder.finish(req_id)

    def _may_reorder_batch(self, scheduler_output: SchedulerOutput) -> None:
        if self.input_batch.num_reqs > 1:  # the one request's order costs as much as its inputs
            super()._may_reorder_batch(scheduler_output)

    # -- verify -----------------------------------------------------------------

    def _prepare_inputs(
        self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray
    ) -> Any:
        self._ready = self.prelauncher.take(scheduler_output, num_scheduled_tokens)
        if self._ready is not None:
            return self._ready.inputs
        drafts = scheduler_output.scheduled_spec_decode_tokens
        self.begin_step(self._make_plan(drafts, num_scheduled_tokens))
        if num_scheduled_tokens.max() <= 1 + self.num_spec_tokens:
            return self.step_inputs.fill(num_scheduled_tokens, self._plan)
        self.step_inputs.forget_tables()
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        for rows in self._plan.branching:
            stop = rows.root_row + len(rows.tree) + 1
            positions = self._node_positions[rows.root_row : stop]
            positions.numpy()[:] = rows.positions
            self.positions[rows.root_row : stop].copy_(positions, non_blocking=True)
        return prepared

    def begin_step(self, plan: StepTrees) -> None:
        """To be called before the inputs of a step are laid out."""
        self._plan, self._dead_nodes = plan, {}

    def expect(self, trees: Mapping[str, DraftTree]) -> None:
        """Trees, by request, that a coming step may bring."""
        self._trees.update((r, tree) for r, tree in trees.items() if r in self.request_states)

    def _calc_spec_decode_metadata(
        self, num_draft_tokens: np.ndarray, cu_num_scheduled_tokens: np.ndarray
    ) -> SpecDecodeMetadata:
        rows = logits_rows(num_draft_tokens, cu_num_scheduled_tokens)
        [indices] = self._staging.to_device(rows)
        return logits_layout(indices, num_draft_tokens)

    def _make_plan(
        self, drafts: Mapping[str, list[int]], num_scheduled_tokens: np.ndarray
    ) -> StepTrees:
        if not drafts:
            return NO_TREES
        trees = []
        stop = 0
        for batch_row, req_id in enumerate(self.input_batch.req_ids):
            start, stop = stop, stop + int(num_scheduled_tokens[batch_row])
            tokens = drafts.get(req_id)
            if not tokens:
                continue
            # A tree is applied only to the very tokens it was drafted with: vLLM may have cut the
            # list, and drafts that are not ours (padding) are a chain.
            drafted = self._trees.pop(req_id, EMPTY_TREE).truncate(len(tokens))
            tree = drafted if drafted.tokens.tolist() == tokens else DraftTree.chain(tokens)
            root_row = stop - len(tokens) - 1
            computed = int(self.input_batch.num_computed_tokens_cpu[batch_row])
            trees.append(
                RequestTree(req_id, batch_row, start, root_row, computed + root_row - start, tree)
            )
        return StepTrees(tuple(trees))

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        if self._ready is not None:
            return self._ready.metadata
        metadata, common = self._step_metadata(*args, **kwargs)
        if self._plan.branching:
            num_reqs = self.input_batch.num_reqs
            metadata, self._dead_nodes = self.tree_attention.with_trees(
                metadata,
                self._plan,
                self.query_start_loc.np[: num_reqs + 1],
                self.optimistic_seq_lens_cpu[:num_reqs].numpy(),
                self.block_table(),
            )
        return metadata, common

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        ready, self._ready = self._ready, None
        return super()._model_forward(*args, **kwargs) if ready is None else ready.output

    def _step_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's metadata of the step, in which all requests are chains."""
        return super()._build_attention_metadata(*args, **kwargs)

    def block_table(self) -> np.ndarray:
        """int32 ``[batch rows, blocks]``: physical blocks of the one KV cache group."""
        table: np.ndarray = self.input_batch.block_table[0].get_numpy_array()
        return table

    # -- accept, commit, draft ------------------------------------------------------

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._step = self.execute_model_state  # what _sample drafts from
        return super().sample_tokens(grammar_output)

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        assert logits is not None
        groups = self._row_groups()
        # vLLM reads a prompt's logprobs from hidden states, over which the next pass may write.
        may_go_on = not self.num_prompt_logprobs
        feed = None
        if self.prelaunches and may_go_on and self.next_step.is_undrafted(groups):
            feed = self.next_step.launch_undrafted
        accepted, logprobs = self.tree_sampler.sample_trees(logits, groups, feed)
        self.take_in(self.next_step, groups, accepted, self._head_states())
        self._drafts = self._draft() if may_go_on else None
        for group, emitted in zip(groups, accepted, strict=True):  # while the device works
            if emitted.tokens and group.req_id not in self._placeholders:
                self.stats.count_iteration(group.tree, emitted.nodes, len(emitted.tokens))
        # On the host: vLLM's bookkeeping, their one reader, wants them there.
        return SamplerOutput(sampled_token_ids(accepted, torch.device("cpu")), logprobs)

    def _row_groups(self) -> list[VerifyRows]:
        trees = {rows.req_id: rows.tree for rows in self._plan.trees}
        return [
            VerifyRows(
                req_id,
                tree := trees.get(req_id, EMPTY_TREE),
                discard=bool(self.discard_request_mask.np[batch_row]),
                dead_nodes=(
                    frozenset(range(1, len(tree) + 1))
                    if req_id in self._placeholders
                    else self._dead_nodes.get(req_id, frozenset())
                ),
                wants_top_k=self.wants_top_k(req_id, tree),
            )
            for batch_row, req_id in enumerate(self.input_batch.req_ids)
        ]

    def wants_top_k(self, req_id: str, tree: DraftTree) -> bool:
        """Whether drafting learns from what the target finds likeliest at a request's rows."""
        return req_id not in self.next_step.rested and self.request_states[req_id].wants_top_k

    def _head_states(self) -> torch.Tensor:
        """The step's hidden states in the form that heads read: ``[query rows, hidden]``."""
        step = self._step
        assert step is not None
        if self.heads is not None and self.heads.reads == "pre_norm":
            assert step.aux_hidden_states is not None
            return step.aux_hidden_states[0]
        return step.hidden_states

    def take_in(
        self,
        next_step: NextStep,
        groups: Sequence[VerifyRows],
        accepted: Sequence[VerifyResult],
        head_states: torch.Tensor,
    ) -> None:
        """Takes in what a step emitted. The device drafts before cache and texts have it."""
        for group, emitted in zip(groups, accepted, strict=True):
            if emitted.tokens:
                self.tree_sampler.commit_tokens(group.req_id, emitted.tokens)
        next_step.begin(groups, accepted, head_states)
        if self._plan.trees:
            nodes = {g.req_id: a.nodes for g, a in zip(groups, accepted, strict=True)}
            self.stats.tokens_moved += self.tree_attention.commit(
                self._plan, nodes, self.block_table()
            )
        for group, emitted in zip(groups, accepted, strict=True):
            req_id, tokens = group.req_id, emitted.tokens
            if not tokens:
                continue
            heard = None if emitted.top_k is None else VerifyTopK(group.tree, emitted.top_k)
            self.request_states[req_id].draft.extend(tokens, heard)
            if self.recorder is not None:
                self.recorder.iteration(req_id, group.tree, emitted.nodes, tokens, len(groups))

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
        drafts, self._drafts = self._drafts, None
        return self._draft() if drafts is None else drafts

    def most_drafts(self, num_reqs: int) -> int:
        """The most nodes of a tree in a batch of so many requests."""
        most: int = self.num_spec_tokens
        return most

    def padded_shapes(self, num_reqs: int) -> list[tuple[int, int]]:
        """What steps of so many requests with trees are padded to: rows of each request and of
        all, ascending; empty where nothing is padded."""
        return []

    # -- the next step, ahead of its schedule ---------------------------------------

    prelaunches = False  # where passes run by themselves, once launched

    def make_verify_graphs(self) -> None:
        """Makes what :meth:`verify_graph` hands out, once, before any pass is launched ahead."""

    def verify_graph(self, shape: BatchDescriptor) -> PassLauncher | None:
        """What launches a pass of that shape with less work for the host, where there is one."""
        return None

    def launches_at_once(self, mode: CUDAGraphMode) -> bool:
        """Whether a pass that runs so is launched in less time than vLLM takes for a step."""
        return True
