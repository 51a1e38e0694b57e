"""Conditioned heads along paths in a bfloat16 engine: compiled where torch would do it."""

from __future__ import annotations

import pytest
import torch
from engine_kit import VOCABULARY, engine, generate, prompt_of, runner_of, tokenswift
from vllm import SamplingParams

from vllm_tokenswift.heads import cpu_pass
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.heads.target import TargetShape
from vllm_tokenswift.heads.writing import write_own


def penalised(max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.8,
        seed=2,
        max_tokens=max_tokens,
        ignore_eos=True,
        extra_args={"penalty_theta": 1.2, "penalty_window": 64},
    )


@pytest.fixture(scope="module")
def heads(tiny_model, tmp_path_factory):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_model)
    torch.manual_seed(0)
    made = DraftHeads(
        "conditioned",
        3,
        config.hidden_size,
        config.rms_norm_eps,
        vocabulary=torch.randperm(VOCABULARY)[: VOCABULARY // 2],
    )
    for layer in made.layers:  # sharp enough that a path goes on
        torch.nn.init.normal_(layer.down.weight, std=2.0)
    out = tmp_path_factory.mktemp("conditioned")
    write_own(made, out, target_name="tiny", target=TargetShape.from_config(config), training={})
    return out


@pytest.mark.skipif(not cpu_pass.is_compiled(), reason="installed without a C compiler")
def test_the_compiled_pass_drafts_what_torch_drafts(tiny_model, heads):
    options = {"heads": str(heads), "self_draft": "off"}
    with engine(tiny_model, dtype="bfloat16", **tokenswift(**options)) as llm:
        drafts = runner_of(llm).drafting.head_drafts
        said = []
        original = drafts.candidates

        def both(requests, own, start):
            compiled, torchs = original(requests, own, start), []
            drafts._compiled, kept = None, drafts._compiled
            try:
                torchs = original(requests, own, start)
            finally:
                drafts._compiled = kept
            assert kept is not None
            said.extend(zip(compiled, torchs, strict=True))
            return compiled

        drafts.candidates = both
        prompts = [prompt_of(20, 0), prompt_of(45, 1), prompt_of(9, 2)]
        generate(
            llm, prompts, [penalised(40), SamplingParams(max_tokens=40, seed=3), penalised(40)]
        )
    assert len(said) > 20
    assert max(len(compiled.tokens) for compiled, _ in said) > 1
    pairs = [
        (compiled.tokens[0], compiled.probabilities[0], torchs.tokens[0], torchs.probabilities[0])
        for compiled, torchs in said
    ]
    # Roundings of bfloat16 and int8: near ties may change places, chances hardly move.
    assert sum(a[0] == b[0] for a, _, b, _ in pairs) > 0.95 * len(pairs)
    assert all(abs(p[0] - q[0]) < 0.05 for _, p, _, q in pairs)


@pytest.mark.skipif(not cpu_pass.is_compiled(), reason="installed without a C compiler")
def test_a_batch_too_large_for_the_compiled_pass_is_drafted_for_by_torch(tiny_model, heads):
    options = {"heads": str(heads), "self_draft": "off"}
    with engine(tiny_model, dtype="bfloat16", **tokenswift(**options)) as llm:
        drafts = runner_of(llm).drafting.head_drafts
        batches = []
        original, compiled = drafts.candidates, drafts._compiled
        passes = []

        def counted(requests, *rest):
            before = len(passes)
            made = original(requests, *rest)
            batches.append((len(requests), len(passes) - before))
            return made

        def called(*arguments):
            passes.append(arguments)
            return compiled(*arguments)

        drafts.candidates, drafts._compiled = counted, called
        prompts = [prompt_of(8 + seed, seed) for seed in range(6)]
        generate(llm, prompts, [penalised(10 + 5 * seed) for seed in range(6)])
    largest = cpu_pass.MAX_ROWS // 2  # two paths a request
    assert {size > largest for size, _ in batches} == {False, True}
    assert all((num_passes == 0) == (size > largest) for size, num_passes in batches)
