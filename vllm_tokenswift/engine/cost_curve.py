"""Measures, at start-up, what passes cost on this machine (:class:`CostModel`).

Real passes of the model through the attention that serves requests, over an empty
KV cache; a few seconds. Rank 0 measures what all ranks plan with: a decision taken
from one rank's clock alone would differ between ranks and hang them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.forward_context import set_forward_context

from vllm_tokenswift.draft.cost import CostModel
from vllm_tokenswift.engine.tree_attention import TreeAttention

LONG_CONTEXT_TOKENS = 4096
REPETITIONS = 5


class CostCurve:
    """Times verify and draft passes.

    model: ``(input_ids, positions) -> hidden states`` of the first rows, called inside
    the forward context; logits: what turns them into logits rows; heads: drafts from
    one hidden state with the free heads, None where there are none.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        attention: TreeAttention,
        model: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        logits: Callable[[torch.Tensor], torch.Tensor | None],
        heads: Callable[[], object] | None,
        device: torch.device,
    ) -> None:
        self.vllm_config = vllm_config
        self.attention = attention
        self.model = model
        self.logits = logits
        self.heads = heads
        self.device = device

    def measure(self, num_blocks: int, max_nodes: int, max_model_len: int) -> CostModel:
        """num_blocks: blocks of the cache (all still empty); max_nodes: node budget."""
        largest = max_nodes + 1
        sizes = [n for n in (1, 2, 3, 5, 9, 17, 33, 65, 129) if n < largest] + [largest]
        long = min(
            LONG_CONTEXT_TOKENS,
            max_model_len - largest,
            (num_blocks - 1) * self.attention.block_size - largest,
        )
        short = min(32, long)
        verify = [(n, self._pass_ms([n], short)) for n in sizes]
        heads_ms = 0.0 if self.heads is None else self._median_ms(self.heads)
        if long <= 2 * short:
            return self._agreed(CostModel(tuple(verify), heads_ms=heads_ms))
        plain_long = self._pass_ms([1], long)
        context = max(0.0, (plain_long - verify[0][1]) / (long - short))
        # Side chains: as many sequences of one row instead of one of as many rows.
        branches = min(8, self.attention.max_side_chains)
        chain_short = chain_context = 0.0
        if self.attention.chains_cost:
            per_chain = [
                max(0.0, self._pass_ms([1] * (branches + 1), c) - self._pass_ms([branches + 1], c))
                / branches
                for c in (short, long)
            ]
            chain_context = max(0.0, (per_chain[1] - per_chain[0]) / (long - short))
            chain_short = max(0.0, per_chain[0] - chain_context * short)
        draft = ((short, verify[0][1]), (long, plain_long))
        return self._agreed(
            CostModel(tuple(verify), context, chain_short, chain_context, draft, heads_ms)
        )

    def _agreed(self, cost: CostModel) -> CostModel:
        group = get_tp_group()
        if group.world_size == 1:
            return cost
        return CostModel.from_json(group.broadcast_object(cost.to_json(), src=0))

    def _pass_ms(self, query_lens: list[int], context: int) -> float:
        """Median time of a target pass with its logits, every query after ``context`` tokens."""
        attention = self.attention
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
        ).to(self.device)
        metadata = attention.draft_metadata(
            tables, seq_lens, slots, np.empty(0, np.int64), query_start_loc=starts
        )
        input_ids = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
        rope = torch.from_numpy(positions).to(self.device)

        def target_pass() -> None:
            with set_forward_context(
                metadata,
                self.vllm_config,
                num_tokens=num_tokens,
                slot_mapping=dict.fromkeys(attention.layer_names, slots),
            ):
                hidden = self.model(input_ids, rope)
            self.logits(hidden)

        return self._median_ms(target_pass)

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
