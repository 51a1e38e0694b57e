"""A prepared pass leaves on the device what the ordinary way of laying a step out leaves there."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker.block_table import MultiGroupBlockTable

from vllm_tokenswift.cuda.attention.tree_kernel import pack_ancestors
from vllm_tokenswift.cuda.attention.tree_rows import TreeRowBuffers
from vllm_tokenswift.cuda.graphs import verify_graph as verify_graph_module
from vllm_tokenswift.cuda.graphs.verify_graph import VerifyGraph, make_verify_graphs
from vllm_tokenswift.engine.step_inputs import StepInputs
from vllm_tokenswift.engine.step_trees import RequestTree, StepTrees
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

MOST_REQUESTS, MOST_ROWS, MODEL_LEN, BLOCK_SIZE = 4, 64, 256, 16
LAYERS = ["first", "second"]


class Builder:
    """Stands for FlashAttention's: its schedule is all that a step makes anew."""

    def __init__(self, device: torch.device) -> None:
        self.tree_rows = TreeRowBuffers(MOST_REQUESTS, MOST_ROWS, device)
        self.schedule = torch.zeros(MOST_REQUESTS, dtype=torch.int32, device=device)

    def build(self, common_prefix_len: int, common: CommonAttentionMetadata) -> Any:
        return SimpleNamespace(seq_lens=common.seq_lens)

    def reschedule(self, common: CommonAttentionMetadata, built: Any) -> None:
        self.schedule[: common.num_reqs].copy_(common.seq_lens)


class Runner(SimpleNamespace):
    """The buffers of a model runner, vLLM's own where it has a class for them."""

    def __init__(self, device: torch.device, seed: int) -> None:
        rng = np.random.default_rng(seed)
        table = MultiGroupBlockTable(
            max_num_reqs=MOST_REQUESTS,
            max_num_batched_tokens=MOST_ROWS,
            pin_memory=False,
            device=device,
            block_sizes=[BLOCK_SIZE],
            max_num_blocks=[MODEL_LEN // BLOCK_SIZE],
        )
        blocks = rng.permutation(MOST_REQUESTS * MODEL_LEN // BLOCK_SIZE)
        for row, own in enumerate(np.split(blocks, MOST_REQUESTS)):
            table.add_row((own.tolist(),), row)

        def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> CpuGpuBuffer:
            return CpuGpuBuffer(*shape, dtype=dtype, device=device, pin_memory=False)

        self.builder = Builder(device)
        super().__init__(
            device=device,
            vllm_config=None,
            max_num_reqs=MOST_REQUESTS,
            max_num_tokens=MOST_ROWS,
            max_model_len=MODEL_LEN,
            input_ids=buffer(MOST_ROWS),
            positions=torch.zeros(MOST_ROWS, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(MOST_REQUESTS, dtype=torch.int32, device=device),
            optimistic_seq_lens_cpu=torch.zeros(MOST_REQUESTS, dtype=torch.int32),
            query_start_loc=buffer(MOST_REQUESTS + 1),
            discard_request_mask=buffer(MOST_REQUESTS, dtype=torch.bool),
            is_padding=torch.zeros(MOST_ROWS, dtype=torch.bool, device=device),
            prefix_lens=self.builder.tree_rows.prefix_lens,
            tree_attention=SimpleNamespace(block_size=BLOCK_SIZE, layer_names=LAYERS),
            input_batch=SimpleNamespace(
                block_table=table,
                token_ids_cpu=rng.integers(1, 999, (MOST_REQUESTS, MODEL_LEN)).astype(np.int32),
                num_computed_tokens_cpu=np.zeros(MOST_REQUESTS, np.int32),
            ),
        )
        self.step_inputs = StepInputs(self)

    def begin(self, trees: list[DraftTree], computed: list[int]) -> tuple[np.ndarray, StepTrees]:
        names = [str(i) for i in range(len(trees))]
        self.input_batch.req_ids, self.input_batch.num_reqs = names, len(names)
        self.input_batch.num_computed_tokens_cpu[: len(names)] = computed
        self.requests = {
            name: SimpleNamespace(num_tokens=length + 1)
            for name, length in zip(names, computed, strict=True)
        }
        num_rows = np.array([1 + len(tree) for tree in trees], np.int32)
        starts = np.cumsum(num_rows) - num_rows
        rows = [
            RequestTree(name, i, int(starts[i]), int(starts[i]), computed[i], trees[i])
            for i, name in enumerate(names)
            if len(trees[i])
        ]
        return num_rows, StepTrees(tuple(rows))

    def _prepare_padding_mask(self, total: int, padded: int) -> torch.Tensor:
        return self.is_padding[:padded]

    def _model_forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in inputs.items()}


def verify_graph_of(runner: Any, shape: BatchDescriptor) -> VerifyGraph:
    return make_verify_graphs(runner, runner.step_inputs, runner.builder, [shape])[shape]


def random_tree(most: int, rng: np.random.Generator) -> DraftTree:
    parents = [int(rng.integers(0, i + 1)) for i in range(rng.integers(0, most))]
    return DraftTree.build(rng.integers(1, 999, len(parents)).astype(np.int32), parents)


@pytest.fixture(autouse=True)
def no_forward_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's needs a configuration; the passes here read nothing of it."""
    monkeypatch.setattr(verify_graph_module, "set_forward_context", lambda *_, **__: nullcontext())


@pytest.mark.parametrize("seed", range(6))
def test_buffers_hold_what_the_ordinary_way_puts_there(seed: int, device: torch.device) -> None:
    """Step after step through one prepared pass, with fewer requests than it has room for."""
    rng = np.random.default_rng(seed)
    shape = BatchDescriptor(num_tokens=MOST_ROWS, num_reqs=MOST_REQUESTS, uniform=True)
    prepared, ordinary = Runner(device, seed), Runner(device, seed)
    graph = verify_graph_of(prepared, shape)
    for _ in range(4):
        trees = [random_tree(15, rng) for _ in range(rng.integers(1, MOST_REQUESTS + 1))]
        computed = [int(n) for n in rng.integers(1, MODEL_LEN - 32, len(trees))]
        num_rows, plan = prepared.begin(trees, computed)
        launched = graph.launch(num_rows, plan, None)
        inputs, (metadata, _), output = launched.inputs, launched.metadata, launched.output
        expected = ordinary.step_inputs.fill(*ordinary.begin(trees, computed))

        total = int(num_rows.sum())
        assert inputs[0].tolist() == expected[0].tolist() == list(range(total))
        assert inputs[1].num_draft_tokens == expected[1].num_draft_tokens
        assert inputs[2] == expected[2]
        for name in ("input_ids", "positions"):
            whole = getattr(ordinary, name)
            buffer = whole if isinstance(whole, torch.Tensor) else whole.gpu
            assert torch.equal(output[name][:total], buffer[:total])
        slots = [r.input_batch.block_table[0].slot_mapping.gpu for r in (prepared, ordinary)]
        assert torch.equal(slots[0][:total], slots[1][:total])
        assert (slots[0][total:] == -1).all(), "padding would write KV"
        assert torch.equal(prepared.seq_lens, ordinary.seq_lens)
        assert torch.equal(prepared.prefix_lens, ordinary.prefix_lens)
        for side in ("gpu", "cpu"):
            starts = [getattr(r.query_start_loc, side) for r in (prepared, ordinary)]
            assert torch.equal(*starts)
        assert prepared.is_padding.tolist() == [i >= total for i in range(MOST_ROWS)]
        ancestors = np.concatenate([pack_ancestors(tree) for tree in trees])
        assert (prepared.builder.tree_rows.ancestors[:total].cpu().numpy() == ancestors).all()
        assert torch.equal(prepared.builder.schedule, prepared.seq_lens), "made of older lengths"
        assert set(metadata) == set(LAYERS)


def test_tokens_that_nobody_has_read_come_from_the_device(device: torch.device) -> None:
    runner = Runner(device, seed=1)
    shape = BatchDescriptor(num_tokens=2, num_reqs=2, uniform=True)
    prepared = verify_graph_of(runner, shape)
    num_rows, plan = runner.begin([EMPTY_TREE, EMPTY_TREE], [9, 30])
    newest = torch.tensor([501, 502], device=device)
    output = prepared.launch(num_rows, plan, newest).output
    assert output["input_ids"].tolist() == [501, 502]
    assert output["positions"].tolist() == [9, 30]
