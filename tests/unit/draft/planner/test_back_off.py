"""Steps that go by without a draft attempt, where attempts have not paid."""

import random

import pytest

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.planner.back_off import BackOff, may_skip_step
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlanMode, PlannedRequest, Planner

COST = CostModel(verify_points=((1, 10.0), (9, 14.0)))


def attempt(back_off: BackOff, emitted: int, more_ms: float = 0.0) -> None:
    back_off.note_attempt(10.0, more_ms)
    back_off.observe_emitted(emitted)


def tired(attempts: int = 100) -> BackOff:
    back_off = BackOff()
    for _ in range(attempts):
        attempt(back_off, emitted=1)
    return back_off


def test_some_thirty_attempts_in_vain_come_before_the_first_skipped_step() -> None:
    assert not may_skip_step([tired(15)])
    assert may_skip_step([tired(40)])


def test_a_batch_in_which_nothing_comes_skips_the_sooner_the_more_requests_it_has() -> None:
    assert not may_skip_step([tired(3)] * 16)
    assert may_skip_step([tired(8)] * 16)
    assert not may_skip_step([tired(10)] * 4)
    assert may_skip_step([tired(20)] * 4)


def test_a_request_that_joins_a_batch_brings_its_share_of_trust() -> None:
    assert may_skip_step([tired()] * 4)
    assert not may_skip_step([BackOff(), tired(60)])
    assert may_skip_step([BackOff(), *[tired(60)] * 15])


def test_while_nothing_comes_there_is_an_attempt_in_one_step_of_four() -> None:
    back_off, attempted = tired(), []
    for _ in range(40):
        attempted.append(not may_skip_step([back_off]))
        if attempted[-1]:
            attempt(back_off, emitted=1)
        else:
            back_off.note_skipped()
    assert attempted == [False, False, False, True] * 10


def test_two_drafts_that_come_end_the_skipping() -> None:
    back_off = tired()
    attempt(back_off, emitted=3)
    assert not may_skip_step([back_off])


def test_drafts_that_cost_more_time_than_they_save_do_not_end_it() -> None:
    back_off = tired()
    for _ in range(100):
        attempt(back_off, emitted=2, more_ms=11.0)
    assert may_skip_step([back_off])


def test_a_batch_skips_if_attempts_have_not_paid_for_it_as_a_whole() -> None:
    paid = BackOff()
    for _ in range(100):
        attempt(paid, emitted=2)
    assert not may_skip_step([paid, tired(), tired()])
    barely = tired()
    barely.benefit.mean = 0.1
    assert not may_skip_step([barely, tired()])
    assert may_skip_step([barely, tired(), tired(), tired()])


def test_nobody_goes_without_an_attempt_for_more_than_three_steps() -> None:
    waiting, attempted = tired(), tired()
    for _ in range(3):
        waiting.note_skipped()
    assert not may_skip_step([waiting, attempted])


def new_text(num_tokens: int, seed: int) -> list[int]:
    """Repeats nothing, not even a token."""
    rng = random.Random(seed)
    return [rng.randrange(1_000_000_000) for _ in range(num_tokens)]


def write(planner: Planner, states: list[DraftState], texts: list[list[int]]) -> list[list[int]]:
    """Steps of a batch, a token each; of every step that was planned, the nodes drafted."""
    drafted = []
    for tokens in zip(*texts, strict=True):
        if not planner.skip_step(states):
            requests = [PlannedRequest(state, None, state.num_tokens, 8) for state in states]
            drafted.append([len(tree) for tree in planner.plan(requests)])
        for state, token in zip(states, tokens, strict=True):
            state.append_tokens([token])
    return drafted


def states_of(num: int) -> list[DraftState]:
    states = [DraftState() for _ in range(num)]
    for seed, state in enumerate(states):
        state.append_tokens(new_text(200, seed))
    return states


def test_a_batch_of_texts_that_offer_nothing_is_hardly_planned_for() -> None:
    planner = Planner(COST)
    planned = write(planner, states_of(4), [new_text(400, 10 + i) for i in range(4)])
    assert 100 < len(planned) < 150
    assert planner.decisions["rested"] == 4 * (400 - len(planned))
    assert planner.decisions["plain"] == 4 * len(planned)


def test_on_a_slow_model_an_attempt_may_bring_little() -> None:
    """One token in a hundred attempts is worth the time where a step takes a second."""
    text = new_text(300, 10)
    plans = []
    for step_ms in (10.0, 1000.0):
        planner = Planner(CostModel(verify_points=((1, step_ms), (9, 1.4 * step_ms))))
        [state] = states_of(1)
        state.back_off.benefit.mean = 0.001
        plans.append(len(write(planner, [state], [text])))
    assert plans[0] < 100
    assert plans[1] > plans[0]


def test_a_loop_that_begins_while_steps_are_skipped_is_followed_within_a_few_steps() -> None:
    planner = Planner(COST)
    [state] = states_of(1)
    write(planner, [state], [new_text(200, 10)])
    passage = new_text(20, 11)
    write(planner, [state], [passage])
    drafted = write(planner, [state], [passage])
    assert any(nodes for [nodes] in drafted[:3])


@pytest.mark.parametrize("mode", ["fixed", "paper"])
def test_plans_that_draft_every_time_never_skip(mode: PlanMode) -> None:
    planner = Planner(COST, mode=mode)
    assert len(write(planner, states_of(1), [new_text(200, 10)])) == 200
