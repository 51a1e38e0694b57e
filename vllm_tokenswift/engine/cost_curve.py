"""Measures, at start-up, what passes cost on this machine (:class:`CostModel`).

Real passes of the model through the attention that serves requests, over an empty
KV cache; a few seconds. Ranks measure together; all plan with what rank 0 measured
(``cost_cache.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from vllm_tokenswift.draft.cost import CostModel
from vllm_tokenswift.engine.tree_attention import TreeAttention
from vllm_tokenswift.engine.verify_plan import TreeRows, VerifyPlan
from vllm_tokenswift.tree import DraftTree

LONG_CONTEXT_TOKENS = 4096
REPETITIONS = 5


Pass = Callable[[], Any]
"""One pass of the target over some rows; returns what the model returns."""
MakePass = Callable[[Sequence[int], int, DraftTree | None], Pass]
"""(query rows of each request, tokens before them, the tree that they are) -> a pass to be
timed; without a tree the rows of a request are a chain."""


@dataclass(frozen=True)
class Shape:
    """A verify pass to be timed, and the numbers of rows of which it is the cost."""

    query_lens: tuple[int, ...]
    num_rows: tuple[int, ...]


def single_request_shapes(max_nodes: int) -> list[Shape]:
    """One request, with the root and more and more drafts."""
    largest = max_nodes + 1
    sizes = [n for n in (1, 2, 3, 5, 9, 17, 33, 65, 129) if n < largest] + [largest]
    return [Shape((n,), (n,)) for n in sizes]


class CostCurve:
    """Times verify and draft passes.

    make_pass: makes the passes; logits: what turns their output into logits rows; heads:
    drafts from one hidden state with the free heads, None where there are none; host_bound:
    makes passes outside of full CUDA graphs, None where all are.
    """

    def __init__(
        self,
        attention: TreeAttention,
        make_pass: MakePass,
        logits: Callable[[Any], object],
        heads: Callable[[], object] | None,
        host_bound: MakePass | None,
        device: torch.device,
    ) -> None:
        self.attention = attention
        self.make_pass = make_pass
        self.logits = logits
        self.heads = heads
        self.host_bound = host_bound
        self.device = device

    def measure(self, shapes: Sequence[Shape], short: int, long: int) -> CostModel:
        """shapes: ascending, the first a plain decode; short, long: see :meth:`contexts`."""
        verify = [
            (n, ms)
            for shape in shapes
            for ms in [self._pass_ms(shape.query_lens, short)]
            for n in shape.num_rows
        ]
        heads_ms = 0.0 if self.heads is None else self._median_ms(self.heads)
        host_bound_ms = (
            0.0 if self.host_bound is None else self._median_ms(self.host_bound([1], short, None))
        )
        if long <= 2 * short:
            return CostModel(tuple(verify), heads_ms=heads_ms, host_bound_ms=host_bound_ms)
        plain_long = self._pass_ms([1], long)
        context = max(0.0, (plain_long - verify[0][1]) / (long - short))
        chain_short = chain_context = 0.0
        if self.attention.chains_cost:
            per_chain = [self._chain_ms(c) for c in (short, long)]
            chain_context = max(0.0, (per_chain[1] - per_chain[0]) / (long - short))
            chain_short = max(0.0, per_chain[0] - chain_context * short)
        draft = ((short, verify[0][1]), (long, plain_long))
        return CostModel(
            tuple(verify), context, chain_short, chain_context, draft, heads_ms, host_bound_ms
        )

    def contexts(
        self, shapes: Sequence[Shape], num_blocks: int, max_model_len: int
    ) -> tuple[int, int]:
        """The short and the long context, in tokens, at which passes are timed.

        num_blocks: blocks of the (empty) cache.
        """
        most_rows = max(max(shape.query_lens) for shape in shapes)
        long = min(
            LONG_CONTEXT_TOKENS,
            max_model_len - most_rows,
            (num_blocks - 1) * self.attention.block_size - most_rows,
        )
        return min(32, long), long

    def _chain_ms(self, context: int) -> float:
        """What a side chain adds: a tree with a branch against a chain of as many rows."""
        # One branch: the first costs most (rows gathered and written again in every layer), and
        # most trees that branch have one or two.
        branching = self.make_pass([3], context, DraftTree.build([0, 0], [0, 0]))
        with_branch = self._median_ms(lambda: self.logits(branching()))
        return max(0.0, with_branch - self._pass_ms([3], context))

    def _pass_ms(self, query_lens: Sequence[int], context: int) -> float:
        """Median time of a target pass with its logits, every query after ``context`` tokens."""
        target_pass = self.make_pass(query_lens, context, None)
        return self._median_ms(lambda: self.logits(target_pass()))

    def _median_ms(self, work: Callable[[], object]) -> float:
        times = []
        for _ in range(REPETITIONS + 1):
            self._synchronize()
            start = time.perf_counter()
            work()
            self._synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return median(times[1:])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def attention_pass(
    vllm_config: VllmConfig,
    attention: TreeAttention,
    model: Callable[[torch.Tensor, torch.Tensor], Any],
    query_lens: Sequence[int],
    context: int,
    tree: DraftTree | None,
    device: torch.device,
) -> Pass:
    """A pass through the attention that serves requests, over blocks of the empty cache.

    tree: what the one request's rows are, None for chains.
    model: ``(input_ids, positions) -> hidden states``, called inside the forward context.
    """
    num_tokens = sum(query_lens)
    # Block 0 is vLLM's null block; the cache is empty, so any blocks may be read and written.
    num_blocks = -(-(context + max(query_lens)) // attention.block_size)
    blocks = np.arange(1, num_blocks + 1, dtype=np.int32)
    tables = np.tile(blocks, (len(attention.layer_names), len(query_lens), 1))
    seq_lens = np.asarray([context + n for n in query_lens], np.int32)
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    positions = np.concatenate([context + np.arange(n) for n in query_lens])
    slots = torch.from_numpy(
        blocks[positions // attention.block_size].astype(np.int64) * attention.block_size
        + positions % attention.block_size
    ).to(device)
    metadata = attention.draft_metadata(
        tables, seq_lens, slots, np.empty(0, np.int64), query_start_loc=starts
    )
    if tree is not None:
        rows = TreeRows("timed", 0, 0, 0, context, tree)
        metadata, _ = attention.with_trees(
            metadata, VerifyPlan((rows,)), starts, seq_lens, tables[0]
        )
    input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    rope = torch.from_numpy(positions).to(device)

    def target_pass() -> Any:
        with set_forward_context(
            metadata,
            vllm_config,
            num_tokens=num_tokens,
            slot_mapping=dict.fromkeys(attention.layer_names, slots),
        ):
            return model(input_ids, rope)

    return target_pass
