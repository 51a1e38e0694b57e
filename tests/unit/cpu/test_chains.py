"""Tree attention as chains of vLLM's own CPU kernel, against an eager dense reference.

The kernel, the cache-writing kernel and the cache layout are vLLM's; only the
cutting into chains is ours.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from vllm_tokenswift.cpu import attention_backend as cpu_attention
from vllm_tokenswift.cpu.attention_backend import ChainMetadata, TreeCPUAttentionImpl
from vllm_tokenswift.cpu.chains import cut_into_chains
from vllm_tokenswift.engine.step_trees import RequestTree
from vllm_tokenswift.tree import DraftTree

HEAD_DIM = 64


def make_impl(heads: int, kv_heads: int) -> TreeCPUAttentionImpl:
    impl = TreeCPUAttentionImpl.__new__(TreeCPUAttentionImpl)
    vars(impl).update(
        num_heads=heads, head_size=HEAD_DIM, scale=HEAD_DIM**-0.5, num_kv_heads=kv_heads,
        logits_soft_cap=0, alibi_slopes=None, sliding_window=-1, kv_cache_dtype="auto",
        attn_type="decoder", sinks=None, use_zentorch_sdpa=False,
        kv_sharing_target_layer_name=None,
    )  # fmt: skip
    return impl


def dense(q, k, v, positions_seen):  # q [heads, d]; k, v [tokens, kv_heads, d]
    group = q.shape[0] // k.shape[1]
    k = k[positions_seen].repeat_interleave(group, dim=1).double()
    v = v[positions_seen].repeat_interleave(group, dim=1).double()
    scores = torch.einsum("hd,thd->ht", q.double(), k) * HEAD_DIM**-0.5
    return torch.einsum("ht,thd->hd", scores.softmax(-1), v)


def random_tree(rng: np.random.Generator, n: int) -> DraftTree:
    """A random tree in depth-first order."""
    parents: list[int] = []
    path = [0]
    for node in range(1, n + 1):
        keep = int(rng.integers(1, len(path) + 1)) if rng.random() < 0.5 else len(path)
        path = path[:keep]
        parents.append(path[-1])
        path.append(node)
    return DraftTree.build(rng.integers(0, 1000, n), parents)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize("block_size", [32, 64, 128])
@pytest.mark.parametrize("seed", range(3))
def test_chains_equal_dense_tree_attention_in_mixed_batches(
    dtype, heads, kv_heads, block_size, seed
):
    """Prefill chunks, plain decodes, chains and trees in one batch."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    impl = make_impl(heads, kv_heads)
    isa = _get_attn_isa(dtype, block_size, HEAD_DIM)
    layer = SimpleNamespace(isa=isa, _k_scale_float=1.0, _v_scale_float=1.0, layer_name="layer")
    num_blocks, scratch = 96, list(range(96, 160))
    cache = torch.zeros(160, kv_heads, block_size, 2 * HEAD_DIM, dtype=dtype)
    free = list(rng.permutation(np.arange(1, num_blocks)))

    kinds = ["tree", "prefill", "decode", "tree", "chain"]
    rng.shuffle(kinds)
    starts, lens, tables, trees, sequences = [0], [], [], [], []
    width = 400 // block_size + 2
    for row, kind in enumerate(kinds):
        context = int(rng.integers(0, 300))
        n = int(rng.integers(3, 24))
        tree = random_tree(rng, n) if kind == "tree" else DraftTree.chain([0] * n)
        rows = 1 if kind == "decode" else n + 1
        table = np.zeros(width, np.int32)
        need = -(-(context + rows) // block_size)
        table[:need] = [free.pop() for _ in range(need)]
        tables.append(table)
        if kind == "tree":
            trees.append(RequestTree(f"r{row}", row, starts[-1], starts[-1], context, tree))
        starts.append(starts[-1] + rows)
        lens.append(context + rows)
        sequences.append((kind, context, rows, tree))
    total = starts[-1]
    query = torch.randn(total, heads, HEAD_DIM, dtype=dtype)
    key = torch.randn(total, kv_heads, HEAD_DIM, dtype=dtype)
    value = torch.randn(total, kv_heads, HEAD_DIM, dtype=dtype)

    def slots(table, positions):
        return [int(table[p // block_size]) * block_size + p % block_size for p in positions]

    prefixes = []
    for (_, context, rows, _), table, start in zip(sequences, tables, starts, strict=False):
        prefix = torch.randn(2, context, kv_heads, HEAD_DIM, dtype=dtype)
        prefixes.append(prefix)
        mapping = torch.tensor(slots(table, range(context)), dtype=torch.int64)
        if context:
            impl.do_kv_cache_update(layer, prefix[0], prefix[1], cache, mapping)
        linear = torch.tensor(slots(table, range(context, context + rows)), dtype=torch.int64)
        own = slice(start, start + rows)
        impl.do_kv_cache_update(layer, key[own], value[own], cache, linear)

    batch = cut_into_chains(
        trees, np.asarray(starts, np.int32), np.asarray(lens, np.int32), np.stack(tables),
        block_size, scratch,
    )  # fmt: skip
    assert not batch.dead_nodes
    builder = SimpleNamespace(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=dtype, window_size=-1,
        isa=isa, kv_cache_dtype="auto",
    )  # fmt: skip
    query_start_loc = torch.from_numpy(batch.query_start_loc)
    seq_lens = torch.from_numpy(batch.seq_lens)
    metadata = ChainMetadata(
        num_actual_tokens=total,
        max_query_len=int(np.diff(batch.query_start_loc).max()),
        query_start_loc=query_start_loc,
        max_seq_len=int(batch.seq_lens.max()),
        seq_lens=seq_lens,
        block_table=torch.from_numpy(batch.block_table),
        slot_mapping=torch.zeros(total, dtype=torch.int64),
        scheduler_metadata=cpu_attention.scheduler_metadata(builder, query_start_loc, seq_lens),
        tail_copies=batch.tail_copies,
        extra_slots=tuple(torch.from_numpy(slots) for slots in batch.extra_slots),
        kv_caches={layer.layer_name: cache},
    )
    output = torch.zeros(total, heads * HEAD_DIM, dtype=dtype).view(total, heads, HEAD_DIM)
    impl.forward(layer, query, key, value, cache, metadata, output)

    # bfloat16: the kernel keeps probabilities in bfloat16 (8 bits: 2^-8 relative on values < 4).
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    for (kind, context, rows, tree), prefix, start in zip(
        sequences, prefixes, starts, strict=False
    ):
        own = slice(start, start + rows)
        keys = torch.cat([prefix[0], key[own]])
        values = torch.cat([prefix[1], value[own]])
        mask = tree.mask() if kind == "tree" else np.tril(np.ones((rows, rows), bool))
        for i in range(rows):
            seen = [*range(context), *(context + np.flatnonzero(mask[i]))]
            expected = dense(query[start + i], keys, values, seen)
            difference = (output[start + i].double() - expected).abs().max()
            assert difference < tolerance, (kind, i, float(difference))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [16, 32, 64, 128, 256])
def test_keys_are_read_back_from_every_cache_layout(dtype, block_size):
    impl = make_impl(9, 3)
    layer = SimpleNamespace(
        isa=_get_attn_isa(dtype, block_size, HEAD_DIM), _k_scale_float=1.0, _v_scale_float=1.0
    )
    cache = torch.zeros(4, 3, block_size, 2 * HEAD_DIM, dtype=dtype)
    permutation = cpu_attention.key_permutation(impl, layer, cache[3:4])
    keys = torch.randn(block_size, 3, HEAD_DIM, dtype=dtype)
    mapping = torch.arange(block_size) + 2 * block_size
    impl.do_kv_cache_update(layer, keys, torch.randn_like(keys), cache, mapping)
    read = cpu_attention.gather_keys(cache, torch.tensor([2]), permutation)
    assert torch.equal(read[0], keys.transpose(0, 1))
