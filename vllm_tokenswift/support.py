"""What TokenSwift cannot honour is refused when the engine starts, in words.

The same checks run on every way in, after vLLM has resolved its configuration and
before a model is loaded. What is refused stands in tables, from which the documentation's
table of compatibility is made (``scripts/support_table.py``).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from vllm_tokenswift.options import TokenSwiftOptions

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

SUPPORTED_MODELS = (
    "Supported are decoder-only text models whose layers all use full attention, such as "
    "Llama, Qwen2, Qwen3, and Mistral without a sliding window"
)
# A cache that is stored as it is computed; others quantise what the draft pass reads.
_PLAIN_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")
# Processors of ours, which work on plain decoding; the tree sampler does their part here.
_OWN_PROCESSORS = "vllm_tokenswift.sampling.processors"
_PARALLELISM = "Supported is tensor parallelism"

Asked = TypeVar("Asked")


class Configuration(NamedTuple):
    """What an engine is about to start with."""

    vllm: VllmConfig
    options: TokenSwiftOptions


@dataclass(frozen=True)
class Refusal(Generic[Asked]):
    """A feature of vLLM that TokenSwift refuses.

    feature: in vLLM's words. asked_by: what asks for it, as Markdown. instead: what is
    supported in its place. reason: what the user is told, None where it is not asked for.
    """

    feature: str
    asked_by: str
    instead: str
    reason: Callable[[Asked], str | None]


@dataclass(frozen=True)
class ModelKind:
    """A kind of model that TokenSwift refuses.

    feature: in vLLM's words. words: what the user is told that the model has. is_kind: whether
    a model is of the kind.
    """

    feature: str
    words: str
    is_kind: Callable[[ModelConfig], bool]


def check_arguments(arguments: EngineArgs) -> None:
    """Refuses what vLLM would refuse itself before the configuration is finished, with
    sentences about methods that the user did not choose.

    Args:
        arguments: as the user gave them.

    Raises:
        ValueError: with the sentence of the first of :data:`REFUSED_ARGUMENTS` that is asked for.
    """
    for refusal in REFUSED_ARGUMENTS:
        if reason := refusal.reason(arguments):
            raise ValueError(reason)


def check_supported(vllm_config: VllmConfig, options: TokenSwiftOptions) -> None:
    """Refuses a finished configuration in which something is not supported.

    Args:
        vllm_config: as vLLM resolved it.
        options: TokenSwift's own.

    Raises:
        ValueError: with one sentence for everything that is not supported.
    """
    configuration = Configuration(vllm_config, options)
    reasons = list(_model_kind_reasons(vllm_config.model_config))
    reasons += [found for r in REFUSED if (found := r.reason(configuration))]
    if reasons:
        raise ValueError("TokenSwift cannot run in this configuration: " + "; ".join(reasons))


def _model_kind_reasons(model: ModelConfig) -> Iterator[str]:
    found = [kind.words for kind in REFUSED_MODELS if kind.is_kind(model)]
    if found:
        yield f"the model has {' and '.join(found)}. {SUPPORTED_MODELS}"


def _layer_types(model: ModelConfig) -> list[str]:
    return getattr(model.hf_text_config, "layer_types", None) or []


def _is_windowed(model: ModelConfig) -> bool:
    kinds = _layer_types(model)
    if kinds:
        return any(kind != "full_attention" for kind in kinds)
    return model.get_sliding_window() is not None


def _has(model: ModelConfig, name: str) -> bool:
    """Whether a field of the model's own configuration is there and not zero."""
    return bool(getattr(model.hf_text_config, name, None))


def _prompt_embeddings(asked: Configuration) -> str | None:
    if not asked.vllm.model_config.enable_prompt_embeds:
        return None
    return "prompt embeddings are enabled, and drafts are looked up in the prompt's tokens"


def _foreign_processors(asked: Configuration) -> str | None:
    given = asked.vllm.model_config.logits_processors or ()
    foreign = [name for name in given if not _is_own_processor(name)]
    if not foreign:
        return None
    return (
        f"custom logits processors are given ({', '.join(map(str, foreign))}), and vLLM does "
        f"not apply them under speculation. Supported are those of {_OWN_PROCESSORS}"
    )


def _pipeline_parallelism(asked: Configuration) -> str | None:
    size = asked.vllm.parallel_config.pipeline_parallel_size
    return f"pipeline_parallel_size is {size}. {_PARALLELISM}" if size > 1 else None


def _context_parallelism(asked: Configuration) -> str | None:
    parallel = asked.vllm.parallel_config
    if parallel.decode_context_parallel_size <= 1 and parallel.prefill_context_parallel_size <= 1:
        return None
    return f"context parallelism (DCP or PCP) splits the KV cache. {_PARALLELISM}"


def _dual_batch_overlap(asked: Configuration) -> str | None:
    if not asked.vllm.parallel_config.use_ubatching:
        return None
    return "dual-batch overlap (DBO) or micro-batching is on. Supported is one batch at a time"


def _data_parallel_experts(asked: Configuration) -> str | None:
    config = asked.vllm
    if config.parallel_config.data_parallel_size <= 1 or not config.model_config.is_moe:
        return None
    return (
        "data parallelism of a mixture-of-experts model makes ranks wait for each other in "
        "every pass, and draft passes differ. Supported is data parallelism of dense models"
    )


def _quantised_cache(asked: Configuration) -> str | None:
    dtype = asked.vllm.cache_config.cache_dtype
    if dtype in _PLAIN_CACHE_DTYPES:
        return None
    return f"kv_cache_dtype is {dtype}. Supported are {', '.join(_PLAIN_CACHE_DTYPES)}"


def _shared_cache_prefill(asked: Configuration) -> str | None:
    if not asked.vllm.cache_config.kv_sharing_fast_prefill:
        return None
    return "kv_sharing_fast_prefill is on. Supported are layers with a KV cache each"


def _model_runner_v2(asked: Configuration) -> str | None:
    if not asked.vllm.use_v2_model_runner:
        return None
    return (
        "VLLM_USE_V2_MODEL_RUNNER asks for vLLM's model runner V2. Supported is V1: unset the "
        "variable"
    )


def _connector(asked: Configuration) -> str | None:
    if asked.vllm.kv_transfer_config is None and asked.vllm.ec_transfer_config is None:
        return None
    return (
        "a KV or encoder-cache connector is configured. Supported is a KV cache of the engine's own"
    )


def _full_graphs(asked: Configuration) -> str | None:
    graphs = asked.vllm.compilation_config.cudagraph_mode
    if graphs is None or graphs.mixed_mode().name != "FULL":
        return None
    return (
        "cudagraph_mode is FULL, whose graphs of batches with prefills know no draft trees. "
        "Supported are FULL_AND_PIECEWISE (the default), FULL_DECODE_ONLY, PIECEWISE and NONE"
    )


def _narrow_step(asked: Configuration) -> str | None:
    nodes = asked.options.num_speculative_tokens
    most = asked.vllm.scheduler_config.max_num_batched_tokens
    if nodes < most:
        return None
    return (
        f"num_speculative_tokens is {nodes}, and a step has only "
        f"{most} tokens (max_num_batched_tokens), one of which is "
        "the newest token's"
    )


def _unusable_record_folder(asked: Configuration) -> str | None:
    record = asked.options.record
    if record is None:
        return None
    folder = Path(record)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"record is {record!r}, and that folder cannot be made: {error.strerror}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"record is {record!r}, a folder that this user may not write to"
    return None


def _async_scheduling(asked: EngineArgs) -> str | None:
    if not asked.async_scheduling:
        return None
    return (
        "async_scheduling is on: TokenSwift drafts from what the last step accepted, so it "
        "runs with --no-async-scheduling, which is its default"
    )


def _lora(asked: EngineArgs) -> str | None:
    if not asked.enable_lora:
        return None
    return (
        "LoRA is enabled: TokenSwift supports models without adapters; merge the adapter "
        "into the model, or serve without TokenSwift"
    )


REFUSED_MODELS = (
    ModelKind(
        "Pooling models",
        "a pooling model, which generates nothing",
        lambda model: model.runner_type != "generate",
    ),
    ModelKind(
        "Encoder-decoder models",
        "an encoder-decoder model",
        lambda model: model.is_encoder_decoder,
    ),
    ModelKind(
        "Multimodal models",
        "a multimodal model",
        lambda model: model.is_multimodal_model,
    ),
    ModelKind("M-RoPE", "M-RoPE positions", lambda model: model.uses_mrope),
    ModelKind("MLA", "multi-head latent attention (MLA)", lambda model: model.use_mla),
    ModelKind(
        "Mamba, linear-attention and hybrid models",
        "Mamba or linear-attention layers (hybrid or attention-free)",
        lambda model: bool(model.is_hybrid or model.is_attention_free or model.has_noops),
    ),
    ModelKind("Diffusion models", "a diffusion language model", lambda model: model.is_diffusion),
    ModelKind(
        "Sliding window, chunked attention", "sliding-window or chunked attention", _is_windowed
    ),
    ModelKind("ALiBi", "ALiBi biases", lambda model: model.uses_alibi),
    ModelKind(
        "Soft cap of attention logits",
        "attention logits with a soft cap",
        lambda model: _has(model, "attn_logit_softcapping"),
    ),
    ModelKind(
        "KV sharing between layers",
        "layers that share one KV cache",
        lambda model: _has(model, "num_kv_shared_layers"),
    ),
)
"""Kinds of model; supported in their place: :data:`SUPPORTED_MODELS`."""

REFUSED_ARGUMENTS: tuple[Refusal[EngineArgs], ...] = (
    Refusal(
        "Async scheduling",
        "`--async-scheduling`",
        "`--no-async-scheduling`, which TokenSwift makes the default",
        _async_scheduling,
    ),
    Refusal("LoRA", "`--enable-lora`", "an adapter merged into the model", _lora),
)
"""What the arguments say themselves."""

REFUSED: tuple[Refusal[Configuration], ...] = (
    Refusal("Prompt embeds", "`--enable-prompt-embeds`", "prompts of tokens", _prompt_embeddings),
    Refusal(
        "Custom logits processors",
        "`--logits-processors`",
        "those of `vllm_tokenswift.sampling.processors`",
        _foreign_processors,
    ),
    Refusal(
        "Pipeline parallelism",
        "`--pipeline-parallel-size` above 1",
        "tensor parallelism",
        _pipeline_parallelism,
    ),
    Refusal(
        "Context parallelism (DCP, PCP)",
        "`--decode-context-parallel-size` or `--prefill-context-parallel-size` above 1",
        "tensor parallelism",
        _context_parallelism,
    ),
    Refusal(
        "Dual-batch overlap (DBO)", "`--enable-dbo`", "one batch at a time", _dual_batch_overlap
    ),
    Refusal(
        "Data parallelism of mixture-of-experts models",
        "`--data-parallel-size` above 1 and such a model",
        "data parallelism of dense models",
        _data_parallel_experts,
    ),
    Refusal(
        "Quantized KV cache",
        "`--kv-cache-dtype`",
        ", ".join(f"`{dtype}`" for dtype in _PLAIN_CACHE_DTYPES),
        _quantised_cache,
    ),
    Refusal(
        "Fast prefill of shared KV caches",
        "`--kv-sharing-fast-prefill`",
        "layers with a KV cache each",
        _shared_cache_prefill,
    ),
    Refusal(
        "Model runner V2",
        "`VLLM_USE_V2_MODEL_RUNNER=1`",
        "V1, which TokenSwift makes the default",
        _model_runner_v2,
    ),
    Refusal(
        "Disaggregated prefill, KV offloading (connectors)",
        "`--kv-transfer-config`, `--ec-transfer-config`",
        "the engine's own KV cache",
        _connector,
    ),
    Refusal(
        "Full CUDA graphs of mixed batches",
        "`cudagraph_mode` FULL",
        "FULL_AND_PIECEWISE (vLLM's default), FULL_DECODE_ONLY, PIECEWISE, NONE",
        _full_graphs,
    ),
    Refusal(
        "Steps narrower than a draft tree",
        "`--max-num-batched-tokens` of at most `num_speculative_tokens`",
        "a larger step, or fewer nodes",
        _narrow_step,
    ),
    Refusal(
        "A folder for records that cannot be written",
        "TokenSwift's option `record`",
        "a folder of the user's",
        _unusable_record_folder,
    ),
)
"""What the finished configuration says."""


def _is_own_processor(processor: object) -> bool:
    if isinstance(processor, str):
        return processor.split(":")[0] == _OWN_PROCESSORS
    return getattr(processor, "__module__", None) == _OWN_PROCESSORS


def leave_penalty_to_sampler(model: ModelConfig) -> None:
    """Takes our own logits processors out of a model's configuration.

    The tree sampler applies the penalty and eta-sampling at every node itself, and vLLM refuses any
    processor under speculation.

    Args:
        model: its ``logits_processors`` are changed.
    """
    if model.logits_processors:
        kept = [name for name in model.logits_processors if not _is_own_processor(name)]
        model.logits_processors = kept or None
