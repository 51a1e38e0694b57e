"""TokenSwift on vLLM's V1 runner for CUDA (``vllm/v1/worker/gpu_model_runner.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, get_forward_context, set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from vllm_tokenswift.cuda.attention.backend import tree_backends
from vllm_tokenswift.cuda.attention.tree_attention import CUDATreeAttention
from vllm_tokenswift.cuda.graphs.draft_graph import GraphedDraftPass, first_rows
from vllm_tokenswift.cuda.graphs.shapes import TreeGraphDispatcher, graph_widths
from vllm_tokenswift.cuda.graphs.verify_graph import VerifyGraph, make_verify_graphs
from vllm_tokenswift.cuda.heads.beam_graph import MAX_VOCABULARY, HeadBeamGraphs
from vllm_tokenswift.cuda.sampling.tree_sampler import CUDATreeSampler
from vllm_tokenswift.engine.draft_pass import DraftPass
from vllm_tokenswift.engine.drafter import Drafter
from vllm_tokenswift.engine.head_beam import HeadBeam
from vllm_tokenswift.engine.profiling.pass_times import Pass, Shape
from vllm_tokenswift.engine.request_states import draft_block_table
from vllm_tokenswift.engine.runner import TokenSwiftRunnerMixin
from vllm_tokenswift.engine.tree_attention import TreeAttention
from vllm_tokenswift.engine.worker import TokenSwiftWorkerMixin
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary
from vllm_tokenswift.tree import DraftTree


class TokenSwiftGPUModelRunner(TokenSwiftRunnerMixin, GPUModelRunner):
    tree_sampler_cls = CUDATreeSampler

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        group = self.model_config.get_num_attention_heads(
            vllm_config.parallel_config
        ) // self.model_config.get_num_kv_heads(vllm_config.parallel_config)
        self.graphs = TreeGraphDispatcher(vllm_config, graph_widths(self.num_spec_tokens, group))
        self.cudagraph_dispatcher = self.graphs
        # What vLLM itself takes for uniform are plain decodes; graphs for trees are ours.
        self.uniform_decode_query_len = 1
        parallel = vllm_config.parallel_config
        self.prelaunches = (
            parallel.data_parallel_size == 1  # ranks agree on the shape of every pass
            and not parallel.use_ubatching
            and not parallel.enable_eplb
            and vllm_config.kv_transfer_config is None  # KV may come between two steps
        )
        self._verify_graphs: dict[BatchDescriptor, VerifyGraph] = {}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with tree_backends(self.vllm_config):
            super().load_model(*args, **kwargs)

    def _make_tree_attention(self) -> TreeAttention:
        [[group]] = self.attn_groups
        context = self.compilation_config.static_forward_context
        layers = {name: context[name] for name in group.layer_names}
        builder = group.get_metadata_builder()
        self.prefix_lens = builder.tree_rows.prefix_lens
        return CUDATreeAttention(layers, builder, self.max_num_reqs, self.num_spec_tokens)

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray,
        max_num_scheduled_tokens: int,
        **kwargs: Any,
    ) -> Any:
        """Steps with trees take a full graph that is wide enough, where its padding pays."""
        shape = None
        forced = kwargs.get("force_uniform_decode")
        if (
            max_num_scheduled_tokens > 1
            and forced is not False
            and not kwargs.get("force_eager")
            and self.vllm_config.parallel_config.data_parallel_size == 1
        ):
            shape = self.graphs.wide(num_reqs, max_num_scheduled_tokens)
        if shape is None or not (forced or self._pays_padding(num_tokens, shape.num_tokens)):
            return super()._determine_batch_execution_and_padding(
                num_tokens, num_reqs, num_scheduled_tokens_np, max_num_scheduled_tokens, **kwargs
            )
        stat = None
        if self.vllm_config.observability_config.cudagraph_metrics:
            stat = CUDAGraphStat(
                num_unpadded_tokens=num_tokens,
                num_padded_tokens=shape.num_tokens,
                num_paddings=shape.num_tokens - num_tokens,
                runtime_mode=str(CUDAGraphMode.FULL),
            )
        return CUDAGraphMode.FULL, shape, False, None, stat

    def most_drafts(self, num_reqs: int) -> int:
        """What fits a full graph, where there is one: any other pass waits for the host."""
        most, width = super().most_drafts(num_reqs), self.graphs.widest(num_reqs)
        return min(most, width - 1) if width > 1 else most

    def padded_shapes(self, num_reqs: int) -> list[tuple[int, int]]:
        shapes = [(width, self.graphs.wide(num_reqs, width)) for width in self.graphs.widths[1:]]
        return [(width, shape.num_tokens) for width, shape in shapes if shape is not None]

    def launches_at_once(self, mode: CUDAGraphMode) -> bool:
        return mode is CUDAGraphMode.FULL

    def make_verify_graphs(self) -> None:
        if self.prelaunches:
            builder = self.attn_groups[0][0].get_metadata_builder()
            self._verify_graphs = make_verify_graphs(
                self, self.step_inputs, builder, self.graphs.full_shapes
            )

    def verify_graph(self, shape: BatchDescriptor) -> VerifyGraph | None:
        return self._verify_graphs.get(shape)

    def _warmup_and_capture(self, desc: BatchDescriptor, *args: Any, **kwargs: Any) -> None:
        if desc.uniform and desc.num_reqs is not None:
            self.uniform_decode_query_len = desc.num_tokens // desc.num_reqs
        try:
            super()._warmup_and_capture(desc, *args, **kwargs)
        finally:
            self.uniform_decode_query_len = 1

    def _pays_padding(self, num_tokens: int, padded: int) -> bool:
        """Whether the padded graph is cheaper than a pass whose attention the host launches."""
        drafter: Drafter | None = getattr(self, "tree_drafter", None)
        if drafter is None:  # vLLM warms up, or costs are being measured
            return False
        cost = drafter.planner.cost
        return cost.verify_ms(padded) <= max(cost.verify_ms(num_tokens), cost.host_bound_ms)

    # -- passes ------------------------------------------------------------------

    def start_drafting(self) -> None:
        super().start_drafting()
        if isinstance(self.draft_pass, GraphedDraftPass):
            self.draft_pass.capture()
        self._warm_up_kernels()

    @torch.inference_mode()
    def _warm_up_kernels(self) -> None:
        """A kept cost curve spares passes, not the compiling of what requests launch."""
        assert isinstance(self.tree_attention, CUDATreeAttention)
        assert isinstance(self.tree_sampler, CUDATreeSampler)
        drafts = (
            self.options.self_draft != "off" and self.max_model_len > self.options.budget_tokens
        )
        self.tree_attention.warm_up(ranks_blocks=drafts)
        shape = (2, self.model_config.get_hidden_size())
        hidden = torch.zeros(shape, dtype=self.model_config.dtype, device=self.device)
        self.tree_sampler.warm_up(self.model.compute_logits(hidden))

    def make_draft_pass(self) -> DraftPass:
        if not self.graphs.wide_shapes:  # no full graphs
            return super().make_draft_pass()
        return GraphedDraftPass(
            self, draft_block_table(self.options, self.tree_attention.block_size).budget_blocks
        )

    def make_head_beam(
        self, heads: DraftHeads, part: DraftVocabulary, lm_rows: torch.Tensor, least_chance: float
    ) -> HeadBeam | None:
        if not self.graphs.wide_shapes or len(part.tokens) > MAX_VOCABULARY:
            return None
        embed = self.model.embed_input_ids
        return HeadBeamGraphs(heads, part, lm_rows, embed, least_chance, self.max_num_reqs)

    def verify_shapes(self) -> list[Shape]:
        """Captured shapes: one request at every width, then more requests at the widest."""
        widths = self.graphs.widths
        if not self.graphs.wide_shapes:
            return super().verify_shapes()
        shapes = [Shape((1,), (1,))]
        for narrower, width in pairwise(widths):
            # Trees between two widths cost what the wider graph costs.
            shapes.append(Shape((width,), (narrower + 1, width)))
        for count, width in self.graphs.wide_shapes:
            if width == widths[-1] and count > 1:
                shapes.append(Shape((width,) * count, (count * width,)))
        return shapes

    def host_bound_pass(
        self, query_lens: Sequence[int], context: int, tree: DraftTree | None
    ) -> Pass:
        return super().trial_pass(query_lens, context, tree)

    def trial_pass(self, query_lens: Sequence[int], context: int, tree: DraftTree | None) -> Pass:
        width = max(query_lens)
        shape = self.graphs.full(len(query_lens), width)
        if shape is None or min(query_lens) != width:
            return super().trial_pass(query_lens, context, tree)
        return self._replay(shape, context)

    def _replay(self, shape: BatchDescriptor, context: int) -> Pass:
        """A captured pass over blocks of the empty cache, ``context`` tokens each request."""
        attention = self.tree_attention
        assert isinstance(attention, CUDATreeAttention)
        assert shape.num_reqs is not None
        count, num_rows = shape.num_reqs, shape.num_tokens
        width = num_rows // count
        self.query_start_loc.np[: count + 1] = np.arange(count + 1) * width
        self.query_start_loc.copy_to_gpu()
        self.seq_lens[:count] = context + width
        num_blocks = -(-(context + width) // attention.block_size)
        blocks = self.input_batch.block_table[0]
        table = blocks.get_device_tensor(count)
        table[:, :num_blocks] = torch.arange(1, num_blocks + 1, device=self.device)
        slots = blocks.slot_mapping.gpu[:num_rows].fill_(-1)  # nothing is written
        common = CommonAttentionMetadata(
            query_start_loc=self.query_start_loc.gpu[: count + 1],
            query_start_loc_cpu=self.query_start_loc.cpu[: count + 1],
            seq_lens=self.seq_lens[:count],
            num_reqs=count,
            num_actual_tokens=num_rows,
            max_query_len=width,
            max_seq_len=context + width,
            block_table_tensor=table,
            slot_mapping=slots,
        )
        # The graph reads what building this fills: schedule, ancestors, lengths.
        metadata = dict.fromkeys(attention.layer_names, attention.builder.build(0, common))
        slots_of = dict.fromkeys(attention.layer_names, slots)

        def target_pass() -> Any:
            with set_forward_context(
                metadata,
                self.vllm_config,
                num_tokens=num_rows,
                cudagraph_runtime_mode=CUDAGraphMode.FULL,
                batch_descriptor=shape,
                slot_mapping=slots_of,
            ):
                return self._model_forward(
                    input_ids=self.input_ids.gpu[:num_rows], positions=self.positions[:num_rows]
                )

        return target_pass

    def forward_rows(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """The pass runs through the piecewise CUDA graphs that vLLM captured for verify passes.

        These read the runner's own input buffers and run at captured sizes: the rows are put
        there, and what pads them is token 0 at position 0, whose KV goes nowhere and whose
        output is cut off.
        """
        num_rows = input_ids.shape[0]
        mode, descriptor = self.cudagraph_dispatcher.dispatch(
            num_rows, invalid_modes={CUDAGraphMode.FULL}
        )
        if mode is CUDAGraphMode.NONE:
            return super().forward_rows(input_ids, positions)
        padded = descriptor.num_tokens
        ids_buffer, positions_buffer = self.input_ids.gpu[:padded], self.positions[:padded]
        for buffer, values in ((ids_buffer, input_ids), (positions_buffer, positions)):
            if values.data_ptr() != buffer.data_ptr():
                buffer[:num_rows].copy_(values)
            buffer[num_rows:].zero_()
        context = get_forward_context()
        context.cudagraph_runtime_mode, context.batch_descriptor = mode, descriptor
        return first_rows(super().forward_rows(ids_buffer, positions_buffer), num_rows)


class TokenSwiftGPUWorker(TokenSwiftWorkerMixin, Worker):
    def _make_model_runner(self) -> GPUModelRunner:
        return TokenSwiftGPUModelRunner(self.vllm_config, self.device)

    def _maybe_activate_jit_monitor(self) -> None:
        # The last of vLLM's warming up. From then on what is compiled is reported as a mistake,
        # or refused (``--jit-monitor-mode error``), and the garbage collector leaves alone what
        # is there.
        self.start_drafting()
        super()._maybe_activate_jit_monitor()
