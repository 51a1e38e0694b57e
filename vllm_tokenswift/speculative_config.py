"""From a user's speculative configuration to the one that vLLM accepts.

vLLM's ``method`` is a closed list, so ``{"method": "tokenswift", ...}`` (or
``{"model": "tokenswift"}``, or the flags of either) becomes ``custom_class`` with
our proposer, our options move to ``additional_config["tokenswift"]``, and
``worker_cls`` leads to our runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_tokenswift.options import TokenSwiftOptions, option_names

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

METHOD = "tokenswift"
CONFIG_KEY = "tokenswift"
PROPOSER = "vllm_tokenswift.engine.proposer.TokenSwiftProposer"
WORKERS = {
    "cpu": "vllm_tokenswift.cpu.worker.TokenSwiftCPUWorker",
    "cuda": "vllm_tokenswift.cuda.runner.TokenSwiftGPUWorker",
}

# The flags of vLLM that stand for a key of the speculative configuration.
_FLAGS = (
    ("--spec-method", "method", "spec_method"),
    ("--spec-model", "model", "spec_model"),
    ("--spec-tokens", "num_speculative_tokens", "spec_tokens"),
)
# Put there by vLLM, in a configuration it has already been through.
_INTERNAL_KEYS = ("target_model_config", "target_parallel_config")


def is_active(speculative_config: SpeculativeConfig | None) -> bool:
    """Whether a speculative configuration is TokenSwift's.

    Args:
        speculative_config: as vLLM made it, None without speculation.
    """
    return (
        speculative_config is not None
        and speculative_config.method == "custom_class"
        and speculative_config.model == PROPOSER
    )


def is_asked_for(arguments: EngineArgs) -> bool:
    """Whether a user asks for TokenSwift, in any of the ways in.

    Args:
        arguments: of an engine; of vLLM versions too that are not supported.
    """
    config = getattr(arguments, "speculative_config", None) or {}
    names = [config.get("method"), config.get("model")]
    # Asked of vLLM versions too whose arguments we do not know.
    names += [getattr(arguments, attribute, None) for _, _, attribute in _FLAGS]
    return METHOD in names or PROPOSER in names


def read_options(arguments: EngineArgs) -> TokenSwiftOptions:
    """TokenSwift's options, from the speculative configuration, its flags and
    ``additional_config["tokenswift"]`` together.

    Args:
        arguments: of an engine that TokenSwift is asked for in.

    Returns:
        All options.

    Raises:
        ValueError: where they contradict each other or are not allowed.
    """
    given = _speculative_options(arguments)
    _refuse_foreign_keys(given)
    beside = _additional_options(arguments)
    for name, value in beside.items():
        if name in given and given[name] != value:
            raise ValueError(
                f"{name} is {given[name]!r} in the speculative configuration and {value!r} in "
                f'additional_config["{CONFIG_KEY}"]: give it once'
            )
    return TokenSwiftOptions.from_dict({**beside, **given})


def _speculative_options(arguments: EngineArgs) -> dict[str, Any]:
    given = {
        # vLLM reads --speculative-config in this way too.
        key.replace("-", "_"): value
        for key, value in (arguments.speculative_config or {}).items()
        if key not in _INTERNAL_KEYS
    }
    for flag, key, attribute in _FLAGS:
        value = getattr(arguments, attribute)
        if value is None:
            continue
        if given.get(key, value) != value:
            raise ValueError(f"{flag} is {value!r}, but {key} is {given[key]!r}: give it once")
        given[key] = value
    method, model = given.pop("method", METHOD), given.pop("model", METHOD)
    if (method, model) not in ((METHOD, METHOD), ("custom_class", PROPOSER)):
        raise ValueError(
            f"speculative method {method!r} and model {model!r} do not go together: TokenSwift "
            f'is asked for by method "{METHOD}" or by model "{METHOD}". It drafts with the '
            'target model itself; a checkpoint of draft heads is given as "heads"'
        )
    return given


def _refuse_foreign_keys(given: Mapping[str, Any]) -> None:
    from vllm.config import SpeculativeConfig

    for name in given:
        if name not in option_names() and name in SpeculativeConfig.__dataclass_fields__:
            raise ValueError(
                f'"{name}" belongs to other speculative methods of vLLM and has no meaning for '
                f"TokenSwift. Its options: {', '.join(option_names())}"
            )


def _additional_options(arguments: EngineArgs) -> Mapping[str, Any]:
    config = arguments.additional_config
    if not isinstance(config, dict):
        raise ValueError(
            f"additional_config is a {type(config).__name__}: TokenSwift keeps its options there "
            "and needs a dictionary"
        )
    options = config.get(CONFIG_KEY, {})
    if not isinstance(options, Mapping):
        raise ValueError(
            f'additional_config["{CONFIG_KEY}"] is {options!r}: it must be a dictionary of '
            "TokenSwift's options"
        )
    return options


def choose_worker(parallel_config: ParallelConfig, device_type: str) -> str:
    """The worker class that leads to our runner.

    Args:
        parallel_config: of the engine.
        device_type: of the platform, such as "cpu" or "cuda".

    Returns:
        Its dotted name.

    Raises:
        ValueError: on other devices, and where the user names a worker of his own.
    """
    worker = WORKERS.get(device_type)
    if worker is None:
        raise ValueError(
            f"TokenSwift runs on {' and '.join(WORKERS)}; this vLLM runs on {device_type}"
        )
    if parallel_config.worker_cls not in ("auto", worker):
        raise ValueError(
            f"worker_cls is {parallel_config.worker_cls!r}: TokenSwift works through a worker of "
            'its own, so worker_cls must be left at "auto"'
        )
    return worker
