"""The draft pass really reads a part of the cache, the important part, and leaves no trace."""

from __future__ import annotations

import numpy as np
import torch
from engine_kit import (
    BLOCK,
    cache_after_last_step,
    engine,
    generate,
    prompt_of,
    runner_of,
    tokenswift,
)
from transformers import LlamaForCausalLM
from vllm import SamplingParams

BUDGET = 8 * BLOCK
PROMPT_TOKENS = 900  # several times the budget
PARAMS = SamplingParams(temperature=0.5, seed=3, max_tokens=300, ignore_eos=True)


def recorded_passes(llm):
    """Per draft pass: (tokens in the sequence, logical blocks [layers, blocks], refreshed)."""
    draft_pass = runner_of(llm).tree_drafter.draft_pass
    run, records = draft_pass.run, []

    def recording(rows):
        output = run(rows)
        [blocks] = draft_pass.last.logical_blocks.values()
        records.append((rows[0].num_tokens, blocks, bool(draft_pass.last.refreshed)))
        return output

    draft_pass.run = recording
    return records


def reference_masses(model_path, tokens: list[int]) -> np.ndarray:
    """Attention mass of each block to the last token, from transformers: [layers, blocks]."""
    model = LlamaForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        attentions = model(torch.tensor([tokens]), output_attentions=True).attentions
    masses = []
    for attention in attentions:  # [1, heads, tokens, tokens]
        mass = attention[0, :, -1].sum(dim=0)
        mass = torch.nn.functional.pad(mass, (0, -len(tokens) % BLOCK))
        masses.append(mass.view(-1, BLOCK).sum(dim=1).numpy())
    return np.stack(masses)


def test_the_pass_reads_the_important_blocks_within_its_budget(tiny_model):
    prompt = prompt_of(PROMPT_TOKENS, seed=0)
    options = {"plan": "paper", "self_draft": "always", "budget_tokens": BUDGET, "sink_tokens": 16}
    with engine(tiny_model, max_model_len=2048, **tokenswift(**options)) as llm:
        records = recorded_passes(llm)
        [written] = generate(llm, [prompt], PARAMS)
    tokens = prompt["prompt_token_ids"] + written
    refreshes = [i for i, (_, _, refreshed) in enumerate(records) if refreshed]
    assert len(refreshes) >= 2, "the selection was never renewed"

    selections = []
    for start, stop in zip(refreshes, [*refreshes[1:], len(records)], strict=True):
        ranked_at = records[start][0]
        masses = reference_masses(tiny_model, tokens[:ranked_at])
        recent = (ranked_at - 1) // BLOCK
        for num_tokens, blocks, _ in records[start + 1 : stop]:
            newest = (num_tokens - 1) // BLOCK
            assert blocks.shape[1] * BLOCK <= BUDGET
            assert blocks.shape[1] < newest + 1, "the pass read the whole cache"
            room = BUDGET // BLOCK - 1 - (newest - recent + 1)
            for layer, read in enumerate(blocks):
                by_importance = 1 + np.argsort(-masses[layer, 1:recent], kind="stable")
                expected = {0, *by_importance[:room].tolist(), *range(recent, newest + 1)}
                assert set(read.tolist()) == expected
            selections.append(blocks)
    layers_differ = any((b[0] != b[1]).any() for b in selections)
    assert layers_differ, "every layer read the same blocks"


def test_a_static_table_is_selected_once(tiny_model):
    options = {
        "plan": "paper",
        "self_draft": "always",
        "partial_kv": "static",
        "budget_tokens": BUDGET,
        "sink_tokens": 16,
    }
    with engine(tiny_model, max_model_len=2048, **tokenswift(**options)) as llm:
        records = recorded_passes(llm)
        generate(llm, [prompt_of(PROMPT_TOKENS, seed=0)], PARAMS)
    assert [refreshed for _, _, refreshed in records].count(True) == 1
    assert all(blocks.shape[1] * BLOCK <= BUDGET for _, blocks, _ in records[1:])


def test_a_full_table_is_the_whole_sequence(tiny_model):
    options = {
        "plan": "paper",
        "self_draft": "always",
        "partial_kv": "full",
        "budget_tokens": BUDGET,
    }
    with engine(tiny_model, max_model_len=2048, **tokenswift(**options)) as llm:
        records = recorded_passes(llm)
        generate(llm, [prompt_of(PROMPT_TOKENS, seed=0)], PARAMS)
    assert all(b.shape[1] == -(-num_tokens // BLOCK) for num_tokens, b, _ in records)


def test_after_verification_the_cache_is_that_of_a_fresh_prefill(tiny_model):
    """Nothing of the approximate passes, nor of rejected branches, survives in the full cache."""
    prompt = prompt_of(PROMPT_TOKENS, seed=0)
    options = {"plan": "paper", "self_draft": "always", "budget_tokens": BUDGET, "ngram_n": 6}
    with engine(tiny_model, max_model_len=2048, **tokenswift(**options)) as llm:
        drafted = cache_after_last_step(llm)
        [written] = generate(llm, [prompt], PARAMS)
        assert runner_of(llm).stats.tokens_moved > 0
    fresh_prompt = {"prompt_token_ids": (prompt["prompt_token_ids"] + written)[: drafted[0]]}
    with engine(tiny_model, max_model_len=2048) as llm:
        fresh = cache_after_last_step(llm)
        generate(llm, [fresh_prompt], SamplingParams(temperature=0, max_tokens=1))
    num_tokens = drafted[0]
    assert fresh[0] == num_tokens
    full = num_tokens // BLOCK  # whole blocks: the tail of the last one was never written
    difference = (drafted[1][:, :full] - fresh[1][:, :full]).abs().max()
    # float32 rounding of values up to about 5: passes of other shapes sum in another order.
    assert difference < 2e-5
