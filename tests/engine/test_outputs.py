"""What comes with the tokens: log-probabilities, grammars, several completions, metrics."""

from __future__ import annotations

import json

import pytest
from engine_kit import engine, generate, prompt_of, runner_of, tokenswift
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}

# Of the demo model, whose tokens are larger than the tiny model's.
MEMORY = {"kv_cache_memory_bytes": 1 << 28}


def test_logprobs_are_those_of_plain_vllm(tiny_model):
    prompts = [prompt_of(20, 1), prompt_of(33, 2), prompt_of(9, 3)]
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logprobs=3),
        SamplingParams(temperature=0, max_tokens=50, ignore_eos=True),
        SamplingParams(temperature=0.6, seed=1, max_tokens=70, ignore_eos=True, logprobs=0),
    ]
    with engine(tiny_model) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    with engine(tiny_model, **tokenswift()) as llm:
        drafted = llm.generate(prompts, params, use_tqdm=False)
        assert runner_of(llm).stats.num_accepted_tokens > 20
    for expected, output in zip(plain, drafted, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
        if expected.outputs[0].logprobs is None:
            assert output.outputs[0].logprobs is None
            continue
        for ours, theirs in zip(
            output.outputs[0].logprobs, expected.outputs[0].logprobs, strict=True
        ):
            assert list(ours) == list(theirs)
            for token, logprob in ours.items():
                assert logprob.rank == theirs[token].rank
                # float32 rounding of logits of passes over other numbers of rows
                assert logprob.logprob == pytest.approx(theirs[token].logprob, abs=1e-4)


def test_structured_output_keeps_to_its_grammar_and_to_plain_vllm(demo_model):
    """Drafts of a grammar's request are a chain; beside it a free request drafts a tree."""
    prompts = ["Describe a person as JSON: ", "one two three one two three one two three one two"]
    grammar = StructuredOutputsParams(json=SCHEMA)
    params = [
        SamplingParams(temperature=0, max_tokens=60, structured_outputs=grammar),
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    ]
    with engine(demo_model, **MEMORY) as llm:
        plain = generate(llm, prompts, params)
    with engine(demo_model, **MEMORY, **tokenswift()) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert runner_of(llm).stats.num_accepted_tokens > 10
    assert [list(o.outputs[0].token_ids) for o in outputs] == plain
    person = outputs[0].outputs[0]
    if person.finish_reason == "stop":
        assert set(json.loads(person.text)) == {"name", "age"}


def test_several_completions_of_one_prompt_are_plain_vllms(tiny_model):
    params = SamplingParams(n=3, temperature=0.8, seed=4, max_tokens=40, ignore_eos=True)
    with engine(tiny_model) as llm:
        [plain] = llm.generate([prompt_of(20, 0)], params, use_tqdm=False)
    with engine(tiny_model, **tokenswift()) as llm:
        [drafted] = llm.generate([prompt_of(20, 0)], params, use_tqdm=False)
    assert [c.token_ids for c in drafted.outputs] == [c.token_ids for c in plain.outputs]


def test_counters_add_up_to_what_was_written(tiny_model):
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with engine(tiny_model, **tokenswift()) as llm:
        generate(llm, [prompt_of(20, 0), prompt_of(30, 1)], params)
        [stats] = llm.collective_rpc("tokenswift_stats")
    # The scheduler may cut what a request's last iteration emitted beyond max_tokens: never here.
    assert stats["num_emitted_tokens"] == 200
    assert stats["num_emitted_tokens"] == stats["num_iterations"] + stats["num_accepted_tokens"]
    assert sum(stats["drafted_by_source"].values()) == stats["num_draft_tokens"]
    assert sum(stats["accepted_by_source"].values()) == stats["num_accepted_tokens"]
    assert stats["decisions"]["drafted"] >= stats["num_drafting_iterations"] > 0
