"""Engines plan with these costs, whatever else the machine does; none of them measures its own.

A plugin of vLLM's (``plugin/`` holds its entry point), so that engines in processes of their own
plan with them as well: they find it on ``PYTHONPATH`` (see conftest.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm_tokenswift.draft.planner.cost_model import CostModel

# The demo model in float32 on two cores, rounded.
COST = CostModel(
    ((1, 30.0), (5, 31.0), (9, 37.0), (17, 45.0), (33, 66.0), (64, 110.0)),
    context_points=((1, 0.004), (64, 0.02)),
    chain_ms=1.0,
    draft_points=((32, 30.0), (4096, 46.0)),
    heads_ms=1.0,
)


def pin() -> None:
    """To be called before an engine starts; as often as you like."""
    from vllm_tokenswift.engine.profiling.pass_times import PassTimes

    PassTimes.measure = measure
    PassTimes.plain_ms = plain_ms


def measure(passes: Any, *_: Any) -> CostModel:
    return COST if passes.heads is not None else replace(COST, heads_ms=0.0)


def plain_ms(*_: Any) -> float:
    return COST.verify_ms(1)
