"""Drafts of heads, on the draft pass's hidden state and on the verify pass's own."""

from __future__ import annotations

import pytest
from engine_kit import (
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

PARAMS = [
    SamplingParams(temperature=0, max_tokens=80, ignore_eos=True),
    SamplingParams(temperature=0.6, seed=2, min_p=0.05, max_tokens=80, ignore_eos=True),
]


@pytest.fixture(scope="module", params=["linear", "released"])
def heads(request, tiny_model, tmp_path_factory):
    """Untrained heads: they predict what their input predicts, now and then rightly."""
    made = untrained_heads(request.param, tiny_model)
    return write_heads(made, tiny_model, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("self_draft", ["off", "always"])
def test_tokens_are_plain_vllms_whatever_the_heads_say(tiny_model, heads, self_draft):
    prompts = [prompt_of(20, 0), prompt_of(45, 1)]
    plain = plain_texts(tiny_model, prompts, PARAMS)
    options = {"heads": str(heads), "self_draft": self_draft, "ngram_k": 0, "suffix_max_match": 0}
    with engine(tiny_model, **tokenswift(**options)) as llm:
        assert generate(llm, prompts, PARAMS) == plain
        stats = runner_of(llm).stats
        source = "free_heads" if self_draft == "off" else "heads"
        assert stats.drafted_by_source[source] > 100
        if self_draft == "always":
            # Within the budget the pass reads the whole cache: greedily, it is the target.
            before = stats.as_dict()
            generate(llm, prompts, PARAMS[0])
            drafted, accepted = (
                getattr(stats, name)["self"] - before[name]["self"]
                for name in ("drafted_by_source", "accepted_by_source")
            )
            assert accepted >= 0.95 * drafted > 0
