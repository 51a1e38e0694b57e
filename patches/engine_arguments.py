"""Replacements in ``vllm/engine/arg_utils.py``: the ways in, and the check at start."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_tokenswift.speculative_config import (
    CONFIG_KEY,
    METHOD,
    PROPOSER,
    choose_worker,
    is_active,
    is_asked_for,
    read_options,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def create_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Turns TokenSwift's ways in into the form that vLLM accepts.

    Args:
        original: ``EngineArgs.create_speculative_config``.

    Returns:
        What takes its place.
    """

    @functools.wraps(original)
    def replacement(
        self: EngineArgs,
        target_model_config: ModelConfig,
        target_parallel_config: ParallelConfig,
    ) -> SpeculativeConfig | None:
        if not is_asked_for(self):
            result: SpeculativeConfig | None = original(
                self, target_model_config, target_parallel_config
            )
            return result
        from vllm.config import SpeculativeConfig
        from vllm.platforms import current_platform

        from vllm_tokenswift.support import check_arguments

        options = read_options(self)
        check_arguments(self)
        target_parallel_config.worker_cls = choose_worker(
            target_parallel_config, current_platform.device_name
        )
        # A new dictionary: the user's may be shared with other engines.
        self.additional_config = {
            **self.additional_config,
            CONFIG_KEY: options.to_dict(),
        }
        return SpeculativeConfig(
            method="custom_class",
            model=PROPOSER,
            num_speculative_tokens=options.num_speculative_tokens,
            target_model_config=target_model_config,
            target_parallel_config=target_parallel_config,
        )

    return replacement


def create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the finished configuration of an engine that TokenSwift is asked for in.

    Args:
        original: ``EngineArgs.create_engine_config``.

    Returns:
        What takes its place.
    """

    @functools.wraps(original)
    def replacement(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        config: VllmConfig = original(self, *args, **kwargs)
        if is_active(config.speculative_config):
            from vllm_tokenswift.options import TokenSwiftOptions
            from vllm_tokenswift.support import check_supported, leave_penalty_to_sampler

            additional: Any = config.additional_config
            check_supported(config, TokenSwiftOptions.from_dict(additional[CONFIG_KEY]))
            leave_penalty_to_sampler(config.model_config)
        return config

    return replacement


def add_cli_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Adds TokenSwift to the flags that choose a speculative method.

    Args:
        original: ``EngineArgs.add_cli_args``.

    Returns:
        What takes its place.
    """

    @functools.wraps(original)
    def replacement(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        # argparse has no public way to reach an argument that somebody else has added.
        actions = parser._option_string_actions
        method = actions["--spec-method"]
        method.choices = [*(method.choices or ()), METHOD]
        model = actions["--spec-model"]
        model.container.add_argument(  # type: ignore[attr-defined]
            "--speculative-model",
            dest=model.dest,
            default=argparse.SUPPRESS,
            help=f'Another name of --spec-model; "{METHOD}" asks for TokenSwift.',
        )
        return parser

    return replacement
