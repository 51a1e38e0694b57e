"""The planner: limits, chains, backing off, coming back; by replaying texts without a model."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlannedRequest, Planner
from vllm_tokenswift.draft.planner.source_benefit import best_group
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.tree_builder import NODE_COLUMNS
from vllm_tokenswift.explain.replay import noisy_heads, replay
from vllm_tokenswift.tree import Source

CPU = CostModel(
    verify_points=((1, 18.4), (5, 22.2), (9, 26.7), (17, 34.2)),
    chain_ms=0.3,
    chain_context_ms_per_token=0.0004,
    draft_points=((512, 18.0),),
)
GPU = CostModel(
    verify_points=((1, 6.7), (32, 6.9), (33, 8.0), (64, 8.2), (65, 9.5), (128, 11.5)),
    context_points=((1, 4.4e-5),),
    draft_points=((0, 6.5), (4096, 6.7)),
)
MACHINES = [pytest.param(CPU, id="cpu"), pytest.param(GPU, id="gpu")]


def loop(num_tokens: int, period: int = 40) -> list[int]:
    rng = random.Random(3)
    passage = [rng.randrange(49_152) for _ in range(period)]
    return list(itertools.islice(itertools.cycle(passage), num_tokens))


def never_repeating(num_tokens: int) -> list[int]:
    rng = random.Random(4)
    return [rng.randrange(49_152) for _ in range(num_tokens)]


def digits(num_tokens: int) -> list[int]:
    """Random numbers written out: short contexts repeat by chance and say nothing."""
    rng = random.Random(6)
    return [rng.randrange(10) for _ in range(num_tokens)]


def varied(num_tokens: int) -> list[int]:
    """Phrases of a vocabulary of 60, in random order."""
    rng = random.Random(5)
    phrases = [[rng.randrange(2000) for _ in range(rng.randrange(2, 8))] for _ in range(60)]
    text: list[int] = []
    while len(text) < num_tokens:
        text += phrases[min(int(rng.expovariate(0.1)), 59)]
    return text[:num_tokens]


def wants_self_draft(planner: Planner, requests: list[PlannedRequest]) -> list[bool]:
    return planner.wants_self_draft(planner.plan_step(requests))


def wants_free_heads(planner: Planner, requests: list[PlannedRequest]) -> list[bool]:
    return planner.wants_free_heads(planner.plan_step(requests))


def state_after(text: list[int]) -> DraftState:
    state = DraftState()
    state.append_tokens(text)
    return state


@pytest.mark.parametrize("cost", MACHINES)
def test_a_loop_is_written_at_nearly_the_best_speed_there_is(cost: CostModel) -> None:
    limit = 16
    result = replay(loop(1500), Planner(cost), limit, prompt_len=100)
    best = (1 + limit) * cost.verify_ms(1) / cost.verify_ms(1 + limit)
    assert result.speed_up > 0.95 * best


@pytest.mark.parametrize("cost", MACHINES)
@pytest.mark.parametrize("text", [never_repeating(1500), digits(1500)], ids=["random", "digits"])
def test_a_text_that_does_not_repeat_costs_at_most_two_percent(
    text: list[int], cost: CostModel
) -> None:
    result = replay(text, Planner(cost), limit=16)
    assert result.speed_up > 0.98


def test_on_a_text_that_never_repeats_nearly_every_plan_is_empty() -> None:
    planner = Planner(CPU)
    replay(never_repeating(1500), planner, limit=16)
    assert planner.decisions["drafted"] < 0.02 * planner.decisions["plain"]


@pytest.mark.parametrize("cost", MACHINES)
@pytest.mark.parametrize("text", [loop(1500), varied(1500), digits(1500)])
def test_planning_is_never_much_behind_a_fixed_width(text: list[int], cost: CostModel) -> None:
    planned = replay(text, Planner(cost), limit=16).speed_up
    for width in (4, 8, 16):
        fixed = replay(text, Planner(cost, mode="fixed"), limit=width).speed_up
        assert planned > 0.97 * fixed


@pytest.mark.parametrize("before", [never_repeating(1000), digits(1000)])
def test_a_loop_after_something_else_is_followed_within_200_tokens(before: list[int]) -> None:
    after = loop(1200)
    planner, state = Planner(CPU), DraftState()
    replay([*before, *after[:200]], planner, 16, state=state)
    late = replay(after[200:], planner, 16, prompt_len=1, state=state)
    alone = replay(after[200:], Planner(CPU), 16, prompt_len=1, state=state_after(after[:200]))
    assert late.step_ms < 1.03 * alone.step_ms


@pytest.mark.parametrize("text", [never_repeating(800), digits(800)])
def test_random_text_after_a_loop_is_decoded_plainly_within_200_tokens(text: list[int]) -> None:
    planner, state = Planner(CPU), DraftState()
    replay([*loop(1000), *text[:200]], planner, 16, state=state)
    late = replay(text[200:], planner, 16, prompt_len=1, state=state)
    assert late.speed_up > 0.98


def test_limits_are_kept_and_zero_means_nothing() -> None:
    states = [state_after(loop(300)) for _ in range(4)]
    requests = [
        PlannedRequest(state, None, 300, limit)
        for state, limit in zip(states, (0, 1, 5, 16), strict=True)
    ]
    for mode in ("auto", "fixed", "paper"):
        trees = Planner(GPU, mode=mode).plan(requests)
        for tree, request in zip(trees, requests, strict=True):
            assert len(tree) <= request.limit
        assert len(trees[3]) > 0


def test_a_request_without_history_gets_an_empty_tree() -> None:
    assert [len(t) for t in Planner(GPU).plan([PlannedRequest(DraftState(), None, 0, 8)])] == [0]


@pytest.mark.parametrize("mode", ["auto", "fixed", "paper"])
def test_a_constrained_request_gets_a_chain(mode: str) -> None:
    heads = HeadProposals([[5], [6, 7, 8]], [[0.9], [0.4, 0.3, 0.2]], free=False)
    planner = Planner(GPU, mode=mode)  # type: ignore[arg-type]
    text = varied(600)
    for length in range(500, 600, 7):
        request = PlannedRequest(state_after(text[:length]), heads, length, 16, chain_only=True)
        (tree,) = planner.plan([request])
        assert tree.is_chain
        assert len(tree) > 0


def test_the_nodes_go_to_the_request_that_will_use_them() -> None:
    sure, hopeless = state_after(loop(400)), state_after(never_repeating(400))
    requests = [PlannedRequest(hopeless, None, 400, 16), PlannedRequest(sure, None, 400, 16)]
    trees = Planner(CPU).plan(requests)
    assert len(trees[0]) == 0
    assert len(trees[1]) == 16


def test_nothing_is_drafted_where_every_node_costs_a_step() -> None:
    compute_bound = CostModel(verify_points=((1, 10.0), (2, 20.0)))
    planner = Planner(compute_bound)
    result = replay(loop(500), planner, limit=8)
    assert result.drafted == 0
    assert result.speed_up == pytest.approx(1.0)


def test_side_branches_are_dropped_where_they_read_the_prefix_again() -> None:
    flat = CostModel(verify_points=((1, 10.0), (17, 10.5)))
    dear = CostModel(verify_points=((1, 10.0), (17, 10.5)), chain_context_ms_per_token=0.05)
    text = varied(900)
    branches = 0
    for length in range(800, 900, 5):
        states = [state_after(text[:length]) for _ in range(2)]
        (branched,) = Planner(flat).plan([PlannedRequest(states[0], None, length, 16)])
        (chained,) = Planner(dear).plan([PlannedRequest(states[1], None, length, 16)])
        branches += len(branched.chains) - 1
        assert len(chained.chains) == 1
    assert branches > 0


def test_plans_repeat_exactly() -> None:
    text = varied(600)
    first, second = (replay(text, Planner(CPU), 16) for _ in range(2))
    assert (first.step_ms, first.drafted) == (second.step_ms, second.drafted)


def test_the_self_draft_pass_is_not_wanted_within_the_budget() -> None:
    request = PlannedRequest(state_after(varied(400)), None, 400, 16)
    assert wants_self_draft(Planner(GPU, budget=400), [request]) == [False]


def test_the_self_draft_pass_is_wanted_where_it_is_cheap_and_the_text_unsure() -> None:
    long_context = CostModel(
        verify_points=((1, 7.0), (33, 7.2)), context_points=((1, 1e-3),), draft_points=((512, 7.0),)
    )
    text = never_repeating(30_000)
    heads = noisy_heads(text, [[0.9], [0.2, 0.1, 0.05]], free=False)
    planner = Planner(long_context, budget=512)
    result = replay(text, planner, 16, prompt_len=29_500, self_heads=heads)
    assert result.self_drafts > 0.9 * result.iterations
    assert result.speed_up > 1.5


def test_a_self_draft_pass_that_does_not_pay_is_only_probed() -> None:
    text = never_repeating(3000)
    heads = noisy_heads(text, [[0.3], [0.05]], free=False)
    planner = Planner(CPU, budget=64)
    result = replay(text, planner, 16, prompt_len=1000, self_heads=heads)
    assert result.self_drafts > 0
    assert result.speed_up > 0.98


def test_the_paper_mode_drafts_its_tree_every_time() -> None:
    text = varied(600)
    heads = noisy_heads(text, [[0.9], [0.1, 0.05, 0.02], [0.1, 0.05, 0.02]], free=False)
    planner = Planner(GPU, mode="paper")
    request = PlannedRequest(state_after(text[:500]), None, 500, 128)
    assert wants_self_draft(planner, [request]) == [True]
    (tree,) = planner.plan([PlannedRequest(request.state, heads(500), 500, 128)])
    assert len(tree) >= 1 + 3 + 9
    assert {Source.SELF, Source.HEADS} <= set(tree.sources.tolist())


def test_free_heads_are_drafted_once_they_are_seen_to_hit() -> None:
    text = never_repeating(800)
    good = noisy_heads(text, [[0.8], [0.6]], free=True)
    bad = noisy_heads(text, [[0.02], [0.01]], free=True)
    assert replay(text, Planner(CPU), 8, free_heads=good).speed_up > 1.3
    assert replay(text, Planner(CPU), 8, free_heads=bad).speed_up > 0.98


def test_heads_that_cost_each_request_its_time_are_asked_for_few() -> None:
    """A batch of sixteen: what one of them is worth asking for all together is not. Their nodes
    cost hardly anything here, which leaves the heads' own time."""
    text = never_repeating(400)
    shared = replace(GPU, verify_points=((1, 6.7), (128, 7.5)), heads_ms=0.3)
    by_request = replace(shared, heads_request_ms=0.3)
    asked = []
    for cost in (shared, by_request):
        requests = [PlannedRequest(state_after(text), None, len(text), 8) for _ in range(16)]
        asked.append(sum(wants_free_heads(Planner(cost), requests)))
    assert asked[0] == 16
    assert asked[1] == 0
    [alone] = wants_free_heads(Planner(by_request), requests[:1])
    assert alone


# Passes of a model of 135 million parameters on a CPU of two cores, by rows.
_MEASURED = ((1, 14.9), (2, 15.8), (3, 13.7), (4, 13.6), (5, 13.8), (6, 14.1), (8, 16.8), (9, 17.5))
TILED = CostModel(verify_points=(*_MEASURED, (12, 19.5), (16, 23.1), (32, 37.0)))


def test_a_batch_takes_no_nodes_that_cost_more_than_a_coarse_curve_says() -> None:
    """The same machine measured at 1, 2, 3, 5, 9 and 17 rows, and its times taken to rise: of a
    batch of four a node seems to cost a fourth of what it does."""
    coarse = CostModel(verify_points=((1, 15.5), (2, 16.07), (5, 16.07), (9, 16.9), (17, 25.0)))
    text = digits(1200)
    requests = [
        PlannedRequest(state_after(text[:length]), None, length, 16)
        for length in (900, 1000, 1100, 1200)
    ]
    measured, believed = (Planner(cost).plan_step(requests) for cost in (TILED, coarse))
    assert sum(measured.counts) < sum(believed.counts)
    # The nodes between them cost the machine more time than they are worth.
    believed_ms = TILED.verify_ms(4 + sum(believed.counts))
    assert sum(believed.expected) / believed_ms < 0.98 * sum(measured.expected) / measured.step_ms


def test_alone_a_request_takes_unlikely_nodes_that_make_its_pass_faster() -> None:
    """Three rows take less time than one; the gain must still be worth an estimate."""
    faster = CostModel(verify_points=((1, 15.0), (2, 15.8), (3, 13.7), (5, 30.0)))
    text = [token for i in range(60) for token in (7, 8, 1000 + i)]
    request = PlannedRequest(state_after(text[:-1]), None, len(text), 16)
    assert len(Planner(faster).plan([request])[0]) == 2
    dearer = CostModel(verify_points=((1, 15.0), (2, 15.8), (3, 16.6), (5, 30.0)))
    assert len(Planner(dearer).plan([request])[0]) == 0


def test_a_source_is_charged_the_nodes_that_it_was_seen_to_bring() -> None:
    benefit = DraftState().free_heads_benefit
    before, two = benefit.mean_nodes, np.zeros((2, NODE_COLUMNS), np.int32)
    for _ in range(100):
        benefit.note_decision(1.2, with_source=True, to_pay=0.5, nodes_without=two)
        benefit.observe_drafted(5)
    assert benefit.mean_nodes == pytest.approx(3.0, rel=0.05) != before
    for _ in range(100):
        benefit.note_decision(1.2, with_source=False, to_pay=0.5)
        benefit.observe_drafted(12)
        benefit.note_decision(1.2, with_source=True, to_pay=0.5, nodes_without=two)
        benefit.observe_drafted(1)
        benefit.observe_drafted(12)
    assert benefit.mean_nodes == pytest.approx(0.0, abs=0.2)


def test_heads_that_bring_many_nodes_are_asked_for_fewer_requests() -> None:
    """What sixteen nodes more cost the step is known from those that were drafted before."""
    text = never_repeating(400)
    cost = CostModel(verify_points=((1, 10.0), (9, 10.1), (100, 100.0)), heads_ms=0.1)
    asked = {}
    for nodes in (0, 2):
        states = [state_after(text) for _ in range(8)]
        for state in states:
            for _ in range(100):
                state.free_heads_benefit.note_decision(1.0, with_source=True, to_pay=0.1)
                state.free_heads_benefit.observe_drafted(nodes)
        requests = [PlannedRequest(state, None, len(text), 8) for state in states]
        asked[nodes] = sum(wants_free_heads(Planner(cost), requests))
    assert asked[0] == 8
    assert asked[2] < 8


def test_one_request_s_drafts_do_not_fill_the_step_of_all_where_rows_cost_time() -> None:
    """A request that repeats itself would take what is best for it alone, and three others
    would wait for it: together they draft less, and the step stays within a third of a plain one.
    """
    cost = CostModel(verify_points=((1, 13.6), (5, 13.8), (9, 17.5), (17, 24.0), (33, 37.0)))
    looping = PlannedRequest(state_after(loop(400)), None, 400, 24)
    [alone] = Planner(cost).plan([looping])
    others = [PlannedRequest(state_after(never_repeating(400)), None, 400, 24) for _ in range(3)]
    planner = Planner(cost)
    trees = planner.plan([PlannedRequest(looping.state, None, 400, 24), *others])
    assert [len(tree) for tree in trees[1:]] == [0, 0, 0]
    assert 0 < len(trees[0]) < len(alone)
    assert cost.verify_ms(4 + len(trees[0])) < cost.verify_ms(4) * 4 / 3


def test_a_source_is_asked_where_all_requests_together_become_faster() -> None:
    """Four tokens more for one of two requests, by twice the time: both are as fast as before in
    the sum of their tokens, but the other is half as fast."""
    assert best_group([4.0, 0.0], [True, False], [1.0, 1.0], 10.0, [15.0]) == []
    assert best_group([4.0, 0.0], [True, False], [1.0, 1.0], 10.0, [10.0]) == [0]
    assert best_group([1.0, 3.0], [True, True], [4.0, 4.0], 10.0, [2.0, 4.0]) == [1]
    assert best_group([1.0, 3.0], [True, True], [1.0, 4.0], 10.0, [2.0, 4.0]) == [0, 1]


def test_an_unknown_plan_is_refused() -> None:
    with pytest.raises(ValueError, match="plan must be one of auto, paper, fixed"):
        Planner(CPU, mode="greedy")  # type: ignore[arg-type]


# -- where the device waits for drafts, and not for steps without them ------------------


def waiting(ms: float) -> CostModel:
    return replace(GPU, drafting_ms=ms)


def test_drafts_must_be_worth_the_time_that_the_device_waits_for_them() -> None:
    """A token that comes one time in three is drafted where drafting is free, and not else."""
    text = [token for i in range(300) for token in (7, 8, 1000 + 3 * i + i % 3)]
    request = PlannedRequest(state_after(text[:-1]), None, len(text), 16)
    assert len(Planner(waiting(0.0)).plan([request])[0]) > 0
    expected = Planner(waiting(0.0)).plan_step([request]).expected[0]
    dear = (expected - 1.0) * GPU.verify_ms(1)
    assert len(Planner(waiting(dear)).plan([request])[0]) == 0


def test_a_loop_is_drafted_for_however_slow_the_host_is() -> None:
    text = loop(400)
    planner = Planner(waiting(2 * GPU.verify_ms(1)))
    request = PlannedRequest(state_after(text), None, len(text), 16)
    assert planner.would_draft([request], 0, self_draft=False, free_heads=False)
    assert len(planner.plan([request])[0]) == 16


def test_each_further_request_must_be_worth_its_own_time_of_the_host() -> None:
    """Texts that are drafted for alone, and three at a time where only the first one costs."""
    text = [token for i in range(300) for token in (7, 8, 1000 + 3 * i + i % 3)]
    gain = Planner(GPU).plan_step([PlannedRequest(state_after(text[:-1]), None, 900, 16)])
    dear = 0.8 * (gain.expected[0] - 1.0) * GPU.verify_ms(1)
    trees = {}
    for further in (0.0, dear):
        planner = Planner(replace(waiting(0.1 * dear), drafting_request_ms=further))
        requests = [PlannedRequest(state_after(text[:-1]), None, 900, 16) for _ in range(3)]
        trees[further] = [len(tree) for tree in planner.plan(requests)]
        assert len(planner.plan(requests[:1])[0]) > 0
    assert all(trees[0.0])
    assert not any(trees[dear])


def test_attempts_for_many_requests_leave_the_host_time_for_their_steps() -> None:
    """An attempt may take a quarter of a step: one that takes half of it comes every other step."""
    step_ms = GPU.verify_ms(4)
    for share, expected in ((0.25, 0), (0.5, 1), (1.1, 4)):
        planner = Planner(replace(GPU, drafting_request_ms=share * step_ms / 3))
        states = [state_after(varied(100)) for _ in range(4)]
        attempts = []
        for _ in range(20):
            attempts.append(not planner.skip_step_meanwhile(states, 4))
            if attempts[-1]:
                requests = [PlannedRequest(state, None, 100, 16) for state in states]
                planner.would_draft(requests, 0, self_draft=False, free_heads=False)
        assert attempts == ([False] * expected + [True]) * (20 // (expected + 1))
    assert not Planner(GPU, mode="fixed").skip_step_meanwhile(states, 4)


def test_to_begin_takes_more_than_to_go_on() -> None:
    """The same state of a text: once drafting, drafts are made that nobody would begin with."""
    text = loop(400)
    request = PlannedRequest(state_after(text), None, len(text), 3)
    gain = Planner(waiting(0.0)).plan_step([request]).expected[0] - 1.0
    planner = Planner(waiting(0.5 * gain * GPU.verify_ms(1)))
    assert not planner.would_draft([request], 0, self_draft=False, free_heads=False)
    assert len(planner.plan([request])[0]) == 3


def test_sources_that_are_not_asked_learn_what_comes_without_them() -> None:
    """While steps are decoded plainly a source is not run, and its next trial comes as planned."""
    text = never_repeating(1200)
    state = state_after(text[:600])
    planner = Planner(replace(waiting(1.0), heads_ms=1.0))
    asks = []
    for token in text[600:]:
        request = PlannedRequest(state, None, state.num_tokens, 16)
        asks.append(planner.would_draft([request], 0, self_draft=False, free_heads=True))
        assert not state.free_heads_benefit.asked_last
        state.append_tokens([token])
    assert any(asks)
    assert planner.decisions["free_heads"] == planner.decisions["free_heads_probe"] == 0
    assert planner.decisions["plain"] == len(asks)


def test_a_batch_asks_a_source_again_all_together_and_not_each_when_it_likes() -> None:
    """Requests of different age, for whom heads do not pay: while one asked, all would wait.
    By step, the share of them who ask again."""
    text = never_repeating(4000)
    cost = replace(waiting(0.2), heads_ms=0.3)

    def asking(num_requests: int) -> list[float]:
        states = [state_after(text[900 * i : 900 * i + 100]) for i in range(num_requests)]
        planner, asked = Planner(cost), []
        for step in range(700):
            # One more request every 50 steps.
            present = states[: 1 + step // 50]
            requests = [PlannedRequest(state, None, state.num_tokens, 16) for state in present]
            before = planner.decisions["free_heads_probe"]
            wants_free_heads(planner, requests)
            asked.append((planner.decisions["free_heads_probe"] - before) / len(present))
            for i, state in enumerate(present):
                state.append_tokens([text[900 * i + 100 + step]])
        return asked

    alone, together = asking(1), asking(4)
    assert set(together) == {0.0, 1.0}
    assert 1 < sum(together) <= sum(alone)


# -- where more rows of a prefix cost more ------------------------------------------------

# As measured on two cores: of 1,000 tokens a row takes 3 ms, and each further one about 1 ms more.
COMPUTE_BOUND = replace(
    CPU, chain_ms=0.0, chain_context_ms_per_token=0.0, context_points=((1, 3e-3), (17, 18e-3))
)


@pytest.mark.parametrize("number", [1, 3])
def test_the_longer_the_text_the_fewer_nodes_where_each_reads_it_again(number: int) -> None:
    counts = []
    for length in (500, 20_000):
        requests = [
            PlannedRequest(state_after(varied(3000)), None, length, 16) for _ in range(number)
        ]
        plan = Planner(COMPUTE_BOUND).plan_step(requests)
        counts.append(sum(plan.counts))
        rows = number + sum(plan.counts)
        step_ms = COMPUTE_BOUND.verify_ms(rows) + COMPUTE_BOUND.context_ms(
            number * length, rows / number
        )
        assert plan.step_ms == pytest.approx(step_ms, rel=0.02)
    assert counts[0] >= 1.5 * counts[1]


def test_a_text_of_any_length_is_never_slower() -> None:
    """By a model of costs that knows what rows cost there."""
    for text in (varied(6000), digits(6000)):
        result = replay(text, Planner(COMPUTE_BOUND), 16, prompt_len=4500)
        assert result.plain_ms / result.step_ms >= 0.97


def test_what_a_source_of_more_rows_costs_is_weighed_with_the_prefix() -> None:
    planner = Planner(COMPUTE_BOUND)
    near, far = (
        planner.plan_step([PlannedRequest(state_after(loop(300)), None, length, 0)])
        for length in (500, 20_000)
    )
    beside = planner.nodes_ms(far, 4) - planner.nodes_ms(near, 4)
    assert beside == pytest.approx(19_500 * 4 * 15e-3 / 16)


def test_a_wide_step_of_long_texts_is_as_dear_as_its_rows_make_it() -> None:
    dear = replace(PADDED, context_points=((1, 1e-4), (4, 1e-4), (16, 5e-3)))
    planner = Planner(dear, shapes_of=lambda num: SHAPES.get(num, ()))
    for length, counts in ((50, [15, 15]), (4000, [3, 3])):
        requests = [PlannedRequest(state_after(loop(400)), None, length, 15) for _ in range(2)]
        plan = planner.plan_step(requests)
        assert plan.counts == counts
        width = 1 + counts[0]
        step_ms = dear.verify_ms(2 * width) + dear.context_ms(2 * length, width)
        assert plan.step_ms == pytest.approx(step_ms)


# -- where all requests of a step have as many rows -------------------------------------

SHAPES = {2: [(4, 8), (16, 32)]}
PADDED = CostModel(verify_points=((1, 5.0), (8, 5.1), (32, 12.0)))


def test_one_request_that_loops_does_not_make_the_step_wide_for_all() -> None:
    """Drafts up to the narrow graph's width cost nothing more, beyond it as much as the step."""
    counts = {}
    for shapes in ({}, SHAPES):
        planner = Planner(PADDED, shapes_of=lambda num, known=shapes: known.get(num, ()))
        requests = [
            PlannedRequest(state_after(text), None, 400, 15)
            for text in (loop(400), never_repeating(400))
        ]
        plan = planner.plan_step(requests)
        counts[len(shapes)] = plan.counts
    assert counts[0][0] > 3
    assert counts[1] == [3, 0]
    assert plan.step_ms == PADDED.verify_ms(8)


def test_two_requests_that_loop_make_the_step_wide() -> None:
    planner = Planner(PADDED, shapes_of=lambda num: SHAPES.get(num, ()))
    requests = [PlannedRequest(state_after(loop(400)), None, 400, 15) for _ in range(2)]
    assert planner.plan_step(requests).counts == [15, 15]
    assert planner.plan_step(requests[:1]).counts[0] > 3
