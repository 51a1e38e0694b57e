"""TokenSwift on vLLM's V1 CPU runner (``vllm/v1/worker/cpu_model_runner.py``)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from vllm_tokenswift.cpu import head_chain
from vllm_tokenswift.cpu.head_beam import CPUHeadBeam
from vllm_tokenswift.cpu.tree_attention import (
    CPUTreeAttention,
    num_scratch_blocks,
    tree_backend,
    with_scratch_blocks,
)
from vllm_tokenswift.engine.head_beam import HeadBeam
from vllm_tokenswift.engine.runner import TokenSwiftRunnerMixin
from vllm_tokenswift.engine.tree_attention import TreeAttention
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.sampling.draft_vocabulary import DraftVocabulary


class TokenSwiftCPUModelRunner(TokenSwiftRunnerMixin, CPUModelRunner):
    top_k_is_cheap = False

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        with tree_backend():
            super().load_model(*args, **kwargs)

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        scratch = num_scratch_blocks(kv_cache_config.num_blocks)
        self._scratch_blocks = list(
            range(kv_cache_config.num_blocks, kv_cache_config.num_blocks + scratch)
        )
        super().initialize_kv_cache(with_scratch_blocks(kv_cache_config, scratch), *args, **kwargs)

    def _make_tree_attention(self) -> TreeAttention:
        [[group]] = self.attn_groups
        context = self.compilation_config.static_forward_context
        layers = {name: context[name] for name in group.layer_names}
        return CPUTreeAttention(layers, group.get_metadata_builder(), self._scratch_blocks)

    def make_head_beam(
        self, heads: DraftHeads, part: DraftVocabulary, lm_rows: torch.Tensor, least_chance: float
    ) -> HeadBeam | None:
        if not head_chain.is_compiled() or len(part.tokens) < head_chain.TOP:
            return None
        return CPUHeadBeam(heads, part, lm_rows, self.model.embed_input_ids, least_chance)
