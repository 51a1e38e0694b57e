"""Sequential heads run at once, against the same heads run one by one by the host."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams

from vllm_tokenswift.cuda.heads.beam_graph import HeadBeamGraphs
from vllm_tokenswift.cuda.sampling.tree_sampler import CUDATreeSampler
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.engine.draft_request import HeadRequest
from vllm_tokenswift.engine.head_drafter import HeadDrafter
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.options import TokenSwiftOptions

VOCAB, HIDDEN = 96, 24
PART = torch.arange(2, 90, 2)


class Target(torch.nn.Module):
    """Embedding and LM head of a target, as vLLM's models offer them."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.lm_head = torch.randn(VOCAB, HIDDEN, generator=generator)

    def to_device(self, device: torch.device) -> "Target":
        self.embedding, self.lm_head = self.embedding.to(device), self.lm_head.to(device)
        return self

    def embed_input_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding[tokens]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.lm_head.T


def sequential_heads(generator: torch.Generator) -> DraftHeads:
    heads = DraftHeads("sequential", 3, HIDDEN, 1e-6, width=40, vocabulary=PART)
    for weight in heads.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.5
    for layer in heads.layers:
        layer.post_layernorm.weight.data.mul_(1.6)  # sure enough to be followed further down
    return heads


def requests_of(tree_sampler: CUDATreeSampler) -> None:
    """One of every kind that a head beam serves, by name."""
    penalty = {"penalty_theta": 1.3, "penalty_window": 8}
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0},
        "seeded": {"temperature": 1, "seed": 5},
        "penalised": {"temperature": 0.7, "min_p": 0.1, "seed": 6, "extra_args": penalty},
        "greedy and penalised": {"temperature": 0, "extra_args": penalty},
    }
    for name, kind in kinds.items():
        generator = torch.Generator().manual_seed(kind["seed"]) if "seed" in kind else None
        prompt = list(range(4, 20)) if "extra_args" in kind else [1, 2, 3]
        tree_sampler.add_request(name, SamplingParams(**kind), prompt, [], generator)


def head_drafts(device: torch.device, at_once: bool) -> HeadDrafter:
    generator = torch.Generator().manual_seed(1)
    target = Target(generator).to_device(device)
    heads = sequential_heads(generator).to(device)
    options = TokenSwiftOptions()
    tree_sampler = CUDATreeSampler(VOCAB, device, options)
    requests_of(tree_sampler)

    def make_head_beam(heads: Any, part: Any, lm_rows: Any, least: float) -> HeadBeamGraphs | None:
        if not at_once:
            return None
        return HeadBeamGraphs(heads, part, lm_rows, target.embed_input_ids, least, max_requests=4)

    runner: Any = SimpleNamespace(
        model=target,
        tree_sampler=tree_sampler,
        options=options,
        heads=heads,
        model_config=SimpleNamespace(get_hidden_size=lambda: HIDDEN, dtype=torch.float32),
        device=device,
        make_head_beam=make_head_beam,
    )
    return HeadDrafter(runner)


@torch.inference_mode()
def candidates(
    drafts: HeadDrafter,
    req_ids: list[str],
    device: torch.device,
    with_own: bool,
    seed: int = 0,
    blind: bool = False,
) -> list[HeadProposals]:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(len(req_ids), HIDDEN, generator=generator).to(device)
    own = torch.randn(len(req_ids), HIDDEN, generator=generator).to(device) if with_own else None
    tree_sampler = drafts.tree_sampler
    requests = []
    for number, req_id in enumerate(req_ids):
        gumbel_noise = None if blind else tree_sampler.noise_of(req_id)
        requests.append(HeadRequest(req_id, 10 + number, gumbel_noise))
    return drafts.candidates(requests, own, start)


def assert_alike(found: HeadProposals, expected: HeadProposals) -> None:
    assert found.tokens == expected.tokens
    assert found.below == expected.below
    assert found.free == expected.free
    for row, wanted in zip(found.probabilities, expected.probabilities, strict=True):
        assert row == pytest.approx(wanted, rel=1e-4, abs=1e-7)


KINDS = ["greedy", "seeded", "penalised", "greedy and penalised"]


@pytest.mark.parametrize("with_own", [False, True])
@pytest.mark.parametrize("req_ids", [["greedy"], ["seeded"], KINDS[1:], KINDS])
def test_a_head_beam_finds_what_heads_find_one_by_one(
    req_ids: list[str], with_own: bool, device: torch.device
) -> None:
    at_once, one_by_one = head_drafts(device, True), head_drafts(device, False)
    num_rows = set()
    for seed in range(4):
        found = candidates(at_once, req_ids, device, with_own, seed, blind=True)
        expected = candidates(one_by_one, req_ids, device, with_own, seed, blind=True)
        for a, b in zip(found, expected, strict=True):
            assert_alike(a, b)
            num_rows.add(len(a.tokens))
        assert {a.num_passes for a in found} == {1}
    assert max(num_rows) > 3  # paths fork
    assert len(num_rows) > 1  # and end


@pytest.mark.parametrize("req_id", ["seeded", "penalised"])
def test_chances_go_by_probability_and_noise(req_id: str, device: torch.device) -> None:
    drafts = head_drafts(device, True)
    power = 0.5 if req_id == "penalised" else 1.0  # it has min-p
    for _ in range(3):
        [found] = candidates(drafts, [req_id], device, with_own=False)
        assert found.sees_noise
        start = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(0)).to(device)
        part, heads = drafts._part, drafts.heads
        assert part is not None
        assert heads is not None
        _, read = heads.run_head(0, start, drafts._embedded([10]))
        scales = part.scales(drafts.tree_sampler.states([req_id]))
        likely = part.probabilities(drafts._own_logits(read), scales)[0].double().cpu()
        gumbel_noise = drafts.tree_sampler.noise_of(req_id)
        assert gumbel_noise is not None
        tokens = part.tokens.tolist()
        likely /= torch.tensor([gumbel_noise.noise(0, token) for token in tokens]).double() ** power
        likely /= likely.sum()
        top = likely.topk(len(found.tokens[0]))
        assert found.tokens[0] == [tokens[place] for place in top.indices.tolist()]
        assert found.probabilities[0] == pytest.approx(top.values.tolist(), rel=1e-3)
        drafts.tree_sampler.commit_tokens(req_id, [7])


def test_the_noise_of_the_coming_positions_decides_which_paths_are_followed(
    device: torch.device,
) -> None:
    drafts = head_drafts(device, True)
    by_position = set()
    for _ in range(5):
        [found] = candidates(drafts, ["seeded"], device, with_own=False)
        assert found.below is not None
        by_position.add(str(found.below))
        drafts.tree_sampler.commit_tokens("seeded", [7])
    assert len(by_position) > 1


@torch.inference_mode()
@pytest.mark.parametrize("asked", [KINDS, KINDS[1:3], KINDS[:1], KINDS[3:]])
def test_any_of_those_whose_heads_began_early_may_be_asked_about(
    asked: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    early, alone = head_drafts(device, True), head_drafts(device, True)
    start = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2)).to(device)
    requests = [HeadRequest(name, 10 + i, None) for i, name in enumerate(KINDS)]
    early.launch_free(requests, start)
    # A second search would be seen.
    monkeypatch.setattr(early, "_launch", lambda *_: pytest.fail("launched once more"))
    rows = [KINDS.index(name) for name in asked]
    some = [requests[row] for row in rows]
    found = early.candidates(some, None, start[rows])
    for a, b in zip(found, alone.candidates(some, None, start[rows]), strict=True):
        assert_alike(a, b)


@torch.inference_mode()
def test_heads_below_a_draft_pass_do_not_take_what_began_without_it(device: torch.device) -> None:
    early, alone = head_drafts(device, True), head_drafts(device, True)
    start, own = torch.randn(2, 1, HIDDEN, generator=torch.Generator().manual_seed(3)).to(device)
    request = HeadRequest("greedy", 10, None)
    early.launch_free([request], start)
    [found] = early.candidates([request], own, start)
    assert_alike(found, *alone.candidates([request], own, start))


def test_batches_too_large_and_requests_of_another_kind_go_from_head_to_head(
    device: torch.device,
) -> None:
    drafts = head_drafts(device, True)
    five = candidates(drafts, [*KINDS, "seeded"], device, with_own=False)
    assert five[1].num_passes > 1
    drafts.tree_sampler.add_request(
        "biased", SamplingParams(logit_bias={4: 3.0}), [1, 2, 3], [], None
    )
    [biased] = candidates(drafts, ["biased"], device, with_own=False)
    assert biased.num_passes > 1 or len(biased.tokens) == 1


def test_a_head_beam_can_be_timed_alone(device: torch.device) -> None:
    assert head_drafts(device, True).dummy_run()
