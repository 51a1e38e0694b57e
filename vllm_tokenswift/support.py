"""What TokenSwift cannot honour is refused when the engine starts, in words.

The same checks run on every way in, after vLLM has resolved its configuration and
before a model is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_tokenswift.options import TokenSwiftOptions

if TYPE_CHECKING:
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

SUPPORTED_MODELS = (
    "Supported are decoder-only text models whose layers all use full attention, such as "
    "Llama, Qwen2, Qwen3, and Mistral without a sliding window"
)
# A cache that is stored as it is computed; others quantise what the draft pass reads.
_PLAIN_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")
# Processors of ours, which work on plain decoding; the scorer does their part here.
_OWN_PROCESSORS = "vllm_tokenswift.sampling.processors"


def check_arguments(arguments: EngineArgs) -> None:
    """Raises ValueError for what vLLM would refuse itself before the configuration is
    finished, with sentences about methods that the user did not choose."""
    if arguments.async_scheduling:
        raise ValueError(
            "async_scheduling is on: TokenSwift drafts from what the last step accepted, so it "
            "runs with --no-async-scheduling, which is its default"
        )
    if arguments.enable_lora:
        raise ValueError(
            "LoRA is enabled: TokenSwift supports models without adapters; merge the adapter "
            "into the model, or serve without TokenSwift"
        )


def check_supported(vllm_config: VllmConfig, options: TokenSwiftOptions) -> None:
    """Raises ValueError, with one sentence for everything that is not supported."""
    reasons = [
        *_model_reasons(vllm_config.model_config),
        *_parallel_reasons(vllm_config.parallel_config, vllm_config.model_config),
        *_cache_reasons(vllm_config.cache_config),
        *_engine_reasons(vllm_config, options),
        *_record_reasons(options),
    ]
    if reasons:
        raise ValueError("TokenSwift cannot run in this configuration: " + "; ".join(reasons))


def _model_reasons(model: ModelConfig) -> Iterator[str]:
    text_config = model.hf_text_config
    layer_types = getattr(text_config, "layer_types", None) or []
    sliding = model.get_sliding_window() is not None and not layer_types
    checks = {
        "a pooling model, which generates nothing": model.runner_type != "generate",
        "an encoder-decoder model": model.is_encoder_decoder,
        "a multimodal model": model.is_multimodal_model,
        "M-RoPE positions": model.uses_mrope,
        "multi-head latent attention (MLA)": model.use_mla,
        "Mamba or linear-attention layers (hybrid or attention-free)": (
            model.is_hybrid or model.is_attention_free or model.has_noops
        ),
        "a diffusion language model": model.is_diffusion,
        "sliding-window or chunked attention": sliding
        or any(kind != "full_attention" for kind in layer_types),
        "ALiBi biases": model.uses_alibi,
        "attention logits with a soft cap": bool(
            getattr(text_config, "attn_logit_softcapping", None)
        ),
        "layers that share one KV cache": bool(getattr(text_config, "num_kv_shared_layers", 0)),
    }
    found = [kind for kind, present in checks.items() if present]
    if found:
        yield f"the model has {' and '.join(found)}. {SUPPORTED_MODELS}"
    if model.enable_prompt_embeds:
        yield "prompt embeddings are enabled, and drafts are looked up in the prompt's tokens"
    foreign = [name for name in model.logits_processors or () if not _is_own_processor(name)]
    if foreign:
        yield (
            f"custom logits processors are given ({', '.join(map(str, foreign))}), and vLLM does "
            f"not apply them under speculation. Supported are those of {_OWN_PROCESSORS}"
        )


def _parallel_reasons(parallel: ParallelConfig, model: ModelConfig) -> Iterator[str]:
    only = "Supported is tensor parallelism"
    if parallel.pipeline_parallel_size > 1:
        yield f"pipeline_parallel_size is {parallel.pipeline_parallel_size}. {only}"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        yield f"context parallelism (DCP or PCP) splits the KV cache. {only}"
    if parallel.use_ubatching:
        yield "dual-batch overlap (DBO) or micro-batching is on. Supported is one batch at a time"
    if parallel.data_parallel_size > 1 and model.is_moe:
        yield (
            "data parallelism of a mixture-of-experts model makes ranks wait for each other in "
            "every pass, and draft passes differ. Supported is data parallelism of dense models"
        )


def _cache_reasons(cache: CacheConfig) -> Iterator[str]:
    if cache.cache_dtype not in _PLAIN_CACHE_DTYPES:
        yield (
            f"kv_cache_dtype is {cache.cache_dtype}. Supported are {', '.join(_PLAIN_CACHE_DTYPES)}"
        )
    if cache.kv_sharing_fast_prefill:
        yield "kv_sharing_fast_prefill is on. Supported are layers with a KV cache each"


def _engine_reasons(vllm_config: VllmConfig, options: TokenSwiftOptions) -> Iterator[str]:
    scheduler = vllm_config.scheduler_config
    if vllm_config.use_v2_model_runner:
        yield (
            "VLLM_USE_V2_MODEL_RUNNER asks for vLLM's model runner V2. Supported is V1: unset the "
            "variable"
        )
    if vllm_config.kv_transfer_config is not None or vllm_config.ec_transfer_config is not None:
        yield (
            "a KV or encoder-cache connector is configured. Supported is a KV cache of the "
            "engine's own"
        )
    graphs = vllm_config.compilation_config.cudagraph_mode
    if graphs is not None and graphs.mixed_mode().name == "FULL":
        yield (
            "cudagraph_mode is FULL, whose graphs of batches with prefills know no draft trees. "
            "Supported are FULL_AND_PIECEWISE (the default), FULL_DECODE_ONLY, PIECEWISE and NONE"
        )
    if options.num_speculative_tokens >= scheduler.max_num_batched_tokens:
        yield (
            f"num_speculative_tokens is {options.num_speculative_tokens}, and a step has only "
            f"{scheduler.max_num_batched_tokens} tokens (max_num_batched_tokens), one of which is "
            "the newest token's"
        )


def _record_reasons(options: TokenSwiftOptions) -> Iterator[str]:
    if options.record is None:
        return
    folder = Path(options.record)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield f"record is {options.record!r}, and that folder cannot be made: {error.strerror}"
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield f"record is {options.record!r}, a folder that this user may not write to"


def _is_own_processor(processor: object) -> bool:
    if isinstance(processor, str):
        return processor.split(":")[0] == _OWN_PROCESSORS
    return getattr(processor, "__module__", None) == _OWN_PROCESSORS


def leave_penalty_to_scorer(model: ModelConfig) -> None:
    """Takes our own logits processors out of ``model``: the scorer applies the penalty
    and eta-sampling at every node itself, and vLLM refuses any processor there."""
    if model.logits_processors:
        kept = [name for name in model.logits_processors if not _is_own_processor(name)]
        model.logits_processors = kept or None
