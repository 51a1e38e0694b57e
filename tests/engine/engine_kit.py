"""Engines for the tests of the seam: vLLM's own, in this process, on CPU.

``tiny_model`` (conftest.py) is a randomly initialised 2-layer Llama: enough for
everything that does not depend on what the text says, and its engine starts in seconds.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# In one process, so that a test can look into the worker.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import cleanup_dist_env_and_memory

VOCABULARY = 64  # small: texts repeat themselves, and drafts are accepted


@contextmanager
def engine(model: Path | str, **arguments: Any) -> Iterator[LLM]:
    """An engine that is gone afterwards, float32 and eager unless told otherwise."""
    defaults: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 1024,
        "enforce_eager": True,
        "max_num_seqs": 8,
        "block_size": 32,
        "kv_cache_memory_bytes": 1 << 28,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if not (Path(model) / "tokenizer.json").exists():
        defaults["skip_tokenizer_init"] = True
    llm = LLM(**{**defaults, **arguments})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def tokenswift(**options: Any) -> dict[str, Any]:
    """Engine arguments with TokenSwift on; by default it drafts whatever it can."""
    config = {"method": "tokenswift", "plan": "fixed", "num_speculative_tokens": 12, **options}
    return {"speculative_config": config}


def runner_of(llm: LLM) -> Any:
    """The model runner inside an engine of this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def prompt_of(length: int, seed: int) -> TokensPrompt:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
    return TokensPrompt(prompt_token_ids=ids)


def generate(
    llm: LLM, prompts: list[Any], params: SamplingParams | list[SamplingParams]
) -> list[list[int]]:
    """Token ids of every request's one completion, in the order of the prompts."""
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
