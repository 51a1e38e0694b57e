"""Requests of one batch do not touch each other, whoever comes and goes beside them."""

from __future__ import annotations

from engine_kit import engine, generate, prompt_of, runner_of, tokenswift
from vllm import SamplingParams

PENALTY = {"penalty_theta": 1.3, "penalty_window": 64}


def varied_params(count: int) -> list[SamplingParams]:
    """Different lengths (requests leave in the middle) and different parameters side by side."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11, "min_p": 0.1},
        {"temperature": 0.7, "seed": 12, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "extra_args": PENALTY},
        {"temperature": 1.0, "seed": 13, "extra_args": {**PENALTY, "eta_epsilon": 2e-4}},
        {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": 0.3},
        {"temperature": 1.0, "seed": 14, "frequency_penalty": 0.2, "logit_bias": {7: 3.0}},
        {"temperature": 0.0, "extra_args": {"tokenswift": False}},
    ]
    return [
        SamplingParams(**kinds[i % len(kinds)], max_tokens=30 + 17 * (i % 5), ignore_eos=True)
        for i in range(count)
    ]


def test_a_request_in_a_batch_writes_what_it_writes_alone(tiny_model):
    """Batches of 1, 3 and 8, and more requests than the batch holds, so that some arrive late."""
    prompts = [prompt_of(5 + 9 * i, seed=i) for i in range(11)]
    params = varied_params(11)
    with engine(tiny_model, **tokenswift()) as llm:
        alone = [generate(llm, [p], s)[0] for p, s in zip(prompts, params, strict=True)]
        for size in (3, 8, 11):
            together = generate(llm, prompts[:size], params[:size])
            assert together == alone[:size]
        stats = runner_of(llm).stats
        assert stats.num_accepted_tokens > 100, "nothing was accepted: the test shows little"
        assert stats.tokens_moved > 0, "no side branch was ever accepted"


def test_every_request_writes_what_plain_vllm_writes(tiny_model):
    prompts = [prompt_of(5 + 9 * i, seed=i) for i in range(8)]
    params = list(varied_params(8))
    processors = [
        "vllm_tokenswift.sampling.processors:WindowedPenalty",
        "vllm_tokenswift.sampling.processors:EtaSampling",
    ]
    with engine(tiny_model, logits_processors=processors) as llm:
        plain = generate(llm, prompts, params)
    with engine(tiny_model, **tokenswift()) as llm:
        assert generate(llm, prompts, params) == plain
    with engine(tiny_model, **tokenswift(plan="paper", self_draft="always")) as llm:
        assert generate(llm, prompts, params) == plain


def test_speculation_can_be_switched_off_for_a_request(tiny_model):
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    off = params.clone()
    off.extra_args = {"tokenswift": False}
    with engine(tiny_model, **tokenswift()) as llm:
        [plain] = generate(llm, [prompt_of(20, 0)], off)
        assert runner_of(llm).stats.num_draft_tokens == 0
        [drafted] = generate(llm, [prompt_of(20, 0)], params)
        assert runner_of(llm).stats.num_draft_tokens > 0
    assert plain == drafted
