"""Whole batches through the backend: trees, plain decodes and prefills against dense attention.

vLLM's own attention (which needs a GPU) is stood in for by a dense one over the same paged
cache and metadata; everything of ours is as it runs.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata

from vllm_tokenswift.cuda.attention import backend
from vllm_tokenswift.cuda.attention.backend import (
    TreeAttentionImpl,
    TreeMetadataBuilder,
    TreeTritonMetadata,
)
from vllm_tokenswift.cuda.attention.cache_layout import CacheLayers
from vllm_tokenswift.cuda.attention.tree_attention import CUDATreeAttention
from vllm_tokenswift.cuda.attention.tree_rows import TreeRowBuffers
from vllm_tokenswift.engine.step_trees import RequestTree, StepTrees
from vllm_tokenswift.tree import DraftTree

BLOCK, HEADS, KV_HEADS, SIZE, LAYERS = 16, 4, 2, 32, 2


class DenseImpl:
    """Causal attention of every request over its paged cache."""

    def __init__(self) -> None:
        self.scale, self.num_heads, self.num_kv_heads = SIZE**-0.5, HEADS, KV_HEADS
        self.kv_cache_dtype, self.sliding_window, self.alibi_slopes = "auto", (-1, -1), None
        self.head_size = SIZE
        self.logits_soft_cap, self.sinks, self.attn_type = 0.0, None, AttentionType.DECODER

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *_: Any,
    ) -> torch.Tensor:
        starts, lens = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for i, length in enumerate(lens):
            rows = slice(starts[i], starts[i + 1])
            num_rows = starts[i + 1] - starts[i]
            causal = torch.ones(num_rows, length, dtype=torch.bool, device=query.device)
            causal = causal.tril(length - num_rows)
            blocks = attn_metadata.block_table[i]
            output[rows] = dense(query[rows], kv_cache, blocks, causal)
        return output


class TreeImpl(TreeAttentionImpl, DenseImpl):
    pass


class StockBuilder:
    """Stands for TritonAttentionMetadataBuilder without full graphs."""

    def build(self, common_prefix_len: int, common: Any, fast_build: bool) -> Any:
        return stock_metadata(
            common.query_start_loc, common.seq_lens, common.block_table_tensor, common.slot_mapping
        )


class Builder(TreeMetadataBuilder, StockBuilder):
    metadata_cls = TreeTritonMetadata

    def __init__(self, device: torch.device, full_graphs: bool = False) -> None:
        self.tree_rows = TreeRowBuffers(8, 512, device)
        mode = SimpleNamespace(has_full_cudagraphs=lambda: full_graphs)
        self.vllm_config = SimpleNamespace(
            compilation_config=SimpleNamespace(cudagraph_mode=mode), num_speculative_tokens=9
        )


def stock_metadata(
    starts: torch.Tensor, lens: torch.Tensor, table: torch.Tensor, slots: torch.Tensor
) -> TritonAttentionMetadata:
    nothing = torch.empty(0)
    return TritonAttentionMetadata(
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(starts.diff().max()),
        query_start_loc=starts,
        max_seq_len=int(lens.max()),
        seq_lens=lens,
        block_table=table,
        slot_mapping=slots,
        seq_threshold_3D=0,
        num_par_softmax_segments=1,
        softmax_segm_output=nothing,
        softmax_segm_max=nothing,
        softmax_segm_expsum=nothing,
        causal=True,
    )


def dense(
    query: torch.Tensor, kv_cache: torch.Tensor, blocks: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Attention of ``[rows, heads, size]`` over the first ``mask.shape[1]`` cached tokens."""
    cached = kv_cache[blocks.long()].transpose(1, 2).flatten(0, 1)[: mask.shape[1]]
    key, value = cached.repeat_interleave(HEADS // KV_HEADS, 1).chunk(2, dim=-1)
    scores = torch.einsum("rhd,thd->hrt", query, key) * SIZE**-0.5
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.einsum("hrt,thd->rhd", weights, value)


class Batch:
    """A step: requests of ``(tokens in the cache, rows before the root, tree)``, then a prefill."""

    def __init__(
        self,
        requests: list[tuple[int, int, DraftTree]],
        prefill: tuple[int, int] | None,
        random_caches: Callable[..., CacheLayers],
        device: torch.device,
    ) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(0)
        widths = [before + 1 + len(tree) for _, before, tree in requests]
        cached = [computed for computed, _, _ in requests]
        if prefill:
            cached.append(prefill[0])
            widths.append(prefill[1])
        self.starts = np.array([0, *np.cumsum(widths)], np.int32)
        self.lens = (np.array(cached) + widths).astype(np.int32)
        self.caches = random_caches(LAYERS, 64, KV_HEADS, BLOCK, SIZE, torch.float32)
        table = torch.randperm(64, generator=generator)[: 12 * len(widths)]
        self.table = table.reshape(len(widths), 12).int().numpy()
        rows = int(self.starts[-1])
        shape = (LAYERS, rows, HEADS + 2 * KV_HEADS, SIZE)
        qkv = torch.randn(shape, generator=generator).to(device)
        self.query, self.key, self.value = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        position = np.concatenate([c + np.arange(w) for c, w in zip(cached, widths, strict=True)])
        owner = np.repeat(np.arange(len(widths)), widths)
        slots = self.table[owner, position // BLOCK] * BLOCK + position % BLOCK
        self.slots = torch.from_numpy(slots.astype(np.int64)).to(device)
        for layer, cache in enumerate(self.caches.caches):  # as vLLM does before attention
            kv = torch.cat([self.key[layer], self.value[layer]], dim=-1)
            cache[self.slots // BLOCK, :, self.slots % BLOCK] = kv
        self.plan = StepTrees(
            tuple(
                RequestTree(f"r{i}", i, int(start), int(start) + before, computed + before, tree)
                for i, (start, (computed, before, tree)) in enumerate(
                    zip(self.starts, requests, strict=False)
                )
                if len(tree)
            )
        )

    def metadata(self) -> dict[str, Any]:
        starts, lens, table = (
            torch.from_numpy(x).to(self.device) for x in (self.starts, self.lens, self.table)
        )
        stock = stock_metadata(starts, lens, table, self.slots)
        return {f"layer{i}": stock for i in range(LAYERS)}

    def seam(self, builder: Builder | None = None) -> CUDATreeAttention:
        layers = {
            f"layer{i}": SimpleNamespace(
                impl=TreeImpl(), kv_cache=cache, kv_sharing_target_layer_name=None
            )
            for i, cache in enumerate(self.caches.caches)
        }
        self.layers: dict[str, Any] = layers
        return CUDATreeAttention(layers, builder or Builder(self.device), 8, 16)  # type: ignore[arg-type]

    def forward(self, metadata: dict[str, Any]) -> list[torch.Tensor]:
        outputs = []
        for i, (name, layer) in enumerate(self.layers.items()):
            output = torch.full_like(self.query[i], math.nan)
            layer.impl.forward(
                layer,
                self.query[i],
                self.key[i],
                self.value[i],
                layer.kv_cache,
                metadata[name],
                output,
            )
            outputs.append(output)
        return outputs

    def expected(self, layer: int) -> torch.Tensor:
        """Every row over exactly the tokens of its own text."""
        output = torch.empty_like(self.query[layer])
        trees = {rows.batch_row: rows for rows in self.plan.trees}
        for i, (start, stop, length) in enumerate(
            zip(self.starts[:-1], self.starts[1:], self.lens, strict=True)
        ):
            width = stop - start
            mask = torch.ones(width, length, dtype=torch.bool).tril(int(length - width))
            if i in trees:
                root = trees[i].root_row - start
                first = int(length - width + root)  # cached tokens before the root
                mask[root:, first:] = torch.from_numpy(trees[i].tree.mask())
            rows = slice(int(start), int(stop))
            blocks = torch.from_numpy(self.table[i]).to(self.device)
            output[rows] = dense(
                self.query[layer, rows],
                self.caches.caches[layer],
                blocks,
                mask.to(self.device),
            )
        return output


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs programs one by one: a prefix is cut in two, not in 32."""
    monkeypatch.setattr(backend, "num_slices_for", lambda *_: 2)


BRANCHING = DraftTree.build(range(9), [0, 1, 2, 0, 4, 4, 1, 7, 0])
CHAIN = DraftTree.chain([1, 2, 3])
NO_DRAFTS = DraftTree.chain([])


@pytest.mark.parametrize("prefill", [None, (20, 150)], ids=["decodes only", "with a prefill"])
def test_every_row_attends_to_its_own_text(
    prefill: tuple[int, int] | None,
    device: torch.device,
    random_caches: Callable[..., CacheLayers],
) -> None:
    requests = [(37, 0, BRANCHING), (16, 0, NO_DRAFTS), (30, 4, BRANCHING), (3, 0, CHAIN)]
    batch = Batch(requests, prefill, random_caches, device)
    seam = batch.seam()
    metadata, dead = seam.with_trees(
        batch.metadata(), batch.plan, batch.starts, batch.lens, batch.table
    )
    assert not dead
    for layer, output in enumerate(batch.forward(metadata)):
        # float32 sums of some 200 terms in another order
        torch.testing.assert_close(output, batch.expected(layer), atol=5e-5, rtol=5e-5)


def test_a_tree_behind_a_wide_request_is_verified_on_its_main_chain_only(
    device: torch.device, random_caches: Callable[..., CacheLayers]
) -> None:
    batch = Batch([(20, 130, NO_DRAFTS), (37, 0, BRANCHING)], None, random_caches, device)
    seam = batch.seam()
    metadata, dead = seam.with_trees(
        batch.metadata(), batch.plan, batch.starts, batch.lens, batch.table
    )
    assert dead == {"r1": frozenset(range(4, 10))}
    output = batch.forward(metadata)[0]
    alive = slice(131, 135)  # the root and nodes 1 to 3
    torch.testing.assert_close(output[alive], batch.expected(0)[alive], atol=5e-5, rtol=5e-5)


def test_uniform_batches_take_the_tree_path_of_a_captured_graph(
    device: torch.device, random_caches: Callable[..., CacheLayers]
) -> None:
    """The builder prepares chains; trees are written into the same memory."""
    chain = DraftTree.chain(list(range(9)))
    batch = Batch([(37, 0, BRANCHING), (16, 0, chain)], None, random_caches, device)
    builder = Builder(device, full_graphs=True)
    seam = batch.seam(builder)
    stock = batch.metadata()["layer0"]
    common = SimpleNamespace(
        num_actual_tokens=20,
        num_reqs=2,
        max_query_len=10,
        max_seq_len=47,
        query_start_loc=stock.query_start_loc,
        query_start_loc_cpu=torch.from_numpy(batch.starts),
        seq_lens=stock.seq_lens,
        block_table_tensor=stock.block_table,
        slot_mapping=stock.slot_mapping,
    )
    captured = dict.fromkeys(batch.layers, builder.build(0, common))  # type: ignore[arg-type]
    address = captured["layer0"].trees.ancestors.data_ptr()
    plan, batch.plan = batch.plan, StepTrees()
    output = batch.forward(captured)[0]
    torch.testing.assert_close(output, batch.expected(0), atol=5e-5, rtol=5e-5)
    batch.plan = plan
    metadata, _ = seam.with_trees(captured, plan, batch.starts, batch.lens, batch.table)
    assert metadata["layer0"].trees.ancestors.data_ptr() == address
    output = batch.forward(metadata)[0]
    torch.testing.assert_close(output, batch.expected(0), atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize(
    "requests",
    [
        [(40, 0, BRANCHING.truncate(5))],
        [(17, 0, CHAIN), (40, 0, BRANCHING.truncate(5)), (30, 0, NO_DRAFTS), (9, 0, BRANCHING)],
    ],
    ids=["one request", "several of different widths"],
)
def test_fewer_rows_run_in_the_shape_of_a_captured_graph(
    requests: list[tuple[int, int, DraftTree]],
    device: torch.device,
    random_caches: Callable[..., CacheLayers],
) -> None:
    batch = Batch(requests, None, random_caches, device)
    builder = Builder(device, full_graphs=True)
    seam = batch.seam(builder)
    stock = batch.metadata()["layer0"]
    captured_width = 1 + builder.vllm_config.num_speculative_tokens
    num_rows = captured_width * len(requests)
    common = SimpleNamespace(
        num_actual_tokens=num_rows,
        num_reqs=len(requests),
        max_query_len=stock.max_query_len,
        max_seq_len=stock.max_seq_len,
        query_start_loc=stock.query_start_loc,
        query_start_loc_cpu=torch.from_numpy(batch.starts),
        seq_lens=stock.seq_lens,
        block_table_tensor=stock.block_table,
        slot_mapping=stock.slot_mapping,
    )
    metadata = dict.fromkeys(batch.layers, builder.build(0, common))  # type: ignore[arg-type]
    trees = metadata["layer0"].trees
    assert (trees.num_rows, trees.max_rows) == (num_rows, captured_width)
    rows = int(batch.starts[-1])

    def forward(metadata: dict[str, Any]) -> torch.Tensor:
        missing = num_rows - rows
        pad = [
            torch.nn.functional.pad(x[0], (0, 0, 0, 0, 0, missing))
            for x in (batch.query, batch.key, batch.value)
        ]
        output = torch.zeros_like(pad[0])
        layer = batch.layers["layer0"]
        layer.impl.forward(layer, *pad, layer.kv_cache, metadata["layer0"], output)
        return output[:rows]

    plan, batch.plan = batch.plan, StepTrees()
    torch.testing.assert_close(forward(metadata), batch.expected(0), atol=5e-5, rtol=5e-5)
    batch.plan = plan
    metadata, _ = seam.with_trees(metadata, plan, batch.starts, batch.lens, batch.table)
    torch.testing.assert_close(forward(metadata), batch.expected(0), atol=5e-5, rtol=5e-5)


def test_accepted_drafts_lie_where_plain_decoding_would_have_put_them(
    device: torch.device, random_caches: Callable[..., CacheLayers]
) -> None:
    requests = [(37, 0, BRANCHING), (30, 4, BRANCHING), (9, 0, BRANCHING)]
    batch = Batch(requests, None, random_caches, device)
    seam = batch.seam()
    accepted = {"r0": [4, 5], "r1": [1, 7, 8], "r2": [1, 2]}
    moved = seam.commit(batch.plan, accepted, batch.table)
    assert moved == 4  # node 1 of r1 and the main chain of r2 stay
    for rows in batch.plan.trees:
        for depth, node in enumerate(accepted[rows.req_id], start=1):
            position = rows.root_position + depth
            block = batch.table[rows.batch_row, position // BLOCK]
            for layer, cache in enumerate(batch.caches.caches):
                kv = cache[block, :, position % BLOCK]
                row = rows.root_row + node
                assert torch.equal(kv[:, :SIZE], batch.key[layer, row])
                assert torch.equal(kv[:, SIZE:], batch.value[layer, row])


def test_a_draft_pass_reads_each_layers_own_blocks_and_its_query_ranks_them(
    device: torch.device, random_caches: Callable[..., CacheLayers]
) -> None:
    batch = Batch([(37, 0, NO_DRAFTS), (50, 0, NO_DRAFTS)], None, random_caches, device)
    seam = batch.seam()
    # layer 0 reads blocks 0 and 2 of both requests, layer 1 blocks 1 and 2
    tables = np.stack([batch.table[:, [0, 2]], batch.table[:, [1, 2]]])
    lens = np.array([16 + 6, 32], np.int32)
    metadata = seam.draft_metadata(tables, lens, batch.slots, np.array([1]))
    outputs = batch.forward(metadata)
    for layer, output in enumerate(outputs):
        for i, length in enumerate(lens):
            blocks = torch.from_numpy(tables[layer, i]).to(device)
            mask = torch.ones(1, int(length), dtype=torch.bool, device=device)
            expected = dense(
                batch.query[layer, i : i + 1], batch.caches.caches[layer], blocks, mask
            )
            torch.testing.assert_close(output[i : i + 1], expected, atol=5e-5, rtol=5e-5)

    masses = seam.block_masses(metadata, 0, batch.table[1, :4], 51)
    assert masses.shape == (LAYERS, 4)
    assert masses.sum(1) == pytest.approx(HEADS, rel=1e-4)
    blocks = torch.from_numpy(batch.table[1, :4]).to(device).long()
    keys = batch.caches.caches[1][blocks].transpose(1, 2).flatten(0, 1)[:51, :, :SIZE]
    scores = torch.einsum(
        "hd,thd->ht", batch.query[1, 1], keys.repeat_interleave(HEADS // KV_HEADS, 1)
    )
    mass = (scores * SIZE**-0.5).softmax(-1).sum(0)
    by_block = [float(part.sum()) for part in mass.split(BLOCK)]
    assert masses[1].tolist() == pytest.approx(by_block, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("kv_cache_dtype", "fp8", "type fp8"),
        ("sliding_window", (127, 0), "sliding window"),
        ("logits_soft_cap", 30.0, "soft-capped"),
    ],
)
def test_layers_that_trees_are_not_made_for_are_refused_in_words(
    field: str,
    value: object,
    named: str,
    device: torch.device,
    random_caches: Callable[..., CacheLayers],
) -> None:
    batch = Batch([(5, 0, NO_DRAFTS)], None, random_caches, device)
    batch.seam()
    setattr(batch.layers["layer1"].impl, field, value)
    with pytest.raises(ValueError, match=f"layer1 has .*{named}"):
        CUDATreeAttention(batch.layers, Builder(device), 8, 16)


def test_a_layer_on_another_backend_is_refused_by_name(
    device: torch.device, random_caches: Callable[..., CacheLayers]
) -> None:
    batch = Batch([(5, 0, NO_DRAFTS)], None, random_caches, device)
    batch.seam()
    batch.layers["layer0"].impl = DenseImpl()
    with pytest.raises(ValueError, match=r"runs on DenseImpl: .*FLASH_ATTN and TRITON_ATTN"):
        CUDATreeAttention(batch.layers, Builder(device), 8, 16)
