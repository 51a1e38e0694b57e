"""Lengths of every kind: the ends of a sequence, chunks of a prompt, and memory that runs out."""

from __future__ import annotations

import pytest
from engine_kit import (
    count_preemptions,
    engine,
    generate,
    plain_texts,
    prompt_of,
    runner_of,
    tokenswift,
)
from vllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.6, seed=5, min_p=0.05, max_tokens=80, ignore_eos=True)
SELF_DRAFT = {"plan": "paper", "self_draft": "always", "budget_tokens": 128, "sink_tokens": 16}


@pytest.mark.parametrize("options", [{}, SELF_DRAFT], ids=["text", "self-draft"])
def test_a_request_that_reaches_max_model_len_ends_with_length(tiny_model, options):
    """Several at once, at different distances: nobody's end stops or spoils the others."""
    prompts = [prompt_of(length, seed=length) for length in (40, 90, 120, 10, 125, 126)]
    params = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    plain = plain_texts(tiny_model, prompts, params, max_model_len=128)
    with engine(tiny_model, max_model_len=128, **tokenswift(**options)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert runner_of(llm).stats.num_accepted_tokens > 50
    for prompt, output, expected in zip(prompts, outputs, plain, strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == expected
        assert completion.finish_reason == "length"
        assert len(prompt["prompt_token_ids"]) + len(completion.token_ids) == 128


@pytest.mark.parametrize("options", [{}, SELF_DRAFT], ids=["text", "self-draft"])
def test_texts_of_four_thousand_tokens(tiny_model, options):
    """A long prompt and one half as long, side by side, up to the model's own limit."""
    prompts = [prompt_of(length, seed=length) for length in (3700, 1800)]
    params = [p.clone() for p in (GREEDY, SEEDED)]
    params[0].max_tokens, params[1].max_tokens = 396, 300
    # Plain vLLM cannot write seeded text on a CPU where a prompt comes in parts.
    long = {"max_model_len": 4096, "max_num_batched_tokens": 8192}
    plain = plain_texts(tiny_model, prompts, params, **long)
    with engine(tiny_model, **long, **tokenswift(**options)) as llm:
        assert generate(llm, prompts, params) == plain
        assert runner_of(llm).stats.num_accepted_tokens > 50


@pytest.mark.parametrize("options", [{}, SELF_DRAFT], ids=["text", "self-draft"])
def test_prompts_of_one_token_and_around_the_budget(tiny_model, options):
    """A one-token prompt that joins a running batch is padded with placeholder drafts by vLLM."""
    prompts = [prompt_of(length, seed=length) for length in (1, 1, 2, 31, 127, 128, 129, 300)]
    params = [GREEDY, SEEDED, GREEDY, GREEDY, SEEDED, GREEDY, GREEDY, SEEDED]
    plain = plain_texts(tiny_model, prompts, params)
    with engine(tiny_model, max_num_seqs=3, **tokenswift(**options)) as llm:
        assert generate(llm, prompts[::-1], params[::-1]) == plain[::-1]


@pytest.mark.parametrize("options", [{}, SELF_DRAFT], ids=["text", "self-draft"])
def test_chunked_prefill_changes_nothing(tiny_model, options):
    """Partial prefills beside trees in one batch; seeded requests among them."""
    prompts = [prompt_of(length, seed=length) for length in (10, 150, 20, 200, 90, 33)]
    params = [GREEDY, SEEDED, GREEDY, GREEDY, SEEDED, SEEDED]
    plain = plain_texts(tiny_model, prompts, params)
    chunks = {"max_num_batched_tokens": 64, "enable_chunked_prefill": True, "max_num_seqs": 4}
    with engine(tiny_model, **chunks, **tokenswift(**options)) as llm:
        assert generate(llm, prompts, params) == plain


@pytest.mark.parametrize("options", [{}, SELF_DRAFT], ids=["text", "self-draft"])
def test_prefix_cache_hits_find_only_verified_tokens(tiny_model, options):
    """The text that TokenSwift wrote is the next prompt: its cached blocks are read back."""
    prompts = [prompt_of(70, seed=1), prompt_of(100, seed=2)]
    plain = plain_texts(tiny_model, prompts, GREEDY)
    longer = [
        {"prompt_token_ids": p["prompt_token_ids"] + written}
        for p, written in zip(prompts, plain, strict=True)
    ]
    plain_again = plain_texts(tiny_model, longer, GREEDY)
    with engine(tiny_model, enable_prefix_caching=True, **tokenswift(**options)) as llm:
        assert generate(llm, prompts, GREEDY) == plain
        outputs = llm.generate(longer, GREEDY, use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == plain_again
        assert all(o.num_cached_tokens >= 96 for o in outputs), "no prefix-cache hit"


@pytest.mark.parametrize("options", [{}, SELF_DRAFT], ids=["text", "self-draft"])
def test_preempted_requests_go_on_where_they_were(tiny_model, options):
    """14 blocks of 32 for four sequences of up to 240 tokens: memory runs out again and again."""
    prompts = [prompt_of(60, seed=i) for i in range(4)]
    params = [p.clone() for p in (GREEDY, SEEDED, GREEDY, SEEDED)]
    for p in params:
        p.max_tokens = 180
    plain = plain_texts(tiny_model, prompts, params)
    with engine(
        tiny_model, num_gpu_blocks_override=15, max_model_len=256, **tokenswift(**options)
    ) as llm:
        preemptions = count_preemptions(llm)
        assert generate(llm, prompts, params) == plain
        assert preemptions(), "nobody was preempted: the test shows nothing"
