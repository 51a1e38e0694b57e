"""Random trees of several sizes in one launch, against the eager twin and dense attention."""

import math

import numpy as np
import pytest
import torch

from vllm_tokenswift.cuda.attention.tree_kernel import (
    pack_ancestors,
    tree_attention,
    tree_attention_reference,
    unpack_ancestors,
)
from vllm_tokenswift.tree import DraftTree

# A result rounded once to the output type, from float32 sums of a few dozen terms; the
# weights are rounded to the value's type before the second product, as flash attention does.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def random_tree(n: int, rng: np.random.Generator) -> DraftTree:
    parents = [int(rng.integers(max(0, i - 6), i + 1)) for i in range(n)]
    return DraftTree.build(rng.integers(0, 100, n).astype(np.int32), parents)


def random_case(
    sizes: list[int],
    heads: tuple[int, int],
    head_size: int,
    dtype: torch.dtype,
    device: torch.device,
    num_slices: int = 1,
) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(sum(sizes) + head_size)
    generator = torch.Generator().manual_seed(head_size)
    trees = [random_tree(n, rng) for n in sizes]
    rows = sum(n + 1 for n in sizes)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    starts = torch.tensor([0, *np.cumsum([n + 1 for n in sizes])], dtype=torch.int32)
    return {
        "query": normal(rows, heads[0], head_size),
        "key": normal(rows, heads[1], head_size),
        "value": normal(rows, heads[1], head_size),
        "prefix_out": normal(num_slices, rows, heads[0], head_size),
        "prefix_lse": torch.randn(num_slices, heads[0], rows, generator=generator).to(device),
        "tree_start_loc": starts.to(device),
        "ancestors": torch.from_numpy(np.concatenate([pack_ancestors(t) for t in trees])).to(
            device
        ),
    }


def run_both(case: dict[str, torch.Tensor], **launch: int) -> tuple[torch.Tensor, torch.Tensor]:
    scale = case["query"].shape[-1] ** -0.5
    starts = case["tree_start_loc"].tolist()
    max_rows = max(np.diff(starts))
    expected = torch.full_like(case["query"], math.nan)
    tree_attention_reference(**case | {"tree_start_loc": starts}, out=expected, scale=scale)
    actual = torch.full_like(case["query"], math.nan)
    tree_attention(**case, out=actual, scale=scale, max_rows=int(max_rows), **launch)
    return actual, expected


def test_ancestor_words_hold_the_mask_of_the_tree() -> None:
    tree = random_tree(128, np.random.default_rng(3))
    packed = torch.from_numpy(pack_ancestors(tree))
    assert torch.equal(unpack_ancestors(packed, 129), torch.from_numpy(tree.mask()))


def test_tokens_before_the_root_are_a_chain_that_every_node_sees() -> None:
    tree = random_tree(20, np.random.default_rng(4))
    seen = unpack_ancestors(torch.from_numpy(pack_ancestors(tree, rows_before=5)), 26)
    expected = torch.ones(26, 26, dtype=torch.bool).tril()
    expected[5:, 5:] = torch.from_numpy(tree.mask())
    assert torch.equal(seen, expected)


def test_a_tree_of_more_than_128_drafts_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 128"):
        pack_ancestors(DraftTree.chain([0] * 129))


# Triton's interpreter multiplies bfloat16 by its bit patterns, so that type needs the GPU.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "head_size"),
    # groups 1, 3 (rows of a node split over blocks), 4 and 8; padded and full head sizes
    [((2, 2), 64), ((3, 1), 96), ((8, 2), 128), ((8, 1), 80), ((2, 1), 256)],
)
def test_the_kernel_equals_its_eager_twin(
    heads: tuple[int, int], head_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = random_case([12, 0, 33], heads, head_size, dtype, device)
    actual, expected = run_both(case)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("launch", [(16, 16), (64, 32), (16, 64)])
def test_every_block_shape_gives_the_same(launch: tuple[int, int], device: torch.device) -> None:
    case = random_case([128, 63], (2, 1), 64, torch.float32, device)
    actual, expected = run_both(case, block_m=launch[0], block_n=launch[1])
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("empty", [math.inf, -math.inf])
def test_an_empty_prefix_counts_for_nothing_whatever_its_state_holds(
    empty: float, device: torch.device
) -> None:
    case = random_case([9], (4, 2), 64, torch.float32, device)
    case["prefix_lse"].fill_(empty)
    case["prefix_out"].fill_(math.nan)
    actual, expected = run_both(case)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    # with no prefix the bonus token sees itself only
    repeated = case["value"][0].repeat_interleave(2, 0)
    torch.testing.assert_close(actual[0], repeated, atol=2e-5, rtol=2e-5)


def test_slices_of_a_prefix_together_give_attention_over_the_whole_of_it(
    device: torch.device,
) -> None:
    """Dense attention over prefix and path, computed from scratch, is the yardstick."""
    sizes, (num_heads, num_kv_heads), head_size = [20], (4, 2), 64
    case = random_case(sizes, (num_heads, num_kv_heads), head_size, torch.float32, device, 3)
    rows, scale = case["query"].shape[0], head_size**-0.5
    generator = torch.Generator().manual_seed(1)
    prefix_k = torch.randn(30, num_kv_heads, head_size, generator=generator).to(device)
    prefix_v = torch.randn(30, num_kv_heads, head_size, generator=generator).to(device)
    query = case["query"].transpose(0, 1)  # [heads, rows, head_size]
    prefix_k, prefix_v = (x.transpose(0, 1).repeat_interleave(2, 0) for x in (prefix_k, prefix_v))
    # slices of 12 and 18 tokens, and an empty one
    case["prefix_lse"].fill_(-math.inf)
    for i, part in enumerate([slice(0, 12), slice(12, 30)]):
        scores = query @ prefix_k[:, part].transpose(1, 2) * scale
        case["prefix_lse"][i] = scores.logsumexp(-1)
        case["prefix_out"][i] = (scores.softmax(-1) @ prefix_v[:, part]).transpose(0, 1)
    actual, _ = run_both(case)

    key, value = (
        torch.cat([p, case[name].transpose(0, 1).repeat_interleave(2, 0)], dim=1)
        for p, name in ((prefix_k, "key"), (prefix_v, "value"))
    )
    visible = torch.ones(rows, 30 + rows, dtype=torch.bool, device=device)
    visible[:, 30:] = unpack_ancestors(case["ancestors"], rows)
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=visible)
    torch.testing.assert_close(actual, dense.transpose(0, 1), atol=2e-5, rtol=2e-5)


def test_the_result_may_overwrite_the_prefix_state(device: torch.device) -> None:
    case = random_case([40, 7], (8, 2), 64, torch.float32, device)
    actual, _ = run_both(case)
    tree_attention(**case, out=case["prefix_out"][0], scale=64**-0.5, max_rows=41)
    assert torch.equal(case["prefix_out"][0], actual)


def test_rows_of_no_tree_are_left_alone(device: torch.device) -> None:
    case = random_case([5, 6, 7], (2, 1), 64, torch.float32, device)
    # the last tree is padding: no rows of it are the launch's
    case["tree_start_loc"][-1] = case["tree_start_loc"][-2]
    out = torch.full_like(case["query"], 7.0)
    tree_attention(**case, out=out, scale=0.125, max_rows=16)
    assert (out[13:] == 7.0).all()
    assert (out[:13] != 7.0).any(-1).all()
