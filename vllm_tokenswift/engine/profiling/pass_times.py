"""Measures, at start-up, what passes cost on this machine (:class:`CostModel`).

Real passes of the model through the attention that serves requests, over an empty
KV cache; a few seconds. Ranks measure together; all plan with what rank 0 measured
(``cache.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from statistics import median
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context

from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.engine.step_trees import RequestTree, StepTrees
from vllm_tokenswift.engine.tree_attention import TreeAttention
from vllm_tokenswift.tree import DraftTree

LONG_CONTEXT_TOKENS = 4096
# Where a GPU's passes are timed for what prefixes cost: fewer tokens are too small a part of a pass
# to foretell what 100,000 cost.
FAR_CONTEXT_TOKENS = 32_768
REPETITIONS = 11
# Rounds from one to the next in which passes over a long prefix are timed: they take long, and
# differ from those over a short one by much.
_FAR_EVERY = 2
# Of two numbers of rows at which prefixes are timed; between them their cost is near to linear.
_TIMES_MORE_ROWS = 1.8


Pass = Callable[[], Any]
"""One pass of the target over some rows; returns what the model returns."""
MakePass = Callable[[Sequence[int], int, DraftTree | None], Pass]
"""(query rows of each request, tokens before them, the tree that they are) -> a pass to be
timed; without a tree the rows of a request are a chain."""
MakeWork = Callable[[], Callable[[], object]]
"""Makes what is to be timed."""


@dataclass(frozen=True)
class Shape:
    """A verify pass to be timed.

    Attributes:
        query_lens: query rows of each request.
        num_rows: numbers of rows, of all requests, of which it is the cost.
    """

    query_lens: tuple[int, ...]
    num_rows: tuple[int, ...]


@dataclass(frozen=True)
class Contexts:
    """Tokens before the rows of the passes that are timed.

    Attributes:
        short: tokens behind which prefixes cost next to nothing.
        long: about as many as a draft pass reads.
        far: so many that it shows what prefixes cost.
    """

    short: int
    long: int
    far: int

    @property
    def differ(self) -> bool:
        """Whether there is room enough to tell what a prefix costs."""
        return self.long > 2 * self.short


def single_request_shapes(max_nodes: int) -> list[Shape]:
    """One request, with the root and more and more drafts; one by one as far as a tile of the
    matrix products, where another row can cost nothing or half a pass."""
    largest = max_nodes + 1
    sizes = [n for n in (*range(1, 10), 13, 17, 25, 33, 65, 129) if n < largest] + [largest]
    return [Shape((n,), (n,)) for n in sizes]


class PassTimes:
    """Times verify and draft passes.

    Args:
        attention: what the passes go through.
        make_pass: makes the passes.
        logits: what turns their output into logits rows.
        heads: drafts from one hidden state with the free heads, None where there are none.
        host_bound: makes passes outside of full CUDA graphs; None where all are so.
        device: where they run.
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

    def measure(self, shapes: Sequence[Shape], contexts: Contexts) -> CostModel:
        """Times passes of these shapes, and others besides, and makes a cost model of them.

        Args:
            shapes: ascending, the first a plain decode.
            contexts: tokens before the rows.
        """
        short, long, far = contexts.short, contexts.long, contexts.far
        # In rounds over all passes: a machine whose speed drifts slows all of them alike.
        works: dict[str, MakeWork] = {
            f"verify {i}": self._target_pass(shape.query_lens, short)
            for i, shape in enumerate(shapes)
        }
        if self.heads is not None:
            heads = self.heads
            works["heads"] = lambda: heads
        if self.host_bound is not None:
            works["host bound"] = self._target_pass([1], short, self.host_bound)
        reading = _fewer(shapes) if contexts.differ else []
        far_works = {f"far {i}": self._target_pass(shapes[i].query_lens, far) for i in reading}
        if long < far:
            works["long"] = self._target_pass([1], long)
        lengths = (short, long) if contexts.differ and self.attention.chains_cost else ()
        for length in lengths:
            # One branch: the first costs most (its rows are written again in every layer),
            # and most trees that branch have one or two.
            works[f"chain {length}"] = self._target_pass([3], length)
            works[f"branch {length}"] = self._target_pass(
                [3], length, tree=DraftTree.build([0, 0], [0, 0])
            )
        times = self._rounds(works, far_works)
        # Whatever else a machine does only adds to a time.
        fastest = {name: min(ms) for name, ms in times.items()}
        verify = tuple(
            (n, fastest[f"verify {i}"]) for i, s in enumerate(shapes) for n in s.num_rows
        )
        heads_ms, host_bound_ms = fastest.get("heads", 0.0), fastest.get("host bound", 0.0)
        if not contexts.differ:
            return CostModel(verify, heads_ms=heads_ms, host_bound_ms=host_bound_ms)
        context_points = tuple(
            (n, max(0.0, fastest[f"far {i}"] - fastest[f"verify {i}"]) / (far - short))
            for i in reading
            for n in shapes[i].num_rows
        )
        chain_short = chain_context = 0.0
        if lengths:
            per_chain = [
                max(0.0, median(map(sub, times[f"branch {length}"], times[f"chain {length}"])))
                for length in lengths
            ]
            chain_context = max(0.0, (per_chain[1] - per_chain[0]) / (long - short))
            chain_short = max(0.0, per_chain[0] - chain_context * short)
        draft = ((short, verify[0][1]), (long, fastest.get("long", fastest["far 0"])))
        return CostModel(
            verify,
            context_points=context_points,
            chain_ms=chain_short,
            chain_context_ms_per_token=chain_context,
            draft_points=draft,
            heads_ms=heads_ms,
            host_bound_ms=host_bound_ms,
        )

    def plain_ms(self, shapes: Sequence[Shape], short: int) -> float:
        """Milliseconds of a plain decode as :meth:`measure` times it.

        Args:
            shapes: the first is the plain decode's.
            short: tokens before its row.
        """
        works = {"plain": self._target_pass(shapes[0].query_lens, short)}
        return min(self._rounds(works, {})["plain"])

    def contexts(self, shapes: Sequence[Shape], num_blocks: int, max_model_len: int) -> Contexts:
        """Those at which passes are timed.

        Args:
            shapes: the verify passes that are timed.
            num_blocks: blocks of the (empty) cache.
            max_model_len: most tokens of a sequence.
        """
        most_rows = max(max(shape.query_lens) for shape in shapes)
        cached = (num_blocks - 1) * self.attention.block_size
        room = min(max_model_len, cached) - most_rows
        long = min(LONG_CONTEXT_TOKENS, room)
        far = min(FAR_CONTEXT_TOKENS, room) if self.device.type == "cuda" else long
        return Contexts(min(32, long), long, far)

    def _target_pass(
        self,
        query_lens: Sequence[int],
        context: int,
        make_pass: MakePass | None = None,
        tree: DraftTree | None = None,
    ) -> MakeWork:
        """A target pass with its logits, every query after ``context`` tokens."""

        def make() -> Callable[[], object]:
            target_pass = (make_pass or self.make_pass)(query_lens, context, tree)
            return lambda: self.logits(target_pass())

        return make

    def _rounds(
        self, works: Mapping[str, MakeWork], far_works: Mapping[str, MakeWork]
    ) -> dict[str, list[float]]:
        """Milliseconds of each work in each of REPETITIONS rounds after one to warm up; of
        ``far_works`` in every ``_FAR_EVERY``th of them.

        Each is made anew before it is timed: passes may share the buffers they read.
        """
        times: dict[str, list[float]] = {name: [] for name in (*works, *far_works)}
        for number in range(REPETITIONS + 1):
            now = works if number % _FAR_EVERY else {**works, **far_works}
            for name, make in now.items():
                work = make()
                self._synchronize()
                start = time.perf_counter()
                work()
                self._synchronize()
                times[name].append((time.perf_counter() - start) * 1e3)
        return {name: ms[1:] for name, ms in times.items()}

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _fewer(shapes: Sequence[Shape]) -> list[int]:
    """Of one request's shapes those at which prefixes are timed: the first, the last, and those
    between that have many more rows than the one before."""
    single = [i for i, shape in enumerate(shapes) if len(shape.query_lens) == 1]
    chosen = single[:1]
    for i in single[1:]:
        rows, before = shapes[i].query_lens[0], shapes[chosen[-1]].query_lens[0]
        if rows >= _TIMES_MORE_ROWS * before or i == single[-1]:
            chosen.append(i)
    return chosen


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

    Args:
        vllm_config: the engine's.
        attention: what the pass goes through.
        query_lens: query rows of each request.
        context: tokens of each before these rows.
        tree: what the one request's rows are, None for chains.
        device: where it runs.
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
        rows = RequestTree("timed", 0, 0, 0, context, tree)
        metadata, _ = attention.with_trees(
            metadata, StepTrees((rows,)), starts, seq_lens, tables[0]
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
