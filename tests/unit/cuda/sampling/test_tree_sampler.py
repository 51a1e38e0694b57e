"""The tree sampler on CUDA against the general one where nothing is left to chance; its noise."""

from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams

from vllm_tokenswift.cuda.sampling import penalty_kernel as penalty
from vllm_tokenswift.cuda.sampling import sample_kernel
from vllm_tokenswift.cuda.sampling import tree_sampler as sampler_module
from vllm_tokenswift.cuda.sampling.row_parameters import path_tokens
from vllm_tokenswift.cuda.sampling.seed_noise import SeedNoise
from vllm_tokenswift.cuda.sampling.tree_sampler import CUDATreeSampler
from vllm_tokenswift.draft.top_tokens import TOP_K, TOP_K_COLUMNS
from vllm_tokenswift.sampling.request_parameters import PlainDefaults
from vllm_tokenswift.sampling.tree_sampler import TreeSampler, VerifyRows
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

VOCAB = 300
WINDOW = {"penalty_theta": 1.5, "penalty_window": 6}
TREE = DraftTree.build([5, 6, 7, 8, 6], [0, 1, 0, 3, 3])
"""Paths: 5 6, 7 8 and 7 6."""


def tree_samplers(device: torch.device) -> tuple[CUDATreeSampler, TreeSampler]:
    return (
        CUDATreeSampler(VOCAB, device, PlainDefaults()),
        TreeSampler(VOCAB, torch.device("cpu"), PlainDefaults()),
    )


def add(tree_sampler: TreeSampler, req_id: str, params: SamplingParams) -> None:
    generator = None
    if params.seed is not None:
        generator = torch.Generator().manual_seed(params.seed)
    tree_sampler.add_request(req_id, params, [1, 2, 3, 250], [4, 9], generator)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"extra_args": WINDOW},
        {"repetition_penalty": 1.3, "extra_args": WINDOW},
        {"bad_words": ["x"], "logit_bias": {7: 3.0}},
        {"min_tokens": 4, "stop_token_ids": [5, 7]},
    ],
)
def test_greedy_requests_emit_what_the_general_tree_sampler_emits(
    params: dict[str, object], device: torch.device
) -> None:
    sampling_params = SamplingParams(temperature=0.0, **params)  # type: ignore[arg-type]
    sampling_params._bad_words_token_ids = [[5, 6], [8]] if "bad_words" in params else None
    fast, general = tree_samplers(device)
    groups = [
        VerifyRows("a", TREE),
        VerifyRows("b", EMPTY_TREE, discard=True),
        VerifyRows("a", EMPTY_TREE),
        VerifyRows("c", DraftTree.chain([5, 6, 7])),
    ]
    for tree_sampler in (fast, general):
        for req_id in "abc":
            add(tree_sampler, req_id, sampling_params)
    for seed in range(8):
        logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(seed))
        logits[:, 5:10] += 3.0  # draft tokens are likely, so that walks go on
        actual, _ = fast.sample_trees(logits.to(device), groups)
        expected, _ = general.sample_trees(logits, groups)
        assert actual == expected


@pytest.mark.parametrize("bias", [None, {0: 0.0}], ids=["kernels", "general"])
def test_what_is_likeliest_is_said_at_every_node_that_was_verified(
    bias: dict[int, float] | None, device: torch.device
) -> None:
    params = SamplingParams(temperature=0.8, min_p=0.05, seed=7, logit_bias=bias, extra_args=WINDOW)
    fast, general = tree_samplers(device)
    for tree_sampler in (fast, general):
        add(tree_sampler, "a", params)
        add(tree_sampler, "b", params)
    chain, dead = DraftTree.chain([5, 6]), frozenset([1, 2])
    groups = [
        VerifyRows("a", TREE, wants_top_k=True),
        VerifyRows("b", EMPTY_TREE),
        VerifyRows("b", EMPTY_TREE, discard=True, wants_top_k=True),
        VerifyRows("b", chain, dead_nodes=dead, wants_top_k=True),
    ]
    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    (whole, silent, _, beside), _ = fast.sample_trees(logits.to(device), groups)
    (expected, _, _, _), _ = general.sample_trees(logits, groups)
    assert whole.top_k is not None
    assert expected.top_k is not None
    assert beside.top_k is not None
    assert silent.top_k is None
    assert whole.top_k.shape == (6, TOP_K_COLUMNS)
    assert (whole.top_k[:, 0] >= 0).all()
    assert (beside.top_k[:, 0] >= 0).tolist() == [True, False, False]
    walked = [0, *expected.nodes]
    ids = expected.top_k[walked, :TOP_K]
    assert whole.top_k[walked, :TOP_K].tolist() == ids.tolist()
    np.testing.assert_allclose(
        whole.top_k[walked].view(np.float32)[:, TOP_K:][ids >= 0],
        expected.top_k[walked].view(np.float32)[:, TOP_K:][ids >= 0],
        rtol=1e-4,
    )


def test_dead_nodes_end_the_walk(device: torch.device) -> None:
    fast, _ = tree_samplers(device)
    add(fast, "a", SamplingParams(temperature=0.0))
    logits = torch.zeros(6, VOCAB)
    logits[0, 7] = logits[3, 8] = logits[4, 11] = 1.0
    [alive], _ = fast.sample_trees(logits.to(device), [VerifyRows("a", TREE)])
    [dead], _ = fast.sample_trees(
        logits.to(device), [VerifyRows("a", TREE, dead_nodes=frozenset([4]))]
    )
    assert (alive.nodes, alive.tokens) == ([3, 4], [7, 8, 11])
    assert (dead.nodes, dead.tokens) == ([3], [7, 8])


def test_drafts_do_not_change_what_a_seeded_request_samples(device: torch.device) -> None:
    """Logits that depend on nothing but the depth: step by step, and as a chain of drafts."""
    params = SamplingParams(temperature=0.8, min_p=0.05, seed=7, extra_args=WINDOW)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    step_by_step, _ = tree_samplers(device)
    add(step_by_step, "a", params)
    text: list[int] = []
    for depth in range(5):
        [accepted], _ = step_by_step.sample_trees(
            logits[depth : depth + 1], [VerifyRows("a", EMPTY_TREE)]
        )
        step_by_step.commit_tokens("a", accepted.tokens)
        text += accepted.tokens
    at_once, _ = tree_samplers(device)
    add(at_once, "a", params)
    [accepted], _ = at_once.sample_trees(logits, [VerifyRows("a", DraftTree.chain(text[:4]))])
    assert accepted.tokens == text


def test_general_rows_sample_with_the_same_noise(device: torch.device) -> None:
    """A bias of nothing makes a request general; its samples must not notice."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(3)).to(device)
    emitted = []
    for bias in (None, {0: 0.0}):
        fast, _ = tree_samplers(device)
        add(fast, "a", SamplingParams(temperature=0.7, min_p=0.02, seed=3, logit_bias=bias))
        emitted.append(
            [fast.sample_trees(logits[i : i + 6], [VerifyRows("a", TREE)])[0] for i in (0,)]
        )
    assert emitted[0] == emitted[1]


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0, "extra_args": WINDOW},
        {"temperature": 0.7, "min_p": 0.1, "extra_args": WINDOW},
        {"temperature": 0.7, "top_k": 20},
    ],
)
def test_draft_distributions_are_those_of_the_general_tree_sampler(
    params: dict[str, object], device: torch.device
) -> None:
    fast, _ = tree_samplers(device)
    general = TreeSampler(VOCAB, device, PlainDefaults())  # vLLM's top-k runs where the platform is
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(5)).to(device)
    for tree_sampler in (fast, general):
        add(tree_sampler, "a", SamplingParams(**params))  # type: ignore[arg-type]
    actual = fast.draft_probabilities(logits, ["a", "a"])
    torch.testing.assert_close(actual, general.draft_probabilities(logits, ["a", "a"]))


def test_processed_logits_are_the_whole_distribution(device: torch.device) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(6))
    params = SamplingParams(temperature=0.7, min_p=0.2, seed=1, logprobs=3)
    found = []
    for cls, where in ((CUDATreeSampler, device), (TreeSampler, torch.device("cpu"))):
        tree_sampler = cls(VOCAB, where, PlainDefaults(), logprobs_mode="processed_logprobs")
        add(tree_sampler, "a", params)
        _, logprobs = tree_sampler.sample_trees(logits.to(where), [VerifyRows("a", EMPTY_TREE)])
        assert logprobs is not None
        found.append(logprobs.logprobs[:, 1:].cpu())
    torch.testing.assert_close(found[0], found[1])


def test_a_seed_of_any_int64_is_kept(device: torch.device) -> None:
    for seed in (0, 7, -1, -(2**63), 2**63 - 1):
        generator = torch.Generator()
        generator.manual_seed(seed)
        assert SeedNoise(generator).seed == seed


def test_paths_are_those_of_the_tree() -> None:
    assert path_tokens(TREE).tolist() == [[0, 0], [5, 0], [5, 6], [7, 0], [7, 8], [7, 6]]
    chain = DraftTree.chain([3, 4])
    assert path_tokens(chain).tolist() == [[0, 0], [3, 0], [3, 4]]
    assert path_tokens(EMPTY_TREE).tolist() == [[0]]
    assert np.all(path_tokens(DraftTree.build([-1, 2, 3], [0, 0, 1])) >= 0)


def test_warming_up_leaves_no_request_behind(device: torch.device) -> None:
    fast, _ = tree_samplers(device)
    logits = torch.zeros(2, VOCAB, device=device)
    fast.warm_up(logits)
    with pytest.raises(KeyError):
        fast.states(["tokenswift warm-up"])
    assert not logits.any()  # the caller's logits are left unchanged


PENALISED = SamplingParams(min_p=0.1, seed=3, extra_args=WINDOW)


def test_whatever_the_number_of_rows_kernels_find_their_arrays_at_multiples_of_16_bytes(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton compiles a kernel anew for every other pattern of such addresses."""
    tree_sampler, _ = tree_samplers(device)
    add(tree_sampler, "a", PENALISED)
    seen = []

    def recorded(name: str) -> None:
        original = getattr(sampler_module, name)

        def record(*args: Any, **kwargs: Any) -> Any:
            groups = [
                arg if isinstance(arg, tuple) else (arg,) for arg in (*args, *kwargs.values())
            ]
            tensors = [arg for group in groups for arg in group if torch.is_tensor(arg)]
            assert len(tensors) == 8  # logits, six of the rows', and top-k or theta
            seen.append([tensor.data_ptr() % 16 for tensor in tensors])
            return original(*args, **kwargs)

        monkeypatch.setattr(sampler_module, name, record)

    recorded("sample_rows")
    recorded("penalise_windows")
    for num_drafts in range(9):
        logits = torch.zeros(1 + num_drafts, VOCAB, device=device)
        group = VerifyRows("a", DraftTree.chain(range(num_drafts)), wants_top_k=True)
        tree_sampler.sample_trees(logits, [group])
        tree_sampler.draft_probabilities(logits, ["a"] * len(logits))
    assert len(seen) == 3 * 9
    assert not any(map(any, seen))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter compiles nothing")
def test_after_warming_up_no_number_of_rows_compiles_anything(device: torch.device) -> None:
    kernels = [
        kernel
        for module in (sample_kernel, penalty)
        for kernel in vars(module).values()
        if hasattr(kernel, "device_caches")
    ]

    def num_compiled() -> list[int]:
        return [len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values()]

    tree_sampler, _ = tree_samplers(device)
    tree_sampler.warm_up(torch.zeros(2, VOCAB, device=device))
    warm = num_compiled()
    assert sum(warm) > 4
    add(tree_sampler, "a", PENALISED)
    add(tree_sampler, "b", SamplingParams(seed=3))
    for num_drafts in range(33):
        for req_id in "ab":
            group = VerifyRows(req_id, DraftTree.chain(range(num_drafts)), wants_top_k=True)
            tree_sampler.sample_trees(torch.zeros(1 + num_drafts, VOCAB, device=device), [group])
    assert num_compiled() == warm


def test_a_seeded_request_samples_by_the_noise_that_drafts_are_told_of(
    device: torch.device,
) -> None:
    fast, _ = tree_samplers(device)
    add(fast, "a", SamplingParams(temperature=1.0, seed=11))
    for seed in range(4):
        logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed))
        # A chain of what the noise says is accepted to its end: every depth is compared.
        told = []
        gumbel_noise = fast.noise_of("a")
        assert gumbel_noise is not None
        for depth, row in enumerate(logits.double().softmax(-1).tolist()):
            noise = [gumbel_noise.noise(depth, token) for token in range(VOCAB)]
            told.append(min(range(VOCAB), key=lambda x, n=noise, p=row: n[x] / p[x]))
        [accepted], _ = fast.sample_trees(
            logits.to(device), [VerifyRows("a", DraftTree.chain(told[:3]))]
        )
        assert accepted.tokens == told
        fast.commit_tokens("a", accepted.tokens)
