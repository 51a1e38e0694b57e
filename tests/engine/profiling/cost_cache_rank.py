"""One tensor-parallel rank of two: ``RANK PORT KEY OUT`` (see test_cache.py).

Each rank is given a home and measures costs of its own, others every time. It asks three times,
as an engine that starts three times; what it would plan with goes to OUT, a line each time. The
second time rank 1 alone finds a plain pass faster than its cost says, the third time rank 0.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from vllm_tokenswift.draft.planner.cost_model import CostModel


def agree(rank: int, port: str, key: dict[str, Any]) -> list[CostModel]:
    os.environ["VLLM_DIST_IDENT"] = port  # as vLLM's executor sets it
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
    )

    from vllm_tokenswift.engine.profiling.cache import measured_once

    def measure(ms: float) -> CostModel:
        return CostModel(((1, ms + rank),))

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(
            2, rank, f"tcp://127.0.0.1:{port}", local_rank=rank, backend="gloo"
        )
        initialize_model_parallel(2)
        starts = ((10.0, None), (20.0, 1), (30.0, 0))
        return [
            measured_once(
                key, partial(measure, ms), lambda is_fast=rank == fast: 1.0 if is_fast else 9.0
            )
            for ms, fast in starts
        ]


if __name__ == "__main__":
    rank, port, key, out = sys.argv[1:]
    costs = agree(int(rank), port, json.loads(key))
    Path(out).write_text("\n".join(cost.to_json() for cost in costs))
