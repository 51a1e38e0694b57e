"""The same tokens as vLLM without us: real engine, real model, float32."""

from __future__ import annotations

from engine_kit import engine, generate, plan_with, runner_of
from vllm import SamplingParams

from vllm_tokenswift.demo.model import HEADS
from vllm_tokenswift.draft.planner.cost_model import CostModel

PROMPTS = [
    "Write a long story about a lighthouse keeper.",
    "Once upon a time, in a village by the sea,",
    "The quick brown fox",
    "List the first fifty prime numbers:",
    "def quicksort(items):\n",
    "Explain how photosynthesis works, step by step.",
    "A recipe for bread. Ingredients:",
    "Dear Sir or Madam,",
    "1, 2, 3, 4, 5,",
    "The history of Rome began",
    "What is the difference between a list and a tuple in Python?",
    "Breaking news:",
    "He said: 'Never again', and then he said:",
    "In this paper we",
    "SELECT name, age FROM users WHERE",
    "The three laws of robotics are",
    "Monday: rice. Tuesday: soup. Wednesday:",
    "Translate to French: Good morning, my friend.",
    "import numpy as np\nimport torch\n",
    "Q: What is the capital of France?\nA:",
]
PENALTY = {"penalty_theta": 1.1, "penalty_window": 1024}
# As on a GPU: with a CPU's, drafts for twenty requests at once would hardly pay.
CHEAP_ROWS = CostModel(((1, 10.0), (257, 23.0)), heads_ms=0.1)


def test_twenty_prompts_write_the_same_tokens_greedy_seeded_and_penalised(demo_model):
    """The default configuration with the model's heads: 20 prompts x 120 tokens, each three ways.

    Plain vLLM has the penalty as a logits processor.
    """
    common = {"max_tokens": 120, "ignore_eos": True}
    ways = {
        "greedy": [SamplingParams(temperature=0, **common)] * 20,
        "seeded": [
            SamplingParams(temperature=1, min_p=0.1, seed=1000 + i, **common) for i in range(20)
        ],
        "penalised": [
            SamplingParams(temperature=1, min_p=0.1, seed=i, extra_args=PENALTY, **common)
            for i in range(20)
        ],
    }
    arguments = {"max_num_seqs": 20, "kv_cache_memory_bytes": 3 << 29}
    processors = ["vllm_tokenswift.sampling.processors:WindowedPenalty"]
    with engine(demo_model, logits_processors=processors, **arguments) as llm:
        plain = {way: generate(llm, PROMPTS, params) for way, params in ways.items()}
    default = {"method": "tokenswift", "heads": HEADS}
    accepted, moved = {}, 0
    with engine(demo_model, speculative_config=default, **arguments) as llm:
        plan_with(llm, CHEAP_ROWS)
        assert runner_of(llm).num_spec_tokens == 63
        for way, params in ways.items():
            [before] = llm.collective_rpc("tokenswift_stats")
            written = generate(llm, PROMPTS, params)
            [after] = llm.collective_rpc("tokenswift_stats")
            differing = [
                i for i, (a, b) in enumerate(zip(written, plain[way], strict=True)) if a != b
            ]
            assert not differing, f"{way}: prompts {differing} differ from plain vLLM"
            accepted[way] = after["num_accepted_tokens"] - before["num_accepted_tokens"]
            moved += after["tokens_moved"] - before["tokens_moved"]
    assert min(accepted.values()) > 300
    assert sum(accepted.values()) > 2000
    assert moved > 0
