"""Two ranks plan, draft and accept alike, heads included: real workers of vLLM's, over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_kit import engine, generate, prompt_of, tokenswift
from vllm import SamplingParams

from vllm_tokenswift.draft.planner.cost_model import CostModel

# Measured costs would decide how often heads are asked, and change with what else is running.
COST = CostModel(verify_points=((1, 10.0), (64, 11.0)), heads_ms=0.1)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, min_p=0.05, max_tokens=60, ignore_eos=True),
]


class CostsOfAWorker:
    """For vLLM's ``worker_extension_cls``: called on all ranks before they write."""

    model_runner: Any

    def plan_with(self, cost: str) -> None:
        self.model_runner.tree_drafter.planner.cost = CostModel.from_json(cost)


def written_by(model: Path, heads: Path, **arguments: Any) -> dict[str, Any]:
    """What an engine writes, alone and beside each other, and the counters of every rank."""
    options = tokenswift(plan="auto", heads=str(heads), head_source="free")
    prompts = [prompt_of(20, 0), prompt_of(45, 1)]
    extension = f"{__name__}.{CostsOfAWorker.__name__}"
    with engine(model, **options, worker_extension_cls=extension, **arguments) as llm:
        llm.collective_rpc("plan_with", args=(COST.to_json(),))
        texts = [generate(llm, [p], s)[0] for p, s in zip(prompts, PARAMS, strict=True)]
        texts += generate(llm, prompts, PARAMS)
        return {"texts": texts, "stats": llm.collective_rpc("tokenswift_stats")}


def test_two_ranks_write_what_one_writes_and_count_alike(
    tiny_model: Path, sequential_heads: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = written_by(tiny_model, sequential_heads)
    # A core may be all there is for both.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    two = written_by(tiny_model, sequential_heads, **ranks)
    assert two["texts"] == one["texts"]
    first, second = two["stats"]
    assert first == second
    assert first["drafted_by_source"]["free_heads"] > 50
