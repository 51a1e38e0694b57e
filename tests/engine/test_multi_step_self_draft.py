"""Several self-draft passes in a row, and blocks renewed early: the text stays plain vLLM's."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
from engine_kit import (
    BLOCK,
    cache_after_last_step,
    count_preemptions,
    engine,
    generate,
    plain_texts,
    prompt_of,
    runner_of,
    tokenswift,
    untrained_heads,
    write_heads,
)
from vllm import SamplingParams

from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.self_draft_acceptance import SelfDraftAcceptance
from vllm_tokenswift.options import MAX_SELF_DRAFT_STEPS

GREEDY = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.6, seed=5, min_p=0.05, max_tokens=120, ignore_eos=True)
# Sinks, the newest block and one between them: most of what is read is left out.
PARTIAL = {"plan": "auto", "budget_tokens": 3 * BLOCK, "sink_tokens": 16}
ONLY_PASSES = {"ngram_k": 0, "suffix_max_match": 0}
# A machine on which a pass over the partial cache costs next to nothing.
CHEAP_PASSES = CostModel(((1, 30.0), (33, 31.0)), draft_points=((0, 1.0),))


@contextmanager
def cheap_passes(model, cost: CostModel = CHEAP_PASSES, options=None, **arguments):
    """An engine with such a machine, and its passes by step: ``[{request: tokens}]`` of each."""
    given = {**PARTIAL, **ONLY_PASSES, **(options or {})}
    with engine(model, **tokenswift(**given), **arguments) as llm:
        drafter = runner_of(llm).tree_drafter
        drafter.planner.cost = cost
        propose, run = drafter.self_drafter.propose, drafter.draft_pass.run
        steps: list[list[dict[str, int]]] = []

        def of_step(*args):
            steps.append([])
            return propose(*args)

        def of_pass(rows):
            steps[-1].append({row.req_id: row.num_tokens for row in rows})
            return run(rows)

        drafter.self_drafter.propose, drafter.draft_pass.run = of_step, of_pass
        yield llm, steps


def longest(steps) -> int:
    return max(map(len, steps))


def test_a_batch_with_several_passes_writes_plain_vllms_text(tiny_model):
    """Over block boundaries, greedy and sampled, requests that go on beside some that stop."""
    prompts = [prompt_of(length, seed=length) for length in (300, 95, 30, 161, 400)]
    params = [GREEDY, SEEDED, SEEDED, GREEDY, SEEDED]
    plain = plain_texts(tiny_model, prompts, params)
    with cheap_passes(tiny_model, options={"self_draft": "always"}) as (llm, steps):
        assert generate(llm, prompts, params) == plain
        runner = runner_of(llm)
        stats, decisions = runner.stats, runner.tree_drafter.planner.decisions
    assert longest(steps) == MAX_SELF_DRAFT_STEPS
    assert stats.num_draft_passes == sum(map(len, steps))
    further = [rows for step in steps for rows in step[1:]]
    assert decisions["self_draft_again"] == sum(map(len, further)) > 100
    for step in steps:
        for before, after in pairwise(step):
            assert all(num_tokens == before[req_id] + 1 for req_id, num_tokens in after.items())
    assert any(0 < len(after) < len(before) for step in steps for before, after in pairwise(step))
    assert stats.accepted_by_source["self"] > stats.num_iterations


def test_passes_wanted_by_the_planner_alone_are_several_where_they_pay(tiny_model):
    """One long greedy text: what further passes say comes, over a cache that is partial."""
    prompt = prompt_of(700, seed=0)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    [plain] = plain_texts(tiny_model, [prompt], params)
    options = {"self_draft": "auto", "budget_tokens": 8 * BLOCK}
    with cheap_passes(tiny_model, options=options) as (llm, steps):
        assert generate(llm, [prompt], params) == [plain]
        runner = runner_of(llm)
        stats, decisions = runner.stats, runner.tree_drafter.planner.decisions
        [blocks] = runner.tree_drafter.draft_pass.last.logical_blocks.values()
    assert blocks.shape[1] < blocks.max() + 1, "the last pass read the whole cache"
    assert longest(steps) == MAX_SELF_DRAFT_STEPS
    assert decisions["self_draft"] + decisions["self_draft_probe"] == len(steps)
    assert decisions["self_draft_again"] == sum(map(len, steps)) - len(steps) > 20
    assert stats.num_emitted_tokens / stats.num_iterations > 2.0


def test_passes_end_where_a_request_ends_and_at_max_model_len(tiny_model):
    prompts = [prompt_of(length, seed=length) for length in (40, 90, 120, 123, 124, 125, 126)]
    params = [SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)] * 7
    params[0] = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
    plain = plain_texts(tiny_model, prompts, params, max_model_len=128)
    options = {"self_draft": "always"}
    with cheap_passes(tiny_model, options=options, max_model_len=128) as (llm, steps):
        assert generate(llm, prompts, params) == plain
    assert longest(steps) > 2
    # What a pass says is a draft, and one token more than the drafts is emitted.
    assert max(tokens for step in steps for rows in step for tokens in rows.values()) == 126


def test_preempted_requests_with_several_passes_go_on_where_they_were(tiny_model):
    """14 blocks for four sequences of up to 240 tokens."""
    prompts = [prompt_of(60, seed=i) for i in range(4)]
    params = [p.clone() for p in (GREEDY, SEEDED, GREEDY, SEEDED)]
    for p in params:
        p.max_tokens = 180
    plain = plain_texts(tiny_model, prompts, params)
    memory = {"num_gpu_blocks_override": 15, "max_model_len": 256}
    with cheap_passes(tiny_model, options={"self_draft": "always"}, **memory) as (llm, _):
        preemptions = count_preemptions(llm)
        written = generate(llm, prompts, params)
        assert preemptions(), "nobody was preempted: the test shows nothing"
        assert runner_of(llm).tree_drafter.planner.decisions["self_draft_again"] > 100
    assert written == plain


def test_a_pass_without_a_slot_of_its_own_is_not_run(tiny_model):
    """vLLM reserves slots for all passes; were there fewer, another's block would be written."""
    prompt = prompt_of(60, seed=0)
    with cheap_passes(tiny_model, options={"self_draft": "always"}) as (llm, steps):
        self_draft = runner_of(llm).tree_drafter.self_drafter
        self_draft._allocated_blocks = lambda request: -(-request.num_tokens // BLOCK)
        generate(llm, [prompt], GREEDY)
    assert longest(steps) > 2
    blocks = [
        {(tokens - 1) // BLOCK for rows in step for tokens in rows.values()} for step in steps
    ]
    assert all(len(of_step) == 1 for of_step in blocks)
    assert len(set.union(*blocks)) > 2


def test_nothing_of_several_passes_survives_in_the_verified_cache(tiny_model):
    prompt = prompt_of(500, seed=0)
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=150, ignore_eos=True)
    with cheap_passes(tiny_model, options={"self_draft": "always"}) as (llm, steps):
        drafted = cache_after_last_step(llm)
        [written] = generate(llm, [prompt], params)
    assert longest(steps) > 2
    fresh_prompt = {"prompt_token_ids": (prompt["prompt_token_ids"] + written)[: drafted[0]]}
    with engine(tiny_model) as llm:
        fresh = cache_after_last_step(llm)
        generate(llm, [fresh_prompt], SamplingParams(temperature=0, max_tokens=1))
    assert fresh[0] == drafted[0]
    full = drafted[0] // BLOCK  # whole blocks: the tail of the last one was never written
    difference = (drafted[1][:, :full] - fresh[1][:, :full]).abs().max()
    # float32 rounding of values up to about 5: passes of other shapes sum in another order.
    assert difference < 2e-5


@pytest.fixture(scope="module", params=["linear", "sequential"])
def heads(request, tiny_model, sequential_heads, tmp_path_factory):
    """Untrained heads: such that look at tokens, and such that do not."""
    if request.param == "sequential":
        return sequential_heads
    made = untrained_heads(request.param, tiny_model)
    return write_heads(made, tiny_model, tmp_path_factory.mktemp(request.param))


def test_heads_go_on_below_the_last_pass_of_each_request(tiny_model, heads):
    prompts = [prompt_of(length, seed=length) for length in (300, 95, 30)]
    params = [GREEDY, SEEDED, SEEDED]
    plain = plain_texts(tiny_model, prompts, params)
    options = {"self_draft": "always", "heads": str(heads)}
    with cheap_passes(tiny_model, options=options) as (llm, _):
        drafts = runner_of(llm).tree_drafter.head_drafter
        below, seen = drafts.candidates_below, []

        def recorded(requests, own, start):
            found = below(requests, own, start)
            seen.extend(zip(own, found, strict=True))
            return found

        drafts.candidates_below = recorded
        assert generate(llm, prompts, params) == plain
        stats = runner_of(llm).stats
    assert stats.drafted_by_source["heads"] > 50
    assert {found.own_depths for _, found in seen} >= {1, 2, 4}
    for own, found in seen:
        path, rows_below = 0, found.arrays[2]
        for depth, followed in enumerate(own.followed):
            assert list(found.tokens[path]) == own.tokens[depth]
            if depth + 1 < len(own.followed):
                path = rows_below[path, followed]
                others = {rows_below[depth, i] for i in range(8) if i != followed}
                assert others == {-1}
        assert found.own_depths == len(own.followed)
    with_heads = [found for _, found in seen if len(found.tokens) > found.own_depths]
    assert {found.own_depths for found in with_heads} >= {1, 2, 4}
    for found in with_heads:  # those whose paths are too unlikely have none
        last = found.own_depths - 1
        assert max(found.arrays[2][last, :8]) > last


def test_blocks_that_lost_too_much_to_their_age_are_selected_early(tiny_model, monkeypatch):
    selecting_is_free = replace(CHEAP_PASSES, draft_points=((0, 30.0),))
    prompt = prompt_of(600, seed=1)
    params = SamplingParams(temperature=0.5, seed=3, max_tokens=300, ignore_eos=True)
    plain = plain_texts(tiny_model, [prompt], params)
    options = {"self_draft": "always", "budget_tokens": 8 * BLOCK}
    with cheap_passes(tiny_model, selecting_is_free, options) as (llm, _):
        runner = runner_of(llm)
        decisions = runner.tree_drafter.planner.decisions
        assert generate(llm, [prompt], params) == plain
        assert decisions["select_first"] == 1
        assert decisions["select_used_up"] >= 1
        early = decisions["select_early"]
        selections = runner.stats.num_selections
        monkeypatch.setattr(SelfDraftAcceptance, "lost", property(lambda own: 0.01 * own._age))
        assert generate(llm, [prompt], params) == plain
        assert decisions["select_early"] > early + 50
        assert runner.stats.num_selections - selections == (
            decisions["select_early"] - early + decisions["select_first"] - 1
        )
