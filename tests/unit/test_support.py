"""What the table of compatibility says is refused is refused, and nothing else is in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CUDAGraphMode
from vllm.engine.arg_utils import EngineArgs

from vllm_tokenswift import versions
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.support import (
    REFUSED,
    REFUSED_ARGUMENTS,
    REFUSED_MODELS,
    SUPPORTED_MODELS,
    check_arguments,
    check_supported,
)

ROOT = next(p for p in Path(__file__).parents if (p / "pyproject.toml").exists())
PAGE = ROOT / "docs" / "compatibility.md"

# By row of the table: parts of vLLM's configuration as they are where it is asked for.
MODELS: dict[str, list[dict[str, Any]]] = {
    "Pooling models": [{"model_config.runner_type": "pooling"}],
    "Encoder-decoder models": [{"model_config.is_encoder_decoder": True}],
    "Multimodal models": [{"model_config.is_multimodal_model": True}],
    "M-RoPE": [{"model_config.uses_mrope": True}],
    "MLA": [{"model_config.use_mla": True}],
    "Mamba, linear-attention and hybrid models": [
        {"model_config.is_hybrid": True},
        {"model_config.is_attention_free": True},
        {"model_config.has_noops": True},
    ],
    "Diffusion models": [{"model_config.is_diffusion": True}],
    "Sliding window, chunked attention": [
        {"model_config.get_sliding_window": lambda: 64},
        {"model_config.hf_text_config.layer_types": ["full_attention", "sliding_attention"]},
        {"model_config.hf_text_config.layer_types": ["chunked_attention"]},
    ],
    "ALiBi": [{"model_config.uses_alibi": True}],
    "Soft cap of attention logits": [{"model_config.hf_text_config.attn_logit_softcapping": 50.0}],
    "KV sharing between layers": [{"model_config.hf_text_config.num_kv_shared_layers": 2}],
}
CONFIGURATIONS: dict[str, list[dict[str, Any]]] = {
    "Prompt embeds": [{"model_config.enable_prompt_embeds": True}],
    "Custom logits processors": [{"model_config.logits_processors": ["my.module:Processor"]}],
    "Pipeline parallelism": [{"parallel_config.pipeline_parallel_size": 2}],
    "Context parallelism (DCP, PCP)": [
        {"parallel_config.decode_context_parallel_size": 2},
        {"parallel_config.prefill_context_parallel_size": 2},
    ],
    "Dual-batch overlap (DBO)": [{"parallel_config.use_ubatching": True}],
    "Data parallelism of mixture-of-experts models": [
        {"parallel_config.data_parallel_size": 2, "model_config.is_moe": True}
    ],
    "Quantized KV cache": [{"cache_config.cache_dtype": "fp8"}],
    "Fast prefill of shared KV caches": [{"cache_config.kv_sharing_fast_prefill": True}],
    "Model runner V2": [{"use_v2_model_runner": True}],
    "Disaggregated prefill, KV offloading (connectors)": [
        {"kv_transfer_config": SimpleNamespace()},
        {"ec_transfer_config": SimpleNamespace()},
    ],
    "Full CUDA graphs of mixed batches": [
        {"compilation_config.cudagraph_mode": CUDAGraphMode.FULL}
    ],
    "Steps narrower than a draft tree": [{"scheduler_config.max_num_batched_tokens": 63}],
    "A folder for records that cannot be written": [{"record": "/dev/null/below"}],
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "Async scheduling": {"async_scheduling": True},
    "LoRA": {"enable_lora": True},
}


class Changed:
    """A configuration in all but the parts that ``changes`` name, by dotted paths."""

    def __init__(self, real: Any, changes: dict[str, Any]) -> None:
        self._real, self._changes = real, changes

    def __getattr__(self, name: str) -> Any:
        if name in self._changes:
            return self._changes[name]
        below = {
            path.removeprefix(name + "."): value
            for path, value in self._changes.items()
            if path.startswith(name + ".")
        }
        found = getattr(self._real, name)
        return Changed(found, below) if below else found


@pytest.fixture(scope="module")
def supported(tiny_model: Path) -> Any:
    """A configuration in which nothing is refused."""
    arguments = EngineArgs(
        model=str(tiny_model), skip_tokenizer_init=True, max_model_len=256, enforce_eager=True
    )
    return Changed(arguments.create_engine_config(), {"use_v2_model_runner": False})


def refusal(config: Any, changes: dict[str, Any]) -> str:
    """What the user is told of a configuration with these changes."""
    options = TokenSwiftOptions(record=changes.get("record"))
    with pytest.raises(ValueError, match="TokenSwift cannot run in this configuration") as told:
        check_supported(Changed(config, changes), options)
    return str(told.value)


def test_a_configuration_in_which_nothing_is_asked_for_is_not_refused(supported: Any) -> None:
    check_supported(supported, TokenSwiftOptions())


def test_every_row_of_the_table_is_asked_for_here() -> None:
    assert set(MODELS) == {kind.feature for kind in REFUSED_MODELS}
    assert set(CONFIGURATIONS) == {row.feature for row in REFUSED}
    assert set(ARGUMENTS) == {row.feature for row in REFUSED_ARGUMENTS}


@pytest.mark.parametrize("kind", REFUSED_MODELS, ids=lambda kind: kind.feature)
def test_a_kind_of_model_in_the_table_is_refused_saying_what_is_supported(
    supported: Any, kind: Any
) -> None:
    for changes in MODELS[kind.feature]:
        told = refusal(supported, changes)
        assert f"the model has {kind.words}. {SUPPORTED_MODELS}" in told


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.feature)
def test_a_configuration_in_the_table_is_refused_for_its_reason_alone(
    supported: Any, row: Any
) -> None:
    for changes in CONFIGURATIONS[row.feature]:
        told = refusal(supported, changes)
        config = SimpleNamespace(
            vllm=Changed(supported, changes),
            options=TokenSwiftOptions(record=changes.get("record")),
        )
        assert told == f"TokenSwift cannot run in this configuration: {row.reason(config)}"


@pytest.mark.parametrize("row", REFUSED_ARGUMENTS, ids=lambda row: row.feature)
def test_an_argument_in_the_table_is_refused(tiny_model: Path, row: Any) -> None:
    arguments = EngineArgs(model=str(tiny_model))
    check_arguments(arguments)
    with pytest.raises(ValueError, match="TokenSwift") as told:
        check_arguments(dataclasses.replace(arguments, **ARGUMENTS[row.feature]))
    assert "runs with" in str(told.value) or "supports" in str(told.value)


def test_several_reasons_are_told_together(supported: Any) -> None:
    told = refusal(
        supported,
        {
            "model_config.uses_mrope": True,
            "model_config.uses_alibi": True,
            "cache_config.cache_dtype": "fp8",
        },
    )
    assert "M-RoPE positions and ALiBi biases" in told
    assert "; kv_cache_dtype is fp8" in told


def test_the_page_has_the_table_and_the_supported_versions() -> None:
    text = PAGE.read_text()
    assert run_path(str(ROOT / "scripts" / "support_table.py"))["table"]() in text, (
        "run `python scripts/support_table.py`"
    )
    for version in versions.SUPPORTED_VLLM:
        assert f"\n| vLLM {version} |" in text
    assert versions.ALLOW_VARIABLE in text
