"""With the plugin installed and TokenSwift not asked for, vLLM is as without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Prints what vLLM makes of several arguments, and the defaults of the command line: a line of
# JSON, and where the plugin is there, another one after it was registered again, twice.
PROGRAM = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

model, plugins = sys.argv[1:]
ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}

def outcome():
    result = {}
    for name, arguments in {
        "plain": {},
        "ngram": {"speculative_config": ngram},
        "ngram by flags": {"spec_method": "ngram", "spec_tokens": 2},
        "unknown": {"speculative_config": {"method": "nonsense", "num_speculative_tokens": 2}},
        "unknown key": {"speculative_config": {**ngram, "ngram_k": 3}},
        "no number": {"speculative_config": {"method": "ngram", "model": "x"}},
        "async": {"speculative_config": ngram, "async_scheduling": True},
        "additional": {"additional_config": {"mine": 1}},
    }.items():
        try:
            config = EngineArgs(model=model, skip_tokenizer_init=True, max_model_len=256,
                                **arguments).create_engine_config()
        except Exception as error:
            result[name] = [type(error).__name__, str(error)]
            continue
        result[name] = [str(config), config.num_lookahead_tokens, config.compute_hash(),
                        config.parallel_config.worker_cls, config.additional_config]
        try:
            params = SamplingParams(min_p=0.1)
            params.verify(config.model_config, config.speculative_config, None, None)
            result[name].append("min_p accepted")
        except Exception as error:
            result[name].append(str(error))
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    defaults = vars(parser.parse_args([]))
    result["defaults"] = {key: str(value) for key, value in sorted(defaults.items())}
    print("RESULT" + json.dumps(result))

outcome()
if plugins:
    from vllm_tokenswift.plugin import register
    register(); register()
    outcome()
"""


def outcomes(model: Path, plugins: str) -> list[dict[str, Any]]:
    environment = {**os.environ, "VLLM_PLUGINS": plugins, "VLLM_LOGGING_LEVEL": "ERROR"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(model), plugins],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT")]
    return [json.loads(line.removeprefix("RESULT")) for line in lines]


@pytest.fixture(scope="module")
def without(tiny_model: Path) -> dict[str, Any]:
    [outcome] = outcomes(tiny_model, plugins="")
    return outcome


@pytest.mark.slow
def test_configurations_errors_and_defaults_are_the_same_also_after_registering_again(
    tiny_model: Path, without: dict[str, Any]
) -> None:
    found = outcomes(tiny_model, plugins="tokenswift")
    assert len(found) == 2
    for installed in found:
        assert installed.keys() == without.keys()
        for name, expected in without.items():
            assert installed[name] == expected, name


@pytest.mark.slow
def test_the_comparison_covers_what_vllm_accepts_and_what_it_refuses(
    without: dict[str, Any],
) -> None:
    assert "custom_class" not in json.dumps(without["ngram"])
    assert without["unknown"][0] == "ValidationError"
    assert without["plain"][-1] == "min_p accepted"
    assert "not yet supported" in without["ngram"][-1]


def test_the_package_is_imported_without_vllm_or_torch() -> None:
    program = (
        "import sys, vllm_tokenswift, vllm_tokenswift.plugin, vllm_tokenswift.options\n"
        "assert not {'vllm', 'torch', 'transformers'} & set(sys.modules), sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
