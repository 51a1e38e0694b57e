"""The list of everything that TokenSwift changes in vLLM.

A patch is the last resort, after a documented hook and a subclass: the engine itself is
reached through ``worker_cls`` and ``custom_class``. Each stays inert until TokenSwift is
asked for: it then calls the original and nothing else.
"""

from __future__ import annotations

from vllm_tokenswift import versions

from . import engine_arguments, lookahead, sampling_parameters
from .apply import Patch


def _in_all_versions(signature: str) -> dict[str, str]:
    return dict.fromkeys(versions.SUPPORTED_VLLM.values(), signature)


ASK = Patch(
    target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
    kind="replace",
    why='The list of speculative methods is closed, so {"method": "tokenswift"} is refused.',
    how="Turns the ways in into method custom_class with our proposer and worker class, and "
    'moves our options to additional_config["tokenswift"].',
    obsolete_when="Plugins can register a speculative method with options of its own.",
    signature=_in_all_versions("(self, target_model_config, target_parallel_config)"),
    build=engine_arguments.create_speculative_config,
)

FLAGS = Patch(
    target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
    kind="replace",
    why="--spec-method checks its value against the closed list, and --speculative-model "
    "does not exist.",
    how="Adds tokenswift to the choices, and the flag as another name of --spec-model.",
    obsolete_when="Plugins can register a speculative method.",
    signature=_in_all_versions("staticmethod(parser)"),
    build=engine_arguments.add_cli_args,
)

CHECK = Patch(
    target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
    kind="replace",
    why="What cannot be honoured must be refused at start, when the whole configuration is known.",
    how="Checks the finished configuration, and takes our own logits processors out of it: "
    "the tree sampler applies the penalty itself.",
    obsolete_when="A custom_class proposer can validate the configuration in the front-end.",
    signature=_in_all_versions("(self, usage_context=, headless=)"),
    build=engine_arguments.create_engine_config,
)

LOOKAHEAD = Patch(
    target="vllm.config.vllm:VllmConfig.num_lookahead_tokens",
    kind="replace",
    why="The draft pass writes KV beyond the scheduled tokens, and vLLM reserves no slot for "
    "custom_class.",
    how="Returns the slots that TokenSwift's options need.",
    obsolete_when="A custom_class proposer can state the lookahead slots that it needs.",
    signature=_in_all_versions("property(self)"),
    build=lookahead.num_lookahead_tokens,
)

SAMPLING = Patch(
    target="vllm.sampling_params:SamplingParams._validate_spec_decode",
    kind="replace",
    why="min_p and logit_bias are refused under speculation; the paper's recipe needs min_p.",
    how="Checks TokenSwift's own parameters instead: the tree sampler applies both at every node.",
    obsolete_when="vLLM applies min_p and logit_bias under speculation, or asks the proposer.",
    signature=_in_all_versions("(self, speculative_config)"),
    build=sampling_parameters.validate_spec_decode,
)

MANIFEST = (ASK, FLAGS, CHECK, LOOKAHEAD, SAMPLING)
"""All patches, applied together."""
