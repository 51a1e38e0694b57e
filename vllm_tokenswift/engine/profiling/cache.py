"""Keeps measured cost curves, so that an engine that starts again need not measure.

One JSON file for each model shape, machine and configuration, in ``cost_folder()``:
``{"key": what it was measured for, "cost": the CostModel}``. A file is used however old it is:
the key holds everything known to change the times, this package's source included. What it
cannot hold is what else the machine was doing. So a plain pass is timed at every start: where it
takes much less time than the curve says, the curve is one of a busy machine, and is measured
again; where it takes more, the machine is busy now, and the curve stays. A file that is broken,
or written for another key, is replaced.

Rank 0 alone reads and writes; all ranks get what it read, or measure together.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger

import vllm_tokenswift
from vllm_tokenswift.common.cache_folder import cache_home
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.engine.profiling.pass_times import Contexts, PassTimes, Shape
from vllm_tokenswift.heads.files import write_text_whole
from vllm_tokenswift.heads.model import DraftHeads

Key = Mapping[str, Any]
"""What a curve was measured for, in plain JSON values."""

_CPU_INFO = Path("/proc/cpuinfo")
# Than a plain pass is now: a kept curve that was measured on a busy machine.
_TIMES_SLOWER = 1.4

logger = init_logger(__name__)


def measured_once(
    key: Key, measure: Callable[[], CostModel], plain_ms: Callable[[], float]
) -> CostModel:
    """The cost model kept for ``key``; else what rank 0 measured and keeps now.

    A folder that cannot be read or written costs a warning and the measurement.

    Args:
        key: what the costs hold for, see :func:`cost_key`.
        measure: called on all ranks together, which then plan with rank 0's result: decisions taken
            from each rank's own clock would differ between ranks and hang them.
        plain_ms: called so, too: milliseconds of a plain pass now.
    """
    is_first = get_tp_group().rank_in_group == 0
    cost = _from_rank_0(read_cost(key) if is_first else None)
    if cost is not None:
        now_ms, kept_ms = plain_ms(), cost.verify_ms(1)
        was_busy = now_ms * _TIMES_SLOWER < kept_ms
        if was_busy and is_first:
            logger.info(
                "A plain pass takes %.2f ms, and by the costs kept in %s %.2f ms: they were "
                "measured on a busy machine, and are measured again",
                *(now_ms, cost_path(key), kept_ms),
            )
        cost = _from_rank_0(None if was_busy else cost)
    if cost is None:
        cost = _from_rank_0(measure())
        assert cost is not None
        if is_first:
            write_cost(key, cost)
    return cost


def _from_rank_0(cost: CostModel | None) -> CostModel | None:
    group = get_tp_group()
    if group.world_size == 1:
        return cost
    text = group.broadcast_object(None if cost is None else cost.to_json(), src=0)
    return None if text is None else CostModel.from_json(text)


def cost_key(
    vllm_config: VllmConfig,
    curve: PassTimes,
    heads: DraftHeads | None,
    shapes: Sequence[Shape],
    contexts: Contexts,
) -> Key:
    """Everything known to change what passes cost.

    Args:
        vllm_config: the engine's.
        curve: measures the costs.
        heads: the draft heads, where there are any.
        shapes: the verify passes that are timed.
        contexts: tokens at which passes are timed; they depend on the model's greatest length and
            the size of the cache.
    """
    model, compilation = vllm_config.model_config, vllm_config.compilation_config
    architecture = model.hf_text_config.to_dict()
    architecture.pop("_name_or_path", None)  # a copy of a model costs what the model costs
    key = {
        "versions": {
            "vllm": _vllm_version(),
            "torch": torch.__version__,
            "vllm_tokenswift": vllm_tokenswift.__version__,
            "source": source_digest(),
        },
        "device": device_name(curve.device),
        "num_threads": torch.get_num_threads() if curve.device.type == "cpu" else None,
        "model": architecture,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "heads": None
        if heads is None
        else {name: list(weight.shape) for name, weight in heads.state_dict().items()},
        "tensor_parallel_size": vllm_config.parallel_config.tensor_parallel_size,
        "cache_dtype": vllm_config.cache_config.cache_dtype,
        "attention": type(curve.attention).__name__,
        "block_size": curve.attention.block_size,
        "max_side_chains": curve.attention.max_side_chains,
        "shapes": [[shape.query_lens, shape.num_rows] for shape in shapes],
        "contexts": [contexts.short, contexts.long, contexts.far],
        "compilation_mode": compilation.mode.name,
        "cudagraph_mode": compilation.cudagraph_mode.name,
    }
    plain: Key = json.loads(json.dumps(key, default=str))
    return plain


def cost_folder() -> Path:
    """Where costs are kept."""
    return cache_home() / "costs"


def cost_path(key: Key) -> Path:
    """The file of a key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cost_folder() / f"{digest[:32]}.json"


def read_cost(key: Key) -> CostModel | None:
    """None where nothing usable is kept for ``key``; a file that is unusable is warned of."""
    path = cost_path(key)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(kept, dict) or kept.get("key") != key:
            raise ValueError("it was written for something else")
        return CostModel.from_json(json.dumps(kept.get("cost")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("the costs kept in %s are not used, but measured: %s", path, error)
        return None


def write_cost(key: Key, cost: CostModel) -> None:
    """Keeps ``cost`` whole or not at all, whoever else is writing."""
    path = cost_path(key)
    text = json.dumps({"key": key, "cost": json.loads(cost.to_json())}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_whole(path, text + "\n")
    except OSError as error:
        logger.warning("the measured costs cannot be kept in %s: %s", path, error)


def source_digest() -> str:
    """Of this package's Python files: a changed kernel or measurement is another machine."""
    root = Path(vllm_tokenswift.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def device_name(device: torch.device) -> str:
    """The GPU's or the CPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if _CPU_INFO.exists():
        for line in _CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _vllm_version() -> str:
    from vllm import __version__

    return str(__version__)
