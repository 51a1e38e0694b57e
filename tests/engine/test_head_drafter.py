"""Sequential heads along paths in a bfloat16 engine: compiled where torch would do it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_kit import engine, generate, prompt_of, runner_of, tokenswift
from vllm import SamplingParams

from vllm_tokenswift.cpu import head_chain
from vllm_tokenswift.cpu.head_beam import CPUHeadBeam


def penalised(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.8,
        seed=2,
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args={"penalty_theta": 1.2, "penalty_window": 64},
    )


def always_asked(llm):
    """Free heads in every step: the planner would rarely find these worth it, and soon skip."""
    drafter = runner_of(llm).tree_drafter
    drafter.planner.skip_step = lambda _: False
    drafter.planner.wants_free_heads = lambda plan: [True] * len(plan.requests)
    return drafter.head_drafter


@pytest.mark.skipif(not head_chain.is_compiled(), reason="installed without a C compiler")
def test_compiled_heads_draft_what_torch_drafts(tiny_model, sequential_heads):
    options = {"heads": str(sequential_heads), "self_draft": "off", "plan": "auto"}
    with engine(tiny_model, dtype="bfloat16", **tokenswift(**options)) as llm:
        drafts = always_asked(llm)
        beam, original = drafts._head_beam, drafts.candidates
        assert beam is not None
        said = []

        def both(requests, own, start):
            blind = [replace(request, noise=None) for request in requests]
            compiled = original(blind, own, start)
            drafts._head_beam = None
            try:
                said.extend(zip(compiled, original(blind, own, start), strict=True))
            finally:
                drafts._head_beam = beam
            return original(requests, own, start)

        drafts.candidates = both
        prompts = [prompt_of(20, 0), prompt_of(45, 1), prompt_of(9, 2)]
        plain = SamplingParams(max_tokens=40, seed=3)
        generate(llm, prompts, [penalised(40), plain, penalised(40)])
    assert len(said) > 60
    assert max(len(compiled.tokens) for compiled, _ in said) > 2
    # Roundings of bfloat16 and int8: near ties may change places, chances hardly move.
    firsts = [(a.tokens[0], a.probabilities[0], b.tokens[0], b.probabilities[0]) for a, b in said]
    assert sum(a[0] == b[0] for a, _, b, _ in firsts) > 0.95 * len(firsts)
    assert all(abs(p[0] - q[0]) < 0.05 for _, p, _, q in firsts)
    same = [(a, b) for a, b in said if a.tokens[0] == b.tokens[0] and a.below[0] == b.below[0]]
    assert sum(a.num_passes == b.num_passes for a, b in same) > 0.8 * len(same) > 0


@pytest.mark.skipif(not head_chain.is_compiled(), reason="installed without a C compiler")
def test_batches_too_large_for_the_compiled_heads_go_through_torch(tiny_model, sequential_heads):
    options = {"heads": str(sequential_heads), "self_draft": "off", "plan": "auto"}
    largest = head_chain.MAX_ROWS // head_chain.BEAM_WIDTH
    count = largest + 2
    with engine(tiny_model, dtype="bfloat16", max_num_seqs=count, **tokenswift(**options)) as llm:
        drafts = always_asked(llm)
        ways = []
        original = drafts.candidates

        def counted(requests, *rest):
            made = original(requests, *rest)
            ways.append((len(requests), {candidates.sees_noise for candidates in made}))
            return made

        drafts.candidates = counted
        prompts = [prompt_of(8 + seed, seed) for seed in range(count)]
        generate(llm, prompts, [penalised(6 + 2 * seed) for seed in range(count)])
    assert {size > largest for size, _ in ways} == {False, True}
    assert all(sees_noise == {size <= largest} for size, sees_noise in ways)


@pytest.mark.skipif(not head_chain.is_compiled(), reason="installed without a C compiler")
def test_heads_begin_for_all_that_may_where_most_asked(tiny_model, sequential_heads, monkeypatch):
    """As on a GPU, where they run by themselves; a bias is over the whole vocabulary."""
    monkeypatch.setattr(CPUHeadBeam, "runs_ahead", True)
    began, searched = [], []
    options = {"heads": str(sequential_heads), "self_draft": "off", "plan": "auto"}
    with engine(tiny_model, dtype="bfloat16", **tokenswift(**options)) as llm:
        drafts = always_asked(llm)
        launch_free, launch = drafts.launch_free, drafts._head_beam.launch_search

        def asked_by_half(plan):
            """Others in every step; all of them as if they had been asked in the last."""
            for request in plan.requests:
                request.state.free_heads_benefit.asked_last = True
            return [request.state.num_tokens % 2 == 0 for request in plan.requests]

        def beginning(requests, start):
            began.append({request.req_id for request in requests})
            launch_free(requests, start)

        def searching(some, *arguments):
            searched.append(len(some))
            return launch(some, *arguments)

        runner_of(llm).tree_drafter.planner.wants_free_heads = asked_by_half
        drafts.launch_free, drafts._head_beam.launch_search = beginning, searching
        prompts = [prompt_of(9 + seed, seed) for seed in range(4)]
        biased = SamplingParams(max_tokens=30, seed=4, ignore_eos=True, logit_bias={5: 2.0})
        generate(llm, prompts, [*(penalised(30) for _ in range(3)), biased])
    assert max(map(len, began)) == 3
    assert not any(request.split("-")[0] == "3" for of_step in began for request in of_step)
    # What began is what was asked about, but for the first steps of texts.
    assert len(searched) <= len(began) + 4


def test_tokens_are_plain_vllms_in_bfloat16_too(tiny_model, sequential_heads):
    """Chains only: side chains and plain decoding may round a near tie differently."""
    prompts = [prompt_of(20, 0), prompt_of(45, 1)]
    params = [penalised(60), SamplingParams(max_tokens=60, seed=3, ignore_eos=True)]
    processors = {"logits_processors": ["vllm_tokenswift.sampling.processors:WindowedPenalty"]}
    with engine(tiny_model, dtype="bfloat16", **processors) as llm:
        plain = generate(llm, prompts, params)
    options = {"heads": str(sequential_heads), "self_draft": "off", "plan": "auto"}
    with engine(tiny_model, dtype="bfloat16", **tokenswift(**options)) as llm:
        always_asked(llm)
        assert generate(llm, prompts, params) == plain
        assert runner_of(llm).stats.accepted_by_source["free_heads"] >= 0
