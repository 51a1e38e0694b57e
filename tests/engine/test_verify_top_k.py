"""Of which rows drafting hears what the target found likeliest, on a CPU."""

from __future__ import annotations

from typing import Any

from engine_kit import engine, generate, prompt_of, runner_of, tokenswift
from vllm import SamplingParams

from vllm_tokenswift.draft.planner.cost_model import CostModel

CHEAP_ROWS = CostModel(verify_points=((1, 1.0), (64, 1.01)))


def groups_scored(tiny_model: Any, num_requests: int) -> list[tuple[int, int, bool]]:
    """Of each row group: requests of its step, drafts, and whether it is heard of."""
    params = [
        SamplingParams(temperature=0.3, seed=seed, max_tokens=120, ignore_eos=True)
        for seed in range(num_requests)
    ]
    seen = []
    with engine(tiny_model, **tokenswift(plan="auto")) as llm:
        runner = runner_of(llm)
        runner.tree_drafter.planner.cost = CHEAP_ROWS
        score = runner.tree_sampler.sample_trees

        def recorded(logits: Any, groups: Any, *args: Any) -> Any:
            seen.extend((len(groups), len(group.tree), group.wants_top_k) for group in groups)
            return score(logits, groups, *args)

        runner.tree_sampler.sample_trees = recorded
        generate(llm, [prompt_of(20, seed) for seed in range(num_requests)], params)
    return seen


def test_a_request_alone_is_heard_of_without_drafts_too(tiny_model):
    seen = groups_scored(tiny_model, 1)
    assert {(drafts > 0, hears) for _, drafts, hears in seen} >= {(False, True), (True, True)}


def test_in_a_batch_rows_without_drafts_are_not_heard_of(tiny_model):
    seen = [group for group in groups_scored(tiny_model, 3) if group[0] > 1]
    assert {(drafts > 0, hears) for _, drafts, hears in seen} == {(False, False), (True, True)}
