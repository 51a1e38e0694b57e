"""Time lost against the oracle, on histories small enough to work out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlanMode, Planner
from vllm_tokenswift.explain.record import NO_NODES, PROMPT, Iteration, Record
from vllm_tokenswift.explain.regret import Regret, longest_proposals, regrets
from vllm_tokenswift.explain.replay import noisy_heads, replay
from vllm_tokenswift.explain.replayed import ReplayRecorder
from vllm_tokenswift.explain.times import times_of
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.tree import BySource, Source

# One row 10 ms, and 1 ms for each further one.
COST = CostModel(verify_points=((1, 10.0), (101, 110.0)), draft_points=((0, 6.0),), heads_ms=2.0)
LOOP = [1, 2, 3, 4, 5] * 3
NEW = list(range(100, 130))


def nodes(**counts: int) -> BySource:
    by_source = list(NO_NODES)
    for name, count in counts.items():
        by_source[Source[name.upper()]] = count
    return tuple(by_source)


def regret_of(tokens: list[int], position: int, cost: CostModel = COST, **fields: Any) -> Regret:
    """Of one iteration at ``position``, the only one in which anything was drafted."""
    iteration = Iteration(position, **fields)
    end = position + iteration.emitted
    record = Record(
        "r",
        position - 1,
        tokens[:end] + [0] * 40,
        cost,
        TokenSwiftOptions(num_speculative_tokens=8),
        [
            Iteration(position - 1, 1, decisions=(PROMPT,)),
            iteration,
            Iteration(end, 40, decisions=("none",)),
        ],
    )
    record.token_ids[: len(tokens)] = tokens
    return regrets(record)[1]


def recorded(text: list[int], planner: Planner, prompt_len: int = 1, **heads: Any) -> Record:
    """Of a replay with up to 16 nodes."""
    recorder = ReplayRecorder("r", text, planner, 16, prompt_len)
    replay(text, planner, 16, prompt_len, on_iteration=recorder.add, **heads)
    return recorder.record()


def test_plain_decoding_of_a_new_text_loses_nothing() -> None:
    assert regret_of(NEW, 20, emitted=1) == Regret()


def test_a_fully_accepted_longest_proposal_loses_nothing() -> None:
    # 8 of the loop's tokens are the limit.
    lost = regret_of(LOOP * 2, 15, emitted=9, drafted=nodes(suffix=8), accepted=nodes(suffix=8))
    assert lost.total_ms == pytest.approx(0)


def test_drafts_of_which_none_was_accepted() -> None:
    lost = regret_of(NEW, 20, emitted=1, drafted=nodes(ngram=3))
    assert lost == Regret(nothing_accepted=3.0)


def test_nodes_rejected_beside_accepted_ones() -> None:
    lost = regret_of(
        LOOP * 2, 15, emitted=9, drafted=nodes(suffix=8, ngram=4), accepted=nodes(suffix=8)
    )
    assert lost.rejected == pytest.approx(4.0)
    assert lost.total_ms == pytest.approx(4.0)


def test_side_chains_of_rejected_nodes_are_lost_with_them() -> None:
    chains = CostModel(verify_points=((1, 10.0), (101, 110.0)), chain_ms=0.5)
    lost = regret_of(NEW, 20, chains, emitted=1, drafted=nodes(ngram=3), side_chains=2)
    assert lost == Regret(nothing_accepted=4.0)


def test_plain_decoding_where_the_text_offered_what_came() -> None:
    lost = regret_of(LOOP * 2, 15, emitted=1)
    # 9 tokens in 18 ms were to be had: 2 ms for the one that was written in 10.
    assert lost.left_out == pytest.approx(8.0)
    assert lost.total_ms == pytest.approx(8.0)


def test_a_shorter_chain_than_was_offered() -> None:
    lost = regret_of(LOOP * 2, 15, emitted=3, drafted=nodes(suffix=2), accepted=nodes(suffix=2))
    assert lost.left_out == pytest.approx(12.0 - 3 * 2.0)
    assert lost.total_ms == pytest.approx(6.0)


def test_a_pass_that_brought_nothing() -> None:
    lost = regret_of(NEW, 20, emitted=1, drafted=nodes(self=1), passes=1)
    assert lost == Regret(nothing_accepted=1.0, passes=6.0)
    assert regret_of(NEW, 20, emitted=1, passes=2).passes == 12.0
    assert regret_of(NEW, 20, emitted=1, free_heads=True).passes == 2.0


def test_a_pass_that_paid_loses_nothing() -> None:
    # 11 + 6 ms for two tokens, plainly 20.
    lost = regret_of(NEW, 20, emitted=2, drafted=nodes(self=1), accepted=nodes(self=1), passes=1)
    assert lost == Regret()


def test_a_pass_that_brought_less_than_it_cost() -> None:
    dear = CostModel(verify_points=((1, 10.0), (2, 11.0)), draft_points=((0, 12.0),))
    lost = regret_of(
        NEW, 20, dear, emitted=2, drafted=nodes(self=1), accepted=nodes(self=1), passes=1
    )
    assert lost.passes == pytest.approx(23.0 - 20.0)
    assert lost.total_ms == pytest.approx(3.0)


def test_a_pass_that_brought_what_the_text_offered_anyway() -> None:
    lost = regret_of(
        LOOP * 2,
        15,
        emitted=9,
        drafted=nodes(self=1, suffix=7),
        accepted=nodes(self=1, suffix=7),
        passes=1,
    )
    assert lost.passes == pytest.approx(6.0)
    assert lost.total_ms == pytest.approx(6.0)


def test_accepted_drafts_that_cost_more_than_plain_steps() -> None:
    compute_bound = CostModel(verify_points=((1, 10.0), (2, 25.0)))
    lost = regret_of(
        LOOP * 2, 15, compute_bound, emitted=2, drafted=nodes(suffix=1), accepted=nodes(suffix=1)
    )
    assert lost.too_dear == pytest.approx(5.0)
    assert lost.total_ms == pytest.approx(5.0)


def test_rejected_rows_that_made_the_pass_faster_cost_nothing() -> None:
    falling = CostModel(verify_points=((1, 10.0), (2, 11.0), (4, 9.0), (100, 50.0)))
    assert regret_of(NEW, 20, falling, emitted=1, drafted=nodes(ngram=3)) == Regret()
    lost = regret_of(NEW, 20, falling, emitted=2, drafted=nodes(ngram=3), accepted=nodes(ngram=1))
    assert lost == Regret()


def test_where_nothing_was_allowed_nothing_is_left_out() -> None:
    assert regret_of(LOOP * 2, 15, emitted=1, decisions=("none",)) == Regret()


def test_the_longest_proposal_ends_where_another_token_came() -> None:
    state = DraftState()
    state.append_tokens([1, 2, 3, 4, 5, 6, 1, 2])
    assert state.longest_proposal([3, 4, 5, 6, 1]) == 5
    assert state.longest_proposal([3, 4, 9, 6]) == 2
    assert state.longest_proposal([9]) == 0
    assert state.longest_proposal([]) == 0


@pytest.mark.parametrize("mode", ["auto", "fixed"])
@pytest.mark.parametrize("text", [LOOP * 8, NEW * 2 + LOOP * 3 + NEW, list(range(200))])
def test_causes_are_never_negative_and_add_up_to_spent_less_oracle(
    text: list[int], mode: PlanMode
) -> None:
    cost = CostModel(
        verify_points=((1, 10.0), (2, 11.0), (4, 10.5), (5, 15.0), (17, 40.0)),
        context_points=((1, 0.01),),
        chain_ms=0.4,
        draft_points=((0, 8.0), (64, 9.0)),
    )
    heads = noisy_heads(text, [[0.6, 0.1], [0.3]], free=False)
    record = recorded(text, Planner(cost, 32, mode), prompt_len=40, self_heads=heads)
    proposals = longest_proposals(record)
    steps = zip(record.iterations, regrets(record), proposals, strict=True)
    for iteration, lost, proposed in steps:
        if not iteration.is_decode:
            continue
        spent_ms = times_of(iteration, record).total_ms
        paces = [cost.verify_ms(1 + n, iteration.position) / (1 + n) for n in range(proposed + 1)]
        assert all(ms > -1e-9 for ms in lost.by_cause().values())
        assert 0 < spent_ms - lost.total_ms < spent_ms + 1e-9
        assert spent_ms - lost.total_ms <= iteration.emitted * min(paces) + 1e-9


def test_knowing_what_to_draft_is_worth_most_where_a_plan_drafts_blindly() -> None:
    text = list(range(300))  # repeats nothing
    cost = CostModel(verify_points=((1, 10.0), (17, 40.0)))
    heads = noisy_heads(text, [[0.0, 0.0, 0.0]], free=True)
    blind = recorded(text, Planner(cost, mode="fixed"), free_heads=heads)
    planned = recorded(text, Planner(cost), free_heads=heads)
    lost = [sum(r.total_ms for r in regrets(record)) for record in (blind, planned)]
    spent = [sum(times_of(i, r).total_ms for i in r.iterations[1:]) for r in (blind, planned)]
    assert lost[0] > 0.3 * spent[0]
    assert lost[1] < 0.02 * spent[1]
