"""Engines for the tests of the seam: vLLM's own, in this process, on CPU.

``tiny_model`` (conftest.py) is a randomly initialised 2-layer Llama: enough for
everything that does not depend on what the text says, and its engine starts in seconds.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# In one process, so that a test can look into the worker.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoConfig
from vllm import LLM, SamplingParams, TokensPrompt

from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.heads.target import TargetShape
from vllm_tokenswift.heads.writing import write_own

BLOCK = 32  # tokens of a KV block
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
        "block_size": BLOCK,
        "kv_cache_memory_bytes": 1 << 26,
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if not (Path(model) / "tokenizer.json").exists():
        defaults["skip_tokenizer_init"] = True
    with _garbage_kept():
        llm = LLM(**{**defaults, **arguments})
    try:
        yield llm
    finally:
        with _garbage_kept():
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@contextmanager
def _garbage_kept() -> Iterator[None]:
    """vLLM asks for five full collections where an engine starts and stops.

    In a process with all tests they take longer than everything else it does there.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "collect", lambda generation=2: 0)
        yield


def tokenswift(**options: Any) -> dict[str, Any]:
    """Engine arguments with TokenSwift on; by default it drafts whatever it can."""
    config = {"method": "tokenswift", "plan": "fixed", "num_speculative_tokens": 12, **options}
    return {"speculative_config": config}


def runner_of(llm: LLM) -> Any:
    """The model runner inside an engine of this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def plan_with(llm: LLM, cost: CostModel) -> None:
    """From now on, whatever was measured."""
    runner_of(llm).tree_drafter.planner.cost = cost


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


_written_by_plain_vllm: dict[str, list[list[int]]] = {}


def plain_texts(
    model: Path, prompts: list[Any], params: SamplingParams | list[SamplingParams], **arguments: Any
) -> list[list[int]]:
    """What plain vLLM writes, asked once where several tests ask for the same texts.

    arguments: of its engine.
    """
    each = params if isinstance(params, list) else [params]
    key = repr((str(model), prompts, list(map(msgspec.structs.asdict, each)), arguments))
    if key not in _written_by_plain_vllm:
        with engine(model, **arguments) as llm:
            _written_by_plain_vllm[key] = generate(llm, prompts, params)
    return [list(text) for text in _written_by_plain_vllm[key]]


def cache_after_last_step(llm: LLM) -> list[Any]:
    """Copies, at every commit, the KV of the running request: ``[layers, blocks, ...]``."""
    runner = runner_of(llm)
    commit = runner._bookkeeping_sync
    copies: list[Any] = []

    def copying(*args: Any, **kwargs: Any) -> Any:
        result = commit(*args, **kwargs)
        table = runner.input_batch.block_table[0].get_numpy_array()[0]
        computed = int(runner.input_batch.num_tokens_no_spec[0]) - 1
        blocks = torch.from_numpy(table[: -(-computed // BLOCK)].astype(np.int64))
        copies[:] = [computed, torch.stack([cache[blocks] for cache in runner.kv_caches])]
        return result

    runner._bookkeeping_sync = copying
    return copies


def count_preemptions(llm: LLM) -> Callable[[], int]:
    """Counts resumed requests as the runner sees them."""
    runner = runner_of(llm)
    resumed: list[str] = []
    update = runner._update_states

    def counting(scheduler_output: Any) -> Any:
        resumed.extend(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        return update(scheduler_output)

    runner._update_states = counting
    return lambda: len(resumed)


def untrained_heads(form: str, model: Path, vocabulary_size: int | None = None) -> DraftHeads:
    """Three heads for a model; vocabulary_size: of the tokens they propose, None for all."""
    config = AutoConfig.from_pretrained(model)
    torch.manual_seed(0)
    part = None if vocabulary_size is None else torch.randperm(VOCABULARY)[:vocabulary_size]
    return DraftHeads(form, 3, config.hidden_size, config.rms_norm_eps, vocabulary=part)


def write_heads(heads: DraftHeads, model: Path, out: Path) -> Path:
    target = TargetShape.from_config(AutoConfig.from_pretrained(model))
    write_own(heads, out, target_name="tiny", target=target, training={})
    return out
