"""Passes in a row, and fresh blocks for them: only where tokens outweigh the time."""

from __future__ import annotations

import random

import pytest

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlannedRequest, Planner
from vllm_tokenswift.draft.planner.self_draft import PathEnd, SelfDraftPlanner, tokens_of_another
from vllm_tokenswift.draft.planner.self_draft_acceptance import SelfDraftPath
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.tree_builder import DraftedNodes
from vllm_tokenswift.explain.replay import noisy_heads, replay
from vllm_tokenswift.explain.replayed import ReplayRecorder
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree, Source

# A pass over the partial cache takes a fifth of one over a long context...
LONG = CostModel(((1, 30.0), (33, 31.0)), draft_points=((0, 6.0),))
# ... or nearly as long as a verify pass.
SHORT = CostModel(((1, 6.9), (33, 7.1)), draft_points=((0, 6.5),))
BUDGET = 64


def never_repeating(num_tokens: int, seed: int = 4) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(49_152) for _ in range(num_tokens)]


def state_after(text: list[int]) -> DraftState:
    state = DraftState()
    state.append_tokens(text)
    return state


def tree_of(drafted: DraftedNodes) -> DraftTree:
    return drafted.tree(drafted.count)


def path_of(*reach: float, tokens: tuple[int, ...] = ()) -> SelfDraftPath:
    return SelfDraftPath(list(tokens or range(len(reach))), list(reach), list(range(len(reach))))


def test_where_a_pass_is_cheap_several_in_a_row_are_run_and_pay() -> None:
    text = never_repeating(3000)
    once, often = (
        replay(
            text,
            Planner(LONG, BUDGET),
            16,
            1000,
            self_heads=noisy_heads(text, [[0.9]] * most, free=False),
            most_passes=most,
        )
        for most in (1, 4)
    )
    assert often.self_drafts > 3 * often.iterations
    assert often.speed_up > 1.25 * once.speed_up


def test_where_a_pass_costs_a_verify_pass_it_is_not_repeated() -> None:
    text = never_repeating(3000)
    said = noisy_heads(text, [[0.6]] * 4, free=False)
    planner = Planner(SHORT, BUDGET)
    result = replay(text, planner, 16, 1000, self_heads=said, most_passes=4)
    assert planner.decisions["self_draft"] + planner.decisions["self_draft_probe"] > 0
    assert planner.decisions["self_draft_again"] == 0
    assert result.speed_up > 0.98


def test_passes_go_on_only_from_what_is_likely_to_come() -> None:
    text = never_repeating(1200)
    planner = Planner(LONG, BUDGET)
    plan = planner.plan_step([PlannedRequest(state_after(text), None, len(text), 16)])
    decisions = SelfDraftPlanner(planner)
    likely, unlikely = ([PathEnd(path_of(reach), age=1)] for reach in (0.9, 0.1))
    assert decisions.go_on(plan, likely) == [True]
    assert decisions.go_on(plan, unlikely) == [False]


def test_passes_stop_being_repeated_when_what_they_say_does_not_come() -> None:
    text = never_repeating(4000)
    said = noisy_heads(text, [[0.9], [0.05], [0.05], [0.05]], free=False)

    def liars(done: int) -> HeadProposals:
        heads = said(done)
        assert heads is not None
        return HeadProposals(heads.tokens, [[0.9]] * 4, free=False)

    planner = Planner(LONG, BUDGET)
    result = replay(text, planner, 16, 1000, self_heads=liars, most_passes=4)
    only_first = noisy_heads(text, [[0.9]], free=False)
    once = replay(text, Planner(LONG, BUDGET), 16, 1000, self_heads=only_first)
    assert 0 < planner.decisions["self_draft_again"] < 0.1 * result.iterations
    assert result.speed_up > 0.98 * once.speed_up


def test_a_pass_brings_nothing_where_the_text_goes_on_along_the_path_anyway() -> None:
    acceptance = DraftState().self_draft_acceptance
    end = PathEnd(path_of(0.9, tokens=(5,)), age=1)
    goes_on = DraftTree.build([5, 6], [0, 1], probabilities=[0.8, 0.79])
    elsewhere = DraftTree.build([7, 6], [0, 1], probabilities=[0.8, 0.79])
    assert tokens_of_another(end, acceptance, goes_on) < 0.01
    assert tokens_of_another(end, acceptance, elsewhere) == pytest.approx(0.9 * 0.9)
    assert tokens_of_another(end, acceptance, EMPTY_TREE) == pytest.approx(0.9 * 0.9)


def test_a_pass_brings_less_where_heads_follow_wherever_the_path_ends() -> None:
    acceptance = DraftState().self_draft_acceptance
    end = PathEnd(path_of(1.0), age=1)
    alone = tokens_of_another(end, acceptance, EMPTY_TREE)
    for _ in range(100):
        acceptance.note_path(path_of(1.0, tokens=(5,)))
        acceptance.observe_tokens([5, 6, 7, 8])  # its token and two more were accepted
    q, f = acceptance.further_rate(1), acceptance.after
    assert f == pytest.approx(2.0, abs=0.1)
    assert tokens_of_another(end, acceptance, EMPTY_TREE) == pytest.approx(q - (1 - q) * f)
    assert tokens_of_another(end, acceptance, EMPTY_TREE) < q < alone + 0.11


def test_a_request_s_limit_and_a_missing_slot_end_its_passes() -> None:
    text = never_repeating(1200)
    planner = Planner(LONG, BUDGET)
    decisions = SelfDraftPlanner(planner)
    for limit, age, goes_on in ((1, 1, False), (2, 1, True), (2, None, False)):
        plan = planner.plan_step([PlannedRequest(state_after(text), None, len(text), limit)])
        assert decisions.may_go_on(plan, [age], [True]) is goes_on
        assert decisions.go_on(plan, [PathEnd(path_of(0.9), age)]) == [goes_on]
    assert decisions.may_go_on(plan, [1], [False]) is False
    assert decisions.go_on(plan, [None]) == [False]


def test_requests_share_a_further_pass_and_the_rest_do_not_wait_for_a_few() -> None:
    text = never_repeating(1200)
    planner = Planner(LONG, BUDGET)
    decisions = SelfDraftPlanner(planner)
    plan = planner.plan_step(
        [PlannedRequest(state_after(text), None, len(text), 16) for _ in range(4)]
    )
    sure, stopped = PathEnd(path_of(0.9), 1), PathEnd(path_of(0.9), None)
    assert decisions.go_on(plan, [sure, sure, sure, PathEnd(path_of(0.3), 1)]) == [True] * 4
    assert decisions.go_on(plan, [sure, stopped, stopped, stopped]) == [False] * 4


@pytest.mark.parametrize("mode", ["paper", "fixed"])
def test_fixed_plans_and_the_paper_s_have_one_pass(mode: str) -> None:
    text = never_repeating(1200)
    planner = Planner(LONG, BUDGET, mode)  # type: ignore[arg-type]
    plan = planner.plan_step([PlannedRequest(state_after(text), None, len(text), 16)])
    decisions = SelfDraftPlanner(planner)
    assert not decisions.is_asked
    assert decisions.go_on(plan, [PathEnd(path_of(1.0), 1)]) == [False]


def test_where_no_pass_was_measured_none_is_repeated() -> None:
    text = never_repeating(400)
    planner = Planner(CostModel(((1, 9.0),)), BUDGET)
    plan = planner.plan_step([PlannedRequest(state_after(text), None, len(text), 16)])
    decisions = SelfDraftPlanner(planner)
    assert decisions.go_on(plan, [PathEnd(path_of(1.0), 1)]) == [False]


def test_what_further_passes_bring_is_not_the_first_one_s_gain() -> None:
    """Three tokens of a path came, and one by other sources: two are the further passes'."""
    text = never_repeating(200)
    state = state_after(text)
    for number in range(40):
        said = [50_000 + 4 * number + place for place in range(4)]
        state.draft(None, 8)
        state.self_draft_benefit.note_decision(1.0, with_source=True, to_pay=0.5)
        state.self_draft_acceptance.note_path(path_of(0.9, 0.8, 0.7, tokens=tuple(said[:3])))
        state.append_tokens(said)
    assert state.self_draft_benefit.expected_tokens(1.0, with_source=True) == pytest.approx(
        2.0, abs=0.1
    )


def test_candidates_of_several_passes_are_the_target_s_own_as_deep_as_those_went() -> None:
    rows = [[5], [6], [7]]
    said = HeadProposals(rows, [[0.9]] * 3, free=False, own_depths=2)
    state = state_after(never_repeating(40))
    tree = tree_of(state.draft(said, 8))
    assert tree.tokens.tolist() == [5, 6, 7]
    assert tree.sources.tolist() == [Source.SELF, Source.SELF, Source.HEADS]


def test_every_pass_costs_what_those_who_share_it_read() -> None:
    cost = CostModel(((1, 10.0), (2, 11.0)), draft_points=((0, 3.0), (100, 4.0)))
    state = state_after(never_repeating(40))
    requests = [PlannedRequest(state, None, length, 16) for length in (1000, 50)]
    both, first = cost.draft_pass_ms(64 + 50, 2), cost.draft_pass_ms(64, 1)
    assert Planner(cost, 64).passes_ms(requests, [3, 1]) == pytest.approx(both + 2 * first)
    assert Planner(cost, 64).passes_ms(requests, [0, 0]) == 0.0


def test_a_record_of_a_replay_counts_every_pass() -> None:
    text = never_repeating(400)
    planner = Planner(LONG, BUDGET)
    recorder = ReplayRecorder("r", text, planner, 8, prompt_len=100)
    said = noisy_heads(text, [[0.9]] * 3, free=False)
    result = replay(text, planner, 8, 100, said, on_iteration=recorder.add, most_passes=3)
    counts = [iteration.passes for iteration in recorder.record().iterations]
    assert sum(counts) == result.self_drafts
    assert max(counts) == 3


def steps_until_fresh_blocks(hit_rate_when_old: float, cost: CostModel, steps: int) -> int | None:
    """Steps from the selection on, which is known to be good for 32 tokens; None: never."""
    text = never_repeating(20_000)
    request = PlannedRequest(state_after(text), None, len(text), 16)
    acceptance, rng = request.state.self_draft_acceptance, random.Random(1)

    def step(age: int, hit_rate: float) -> None:
        acceptance.note_path(SelfDraftPath([5], [0.9], [age]))
        acceptance.observe_tokens([5 if rng.random() < hit_rate else 6])

    for _ in range(5):
        for age in (0, *range(1, 33, 2)):
            step(age, 0.95)
        for age in range(33, 160, 3):
            step(age, hit_rate_when_old)
    step(0, 1.0)
    planner = Planner(cost, BUDGET)
    decisions, plan = SelfDraftPlanner(planner), planner.plan_step([request])
    for number in range(1, steps):
        step(2 * number, 0.95 if number <= 16 else hit_rate_when_old)
        if decisions.wants_fresh_blocks(plan, [True]) == [True]:
            return number
    return None


CHEAP_TO_SELECT = CostModel(
    ((1, 10.0), (33, 10.5)), context_points=((1, 1e-3),), draft_points=((0, 9.0),)
)
DEAR_TO_SELECT = CostModel(
    ((1, 10.0), (33, 10.5)), context_points=((1, 1e-2),), draft_points=((0, 9.0),)
)


def test_blocks_are_selected_again_once_what_their_age_loses_pays_for_it() -> None:
    # A pass over 20,000 tokens takes 21 ms longer where a step of 30 ms brings a token or so.
    soon = steps_until_fresh_blocks(0.6, CHEAP_TO_SELECT, 400)
    later = steps_until_fresh_blocks(0.6, DEAR_TO_SELECT, 400)
    assert soon is not None
    assert later is not None
    assert 16 < soon < later < 60


def test_blocks_as_good_as_new_are_left_alone() -> None:
    assert steps_until_fresh_blocks(0.95, CHEAP_TO_SELECT, 400) is None


def test_only_who_has_a_selection_may_have_it_renewed() -> None:
    text = never_repeating(2000)
    requests = [PlannedRequest(state_after(text), None, len(text), 16) for _ in range(2)]
    planner = Planner(CHEAP_TO_SELECT, BUDGET)
    decisions = SelfDraftPlanner(planner)
    for request in requests:
        for _ in range(50):
            for age, token in ((1, 5), (100, 6)):
                request.state.self_draft_acceptance.note_path(SelfDraftPath([5], [0.9], [age]))
                request.state.self_draft_acceptance.observe_tokens([token])
        for age in range(40, 100):
            request.state.self_draft_acceptance.note_path(SelfDraftPath([5], [0.9], [age]))
    plan = planner.plan_step(requests)
    assert decisions.wants_fresh_blocks(plan, [False, True]) == [False, True]
    assert planner.decisions["select_early"] == 1
