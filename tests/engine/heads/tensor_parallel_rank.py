"""One tensor-parallel rank of two: ``RANK MODEL HEADS PORT PROMPT OUT`` (see test_in_vllm.py).

HEADS and PROMPT are JSON: the folders of some heads, which propose one after the other, and
token ids.

A program of its own: processes forked from a test run that has used vLLM would wait for
threads that they do not have.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from vllm_tokenswift.heads.checkpoint import load_heads
from vllm_tokenswift.heads.frozen_target import FrozenTarget


def propose(
    rank: int, model: str, heads_paths: list[str], port: str, prompt: list[int]
) -> list[object]:
    """Replicated heads, vLLM's LM head split over the vocabulary: top 3 of each head."""
    os.environ["VLLM_DIST_IDENT"] = port  # as vLLM's executor sets it
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    torch.set_default_dtype(torch.float32)
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            2, rank, f"tcp://127.0.0.1:{port}", local_rank=rank, backend="gloo"
        )
        initialize_model_parallel(2)
        frozen = FrozenTarget(model, "float32", torch.device("cpu"))
        vocab, hidden_size = frozen.lm_head.shape
        lm_head = ParallelLMHead(vocab, hidden_size)
        lm_head.weight_loader(lm_head.weight, frozen.lm_head)
        assert lm_head.weight.shape[0] < vocab
        lm_head.quant_method.process_weights_after_loading(lm_head)
        logits = LogitsProcessor(vocab)
        proposed: list[object] = []
        for path in heads_paths:
            heads = load_heads(path, hidden_size=hidden_size, dtype=torch.float32, device="cpu")
            states = frozen.hidden(torch.tensor([prompt]), heads.reads)[0]
            reads = heads(states)
            proposed.append([logits(lm_head, read).topk(3).indices.tolist() for read in reads])
        return proposed


if __name__ == "__main__":
    rank, model, heads_paths, port, prompt, out = sys.argv[1:]
    drafts = propose(int(rank), model, json.loads(heads_paths), port, json.loads(prompt))
    Path(out).write_text(json.dumps(drafts))
