"""A step's life: each hook's part once, and in vLLM's order."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from vllm_tokenswift.engine.step import LaunchedPass, Stage, Step
from vllm_tokenswift.engine.step_trees import NO_TREES, RequestTree, StepTrees
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

TREES = StepTrees((RequestTree("a", 0, 0, 0, 7, DraftTree.chain([5, 6])),))
PASS = LaunchedPass(TREES, "inputs", "metadata", "output", {"a": frozenset({2})})

# What each hook does, in the order in which vLLM calls them.
HOOKS: dict[str, Callable[[Step], object]] = {
    "lay_out": lambda step: step.lay_out(TREES),
    "launch": lambda step: step.launch(),
    "verify": lambda step: step.verify(),
    "draft": lambda step: step.draft([[1]]),
    "hand_out": lambda step: step.hand_out(),
}


def brought_to(stage: Stage) -> Step:
    step = Step()
    for act in list(HOOKS.values())[: int(stage)]:
        act(step)
    assert step.stage is stage
    return step


@pytest.mark.parametrize("stage", Stage)
@pytest.mark.parametrize("hook", HOOKS)
def test_at_every_stage_one_hook_s_part_is_possible(stage: Stage, hook: str) -> None:
    step, next_stage = brought_to(stage), list(HOOKS).index(hook) + 1
    if next_stage == stage + 1:
        HOOKS[hook](step)
        assert step.stage == next_stage
    else:
        with pytest.raises(AssertionError, match=f"that is {stage.name} cannot"):
            HOOKS[hook](step)
        assert step.stage is stage


def test_a_pass_launched_ahead_lays_its_step_out_and_is_handed_over_once() -> None:
    step = Step(frozenset({"b"}))
    step.take_over(PASS)
    assert (step.stage, step.prelaunched) == (Stage.LAID_OUT, PASS)
    assert (step.trees, step.dead_nodes, step.placeholders) == (TREES, PASS.dead_nodes, {"b"})
    assert step.launch() is PASS
    assert step.prelaunched is None
    with pytest.raises(AssertionError, match="LAUNCHED cannot be LAUNCHED"):
        step.launch()


def test_a_step_with_a_pass_of_its_own_is_handed_none() -> None:
    step = brought_to(Stage.LAID_OUT)
    assert step.launch() is None


def test_a_step_that_is_over_keeps_no_states() -> None:
    step = brought_to(Stage.VERIFIED)
    step.hidden_states = torch.zeros(1, 1)
    step.draft([[3], []])
    assert step.hand_out() == [[3], []]
    assert step.hidden_states is None
    assert Step.over().stage is step.stage


def test_the_trees_of_a_step_of_decodes_lie_one_after_another() -> None:
    tree = DraftTree.build([4, 5, 6], [0, 0, 1])
    num_rows = np.array([4, 1, 3], np.int32)
    computed = np.array([10, 20, 30], np.int32)
    chain = DraftTree.chain([1, 2])
    found = StepTrees.of_decodes(["a", "b", "c"], [tree, EMPTY_TREE, chain], num_rows, computed)
    assert found.trees == (
        RequestTree("a", 0, 0, 0, 10, tree),
        RequestTree("c", 2, 5, 5, 30, chain),
    )
    assert found.branching == found.trees[:1]
    assert found.parents.tolist() == [0, 0, 1, 0, 1]
    assert found.trees[0].positions.tolist() == [10, 11, 11, 12]
    assert NO_TREES.parents.tolist() == []
