"""The tree sampler against vLLM's own sampler: the same tokens, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from sampling_reference import (
    CPU,
    PlainDecoder,
    TreeDecoder,
    decode_plainly,
    new_generator,
    random_tree,
    tree_logits,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.rejection_sampler import RejectionSampler

from vllm_tokenswift.draft.top_tokens import NO_TOKEN, TOP_K
from vllm_tokenswift.sampling.position_noise import ExponentialSampler
from vllm_tokenswift.sampling.request_parameters import PlainDefaults
from vllm_tokenswift.sampling.tree_sampler import (
    TreeSampler,
    VerifyResult,
    VerifyRows,
    sampled_token_ids,
)
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

VOCAB = 48
NUM_TOKENS = 60
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
STOPS = (7, 11)

PENALTY = {"penalty_theta": 1.3, "penalty_window": 12}


def make_params(
    extra: dict[str, object] | None = None,
    bad_words: list[list[int]] | None = None,
    **given: object,
) -> SamplingParams:
    params = SamplingParams(  # type: ignore[arg-type]
        **{"max_tokens": 200, "extra_args": extra, **given}
    )
    params._bad_words_token_ids = bad_words
    if params.min_tokens:
        params._all_stop_token_ids.update(STOPS)
    return params


SEEDED: dict[str, Callable[[], SamplingParams]] = {
    "plain": lambda: make_params(seed=1),
    "cool": lambda: make_params(seed=2, temperature=0.6),
    "top-k": lambda: make_params(seed=3, top_k=5),
    "top-p": lambda: make_params(seed=4, top_p=0.8),
    "top-k and top-p": lambda: make_params(seed=5, top_k=9, top_p=0.9),
    "min-p": lambda: make_params(seed=6, min_p=0.1),
    "repetition": lambda: make_params(seed=7, repetition_penalty=1.2),
    "presence and frequency": lambda: make_params(
        seed=8, presence_penalty=0.5, frequency_penalty=0.25
    ),
    "logit bias": lambda: make_params(seed=9, logit_bias={2: 3.0, 30: -4.5, 40: 1.25}),
    "bad words": lambda: make_params(
        seed=10, temperature=0.7, bad_words=[[4], [5, 6], [20, 21, 22], [33, 34]]
    ),
    "min tokens": lambda: make_params(seed=11, min_tokens=25),
    "allowed": lambda: make_params(seed=12, allowed_token_ids=list(range(0, 48, 3))),
    "window": lambda: make_params(seed=13, extra=PENALTY),
    "short window": lambda: make_params(seed=14, extra={**PENALTY, "penalty_window": 2}),
    "eta": lambda: make_params(seed=15, extra={"eta_epsilon": 0.02}),
    "everything": lambda: make_params(
        seed=16,
        temperature=0.9,
        top_k=20,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias={1: 2.0},
        bad_words=[[8], [9, 10]],
        min_tokens=30,
        allowed_token_ids=list(range(40)),
        extra={**PENALTY, "eta_epsilon": 0.01, "eta_alpha": 0.3},
    ),
}
GREEDY: dict[str, Callable[[], SamplingParams]] = {
    "greedy": lambda: make_params(temperature=0),
    "greedy with all": lambda: make_params(
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        logit_bias={1: 2.0, 5: -1.0},
        bad_words=[[8], [9, 10]],
        min_tokens=30,
        allowed_token_ids=list(range(40)),
        extra=PENALTY,
    ),
    "greedy with a seed": lambda: make_params(temperature=0, seed=4, extra=PENALTY),
}
EVERY = {**SEEDED, **GREEDY}


def make_tree_sampler(whole_trees: bool = False) -> TreeSampler:
    tree_sampler = TreeSampler(VOCAB, CPU, PlainDefaults())
    tree_sampler._sample_whole_trees = whole_trees
    return tree_sampler


def plant_around(expected: dict[str, list[int]], seed: int):  # type: ignore[no-untyped-def]
    rng = random.Random(seed)

    def plant(req_id: str, output: Sequence[int]) -> DraftTree:
        return random_tree(rng, VOCAB, expected[req_id][len(output) :])

    return plant


@pytest.mark.parametrize("whole_trees", [False, True], ids=["by depth", "whole trees"])
@pytest.mark.parametrize("name", EVERY)
def test_tokens_over_trees_are_those_of_plain_decoding(name: str, whole_trees: bool) -> None:
    expected = decode_plainly(EVERY[name](), PROMPT, NUM_TOKENS + 8, VOCAB)
    decoder = TreeDecoder(make_tree_sampler(whole_trees), plant_around({"r": expected}, seed=5))
    decoder.add("r", EVERY[name](), PROMPT)
    steps = 0
    while len(decoder.outputs["r"]) < NUM_TOKENS:
        decoder.step(["r"])
        steps += 1
    assert decoder.outputs["r"] == expected[: len(decoder.outputs["r"])]
    assert steps < 0.7 * NUM_TOKENS, "the trees must have been walked, not only their roots"


@pytest.mark.parametrize("whole_trees", [False, True], ids=["by depth", "whole trees"])
def test_tokens_of_a_request_in_a_mixed_batch_are_those_it_has_alone(whole_trees: bool) -> None:
    expected = {
        name: decode_plainly(make(), PROMPT[: 1 + i % 8], NUM_TOKENS + 8, VOCAB)
        for i, (name, make) in enumerate(EVERY.items())
    }
    decoder = TreeDecoder(make_tree_sampler(whole_trees), plant_around(expected, seed=6))
    for i, (name, make) in enumerate(EVERY.items()):
        decoder.add(name, make(), PROMPT[: 1 + i % 8])
    unfinished = list(EVERY)
    order = random.Random(7)
    while unfinished:
        order.shuffle(unfinished)
        decoder.step(unfinished)
        unfinished = [n for n in unfinished if len(decoder.outputs[n]) < NUM_TOKENS]
    for name, output in decoder.outputs.items():
        assert output == expected[name][: len(output)], name


@pytest.mark.parametrize("name", ["everything", "window", "greedy with all"])
def test_a_preempted_request_goes_on_as_if_nothing_had_happened(name: str) -> None:
    expected = decode_plainly(EVERY[name](), PROMPT, NUM_TOKENS + 8, VOCAB)
    tree_sampler = make_tree_sampler(whole_trees=True)  # this way noise is left over at every step
    decoder = TreeDecoder(tree_sampler, plant_around({"r": expected}, seed=8))
    decoder.add("r", EVERY[name](), PROMPT)
    generator = new_generator(EVERY[name]())
    while len(decoder.outputs["r"]) < NUM_TOKENS:
        decoder.step(["r"])
        tree_sampler.add_request("r", EVERY[name](), PROMPT, list(decoder.outputs["r"]), generator)
    assert decoder.outputs["r"] == expected[: len(decoder.outputs["r"])]


def test_a_partial_prefill_emits_nothing_and_draws_no_noise() -> None:
    tree_sampler = make_tree_sampler()
    params = SEEDED["plain"]()
    generator = new_generator(params)
    assert generator is not None
    tree_sampler.add_request("r", params, PROMPT, [], generator)
    before = generator.get_state()
    accepted, logprobs = tree_sampler.sample_trees(
        torch.randn(1, VOCAB), [VerifyRows("r", EMPTY_TREE, discard=True)]
    )
    assert accepted == [VerifyResult([], [])]
    assert logprobs is None
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("whole_trees", [False, True], ids=["by depth", "whole trees"])
def test_the_walk_never_enters_a_dead_node(whole_trees: bool) -> None:
    expected = decode_plainly(GREEDY["greedy"](), PROMPT, 6, VOCAB)
    tree_sampler = make_tree_sampler(whole_trees)
    tree_sampler.add_request("r", GREEDY["greedy"](), PROMPT, [], None)
    tree = DraftTree.chain(expected[:5])
    logits = tree_logits(tree, PROMPT, VOCAB)
    logits[3:] = float("nan")
    accepted, _ = tree_sampler.sample_trees(
        logits, [VerifyRows("r", tree, dead_nodes=frozenset({3, 4, 5}))]
    )
    assert accepted == [VerifyResult([1, 2], expected[:3])]


@pytest.mark.parametrize("whole_trees", [False, True], ids=["by depth", "whole trees"])
def test_the_likeliest_are_said_where_a_hearing_request_was_sampled(whole_trees: bool) -> None:
    """By vLLM's penalty and min-p, at each node of the walk and nowhere else."""
    params = make_params(seed=3, temperature=0.7, min_p=0.1, repetition_penalty=1.2)
    expected = decode_plainly(params, PROMPT, 3, VOCAB)
    tree_sampler = make_tree_sampler(whole_trees)
    for req_id in ("r", "greedy", "silent"):
        given = GREEDY["greedy"]() if req_id == "greedy" else params
        tree_sampler.add_request(req_id, given, PROMPT, [], new_generator(given))
    tree = DraftTree.build([expected[0], 9, expected[1]], [0, 0, 1])
    one_row = torch.randn(1, VOCAB)
    logits = torch.cat([tree_logits(tree, PROMPT, VOCAB), one_row, one_row])
    groups = [
        VerifyRows("r", tree, wants_top_k=True),
        VerifyRows("greedy", EMPTY_TREE, wants_top_k=True),
        VerifyRows("silent", EMPTY_TREE),
    ]
    (accepted, greedy, silent), _ = tree_sampler.sample_trees(logits, groups)
    assert accepted.tokens == expected
    assert silent.top_k is None
    assert greedy.top_k is not None
    assert (greedy.top_k == NO_TOKEN).all()
    assert accepted.top_k is not None
    text = list(PROMPT)
    for node, path in ((0, []), (1, expected[:1]), (3, expected[:2])):
        seen = torch.tensor([*text, *path]).unique()
        row = logits[node].clone()
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.2, row[seen] * 1.2)
        row = (row / 0.7).softmax(-1)
        row[row < 0.1 * row.max()] = 0.0
        chances, ids = (row / row.sum()).sort(descending=True)
        number = min(int((chances >= 0.01).sum()), TOP_K)
        top_k = accepted.top_k[node]
        assert top_k[:number].tolist() == ids[:number].tolist()
        assert (top_k[number:TOP_K] == NO_TOKEN).all()
        assert top_k.view(np.float32)[TOP_K : TOP_K + number].tolist() == (
            pytest.approx(chances[:number].tolist(), rel=1e-4)
        )
    if not whole_trees:
        assert (accepted.top_k[2] == NO_TOKEN).all()


@pytest.mark.parametrize("whole_trees", [False, True], ids=["by depth", "whole trees"])
def test_stop_tokens_are_out_at_every_draft_position_below_min_tokens(whole_trees: bool) -> None:
    tree_sampler = make_tree_sampler(whole_trees)
    tree_sampler.add_request("r", make_params(temperature=0, min_tokens=5), PROMPT, [1, 2], None)
    tree = DraftTree.chain([20, 21, 22, 23])
    logits = torch.zeros(5, VOCAB)
    logits[torch.arange(5), torch.arange(20, 25)] = 1.0
    logits[:, STOPS[0]] = 2.0  # the model wants to end from the start
    accepted, _ = tree_sampler.sample_trees(logits, [VerifyRows("r", tree)])
    assert accepted == [VerifyResult([1, 2, 3], [20, 21, 22, STOPS[0]])]


@pytest.mark.parametrize("whole_trees", [False, True], ids=["by depth", "whole trees"])
def test_a_bad_word_is_found_across_output_and_drafts(whole_trees: bool) -> None:
    tree_sampler = make_tree_sampler(whole_trees)
    params = make_params(temperature=0, bad_words=[[2, 20, 21], [20, 30, 22]])
    tree_sampler.add_request("r", params, PROMPT, [1, 2], None)
    tree = DraftTree.build([20, 21, 30, 22, 23], [0, 1, 1, 3, 3])
    logits = torch.zeros(6, VOCAB)
    logits[0, 20] = 1.0
    logits[1, 21], logits[1, 30] = 2.0, 1.0  # 2, 20, 21 is forbidden: 30 instead
    logits[3, 22], logits[3, 23] = 2.0, 1.0  # 20, 30, 22 is forbidden: 23 instead
    logits[5, 40] = 1.0
    accepted, _ = tree_sampler.sample_trees(logits, [VerifyRows("r", tree)])
    assert accepted == [VerifyResult([1, 3, 5], [20, 30, 23, 40])]


@pytest.mark.parametrize("whole_trees", [False, True], ids=["by depth", "whole trees"])
def test_placeholders_among_the_drafts_are_rejected(whole_trees: bool) -> None:
    expected = decode_plainly(SEEDED["everything"](), PROMPT, 3, VOCAB)
    tree_sampler = make_tree_sampler(whole_trees)
    params = SEEDED["everything"]()
    tree_sampler.add_request("r", params, PROMPT, [], new_generator(params))
    good = DraftTree.chain(expected[:1])
    logits = torch.cat([tree_logits(good, PROMPT, VOCAB), torch.zeros(2, VOCAB)])
    tree = DraftTree.chain([expected[0], -1, VOCAB])
    accepted, _ = tree_sampler.sample_trees(logits, [VerifyRows("r", tree)])
    assert accepted == [VerifyResult([1], expected[:2])]


def test_logits_are_left_as_they_were() -> None:
    tree_sampler = make_tree_sampler()
    params = SEEDED["everything"]()
    tree_sampler.add_request("r", params, PROMPT, [], new_generator(params))
    logits = torch.randn(1, VOCAB)
    before = logits.clone()
    tree_sampler.sample_trees(logits, [VerifyRows("r", EMPTY_TREE)])
    tree_sampler.draft_probabilities(logits, ["r"])
    assert torch.equal(logits, before)


def test_bfloat16_logits_are_sampled_in_float32_as_vllm_does() -> None:
    tree_sampler = make_tree_sampler()
    params = SEEDED["top-p"]()
    tree_sampler.add_request("r", params, PROMPT, [], new_generator(params))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    accepted, _ = tree_sampler.sample_trees(logits, [VerifyRows("r", EMPTY_TREE)])
    plain = PlainDecoder(VOCAB)
    plain.add("r", SEEDED["top-p"](), PROMPT)
    output = plain.sampler(logits.clone(), plain.batch.sampling_metadata)
    assert accepted[0].tokens == output.sampled_token_ids[0].tolist()


@pytest.mark.parametrize("use_fp64_gumbel", [False, True])
def test_exponential_noise_is_used_as_vllms_native_sampler_uses_it(use_fp64_gumbel: bool) -> None:
    def plain_tokens() -> list[int]:
        decoder = PlainDecoder(VOCAB)
        sampler = decoder.sampler.topk_topp_sampler
        sampler.use_fp64_gumbel = use_fp64_gumbel
        sampler.forward = sampler.forward_native
        decoder.add("r", SEEDED["everything"](), PROMPT)
        for _ in range(NUM_TOKENS + 8):
            decoder.step()
        return decoder.requests["r"].output_token_ids

    expected = plain_tokens()
    tree_sampler = make_tree_sampler(whole_trees=True)
    tree_sampler._noise = ExponentialSampler(VOCAB, CPU, use_fp64_gumbel)
    decoder = TreeDecoder(tree_sampler, plant_around({"r": expected}, seed=9))
    decoder.add("r", SEEDED["everything"](), PROMPT)
    while len(decoder.outputs["r"]) < NUM_TOKENS:
        decoder.step(["r"])
    assert decoder.outputs["r"] == expected[: len(decoder.outputs["r"])]


@pytest.mark.parametrize("name", ["everything", "window"])
def test_drafting_probabilities_are_those_the_target_samples_from(name: str) -> None:
    tree_sampler = make_tree_sampler()
    params = SEEDED[name]()
    tree_sampler.add_request("r", params, PROMPT, [], new_generator(params))
    plain = PlainDecoder(VOCAB)
    plain.sampler.logprobs_mode = "processed_logprobs"
    plain.sampler.topk_topp_sampler.logprobs_mode = "processed_logprobs"
    wanted = SEEDED[name]()
    wanted.logprobs = -1
    plain.add("r", wanted, PROMPT)
    logits = plain.step()
    assert plain.logprobs is not None
    expected = torch.zeros(1, VOCAB).scatter_(
        1, plain.logprobs.logprob_token_ids.long(), plain.logprobs.logprobs.exp()
    )
    torch.testing.assert_close(
        tree_sampler.draft_probabilities(logits, ["r"]), expected, rtol=1e-5, atol=1e-7
    )


def test_drafting_probabilities_come_per_row_with_requests_repeated() -> None:
    tree_sampler = make_tree_sampler()
    tree_sampler.add_request("g", GREEDY["greedy with all"](), PROMPT, [], None)
    tree_sampler.add_request("r", SEEDED["min-p"](), PROMPT, [], None)
    logits = torch.randn(4, VOCAB)
    together = tree_sampler.draft_probabilities(logits, ["g", "r", "g", "r"])
    for row, req_id in enumerate("grgr"):
        alone = tree_sampler.draft_probabilities(logits[row : row + 1], [req_id])
        assert torch.equal(together[row], alone[0])


MODES = ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_are_those_of_plain_decoding(mode: str) -> None:
    names = ["everything", "greedy with all", "min-p"]
    params = {name: EVERY[name]() for name in names}
    params["everything"].logprobs = 3
    params["greedy with all"].logprobs = 1
    plain = PlainDecoder(VOCAB)
    plain.sampler.logprobs_mode = mode  # type: ignore[assignment]
    plain.sampler.topk_topp_sampler.logprobs_mode = mode  # type: ignore[assignment]
    expected: dict[str, list[tuple[list[int], list[float], int]]] = {n: [] for n in names}
    for name in names:
        plain.add(name, params[name], PROMPT)
    for _ in range(20):
        plain.step()
        assert plain.logprobs is not None
        ids, values, ranks = plain.logprobs[:3]
        for i, name in enumerate(names):
            expected[name].append((ids[i].tolist(), values[i].tolist(), int(ranks[i])))
    outputs = {name: plain.requests[name].output_token_ids for name in names}

    tree_sampler = TreeSampler(VOCAB, CPU, PlainDefaults(), logprobs_mode=mode)  # type: ignore[arg-type]
    decoder = TreeDecoder(tree_sampler, plant_around(outputs, seed=10))
    for name in names:
        decoder.add(name, params[name], PROMPT)
    found: dict[str, list[tuple[list[int], list[float], int]]] = {n: [] for n in names}
    while min(map(len, decoder.outputs.values())) < 12:
        decoder.step(names)
        # What vLLM's bookkeeping does with the tree_sampler's answer.
        tokens = sampled_token_ids(decoder.accepted, CPU)
        if tokens.shape[1] == 1:
            assert decoder.logprobs is not None
            lists = decoder.logprobs.tolists()
        else:
            _, parsed = RejectionSampler.parse_output(
                tokens, VOCAB, logprobs_tensors=decoder.logprobs
            )
            assert parsed is not None
            lists = parsed
        for i, name in enumerate(names):
            rows = lists.slice_request(i, len(decoder.accepted[i].tokens))
            for ids, values, rank in zip(
                rows.logprob_token_ids, rows.logprobs, rows.sampled_token_ranks, strict=True
            ):
                found[name].append((ids.tolist(), values.tolist(), int(rank)))
    for name in ["everything", "greedy with all"]:
        width = (params[name].logprobs or 0) + 1
        # Compared where plain decoding has as many: trees may have gone further.
        for ours, plains in zip(found[name], expected[name], strict=False):
            assert ours[2] == plains[2]
            assert ours[1][:width] == plains[1][:width]
            finite = [v > -float("inf") for v in ours[1][:width]]  # ties at -inf have no order
            pairs = zip(ours[0], plains[0], finite, strict=False)
            assert all(a == b for a, b, known in pairs if known)


def test_logprobs_of_listed_tokens_stand_beside_the_likeliest_of_another_request() -> None:
    tree_sampler = make_tree_sampler()
    listing = make_params(temperature=0, logprob_token_ids=[5, 40, 2])
    tree_sampler.add_request("ids", listing, PROMPT, [], None)
    tree_sampler.add_request("top", make_params(temperature=0, logprobs=1), PROMPT, [], None)
    tree_sampler.add_request("none", make_params(temperature=0), PROMPT, [], None)
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    groups = [VerifyRows(r, EMPTY_TREE) for r in ("ids", "top", "none")]
    accepted, found = tree_sampler.sample_trees(logits, groups)
    assert found is not None
    scores = logits.log_softmax(-1)
    sampled = [group.tokens[0] for group in accepted]
    assert found.logprob_token_ids[0].tolist() == [sampled[0], 5, 40, 2]
    assert torch.equal(found.logprobs[0], scores[0, [sampled[0], 5, 40, 2]])
    assert found.logprob_token_ids[1, :2].tolist() == [sampled[1], sampled[1]]
    assert found.logprobs[1].tolist() == [scores[1].max(), scores[1].max()] + [-float("inf")] * 2
    assert found.selected_token_ranks[:2].tolist() == [1, 1]


def test_a_grammar_that_allows_only_the_end_wins_over_min_tokens() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    params = make_params(
        temperature=0, min_tokens=5, structured_outputs=StructuredOutputsParams(regex="a")
    )
    tree_sampler = make_tree_sampler()
    tree_sampler.add_request("r", params, PROMPT, [], None)
    logits = torch.full((1, VOCAB), -float("inf"))
    logits[0, STOPS[0]] = 1.0
    accepted, _ = tree_sampler.sample_trees(logits, [VerifyRows("r", EMPTY_TREE)])
    assert accepted[0].tokens == [STOPS[0]]
    logits[0, 2] = -3.0
    accepted, _ = tree_sampler.sample_trees(logits, [VerifyRows("r", EMPTY_TREE)])
    assert accepted[0].tokens == [2]


def test_state_does_not_grow_with_the_text() -> None:
    tree_sampler = make_tree_sampler(whole_trees=True)
    params = SEEDED["everything"]()
    tree_sampler.add_request("r", params, PROMPT, [], new_generator(params))

    def sizes() -> tuple[int, ...]:
        state = tree_sampler._states["r"]
        assert state.window is not None
        assert state.counts is not None
        return (
            len(state.window._buffer),
            state.counts.in_output.numel(),
            state.counts.in_prompt.numel(),
            len(state.tail),
            len(state.draws.pending),  # type: ignore[attr-defined]
        )

    tree_sampler.commit_tokens("r", [1, 2, 3])
    early = sizes()
    for step in range(3000):
        tree_sampler.commit_tokens("r", [step % VOCAB, 5])
    assert sizes() == early


def test_prompt_embeddings_and_thinking_budgets_are_refused_in_words() -> None:
    tree_sampler = make_tree_sampler()
    with pytest.raises(ValueError, match="prompt embeddings"):
        tree_sampler.add_request("r", make_params(), None, [], None)
    with pytest.raises(ValueError, match="thinking_token_budget is 10"):
        tree_sampler.add_request("r", make_params(thinking_token_budget=10), PROMPT, [], None)
