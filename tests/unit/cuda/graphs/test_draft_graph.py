"""Which buffers a replayed draft pass reads; vLLM's graphs are stood in for by what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_tokenswift.cuda.attention.tree_attention import CUDATreeAttention
from vllm_tokenswift.cuda.graphs import draft_graph
from vllm_tokenswift.cuda.graphs.draft_graph import GraphedDraftPass
from vllm_tokenswift.engine.draft_pass import PassInputs
from vllm_tokenswift.engine.tree_attention import LayerMetadata

LAYERS = ["first", "second"]
MOST_BLOCKS, MOST_REQUESTS, BLOCK_SIZE = 4, 5, 16


class Trees(CUDATreeAttention):
    """Metadata that is what it was made of."""

    def __init__(self) -> None:
        self.layer_names, self.block_size = LAYERS, BLOCK_SIZE

    def by_layer(self, common: CommonAttentionMetadata, tables: torch.Tensor) -> LayerMetadata:
        return {
            name: SimpleNamespace(block_table=table, seq_lens=common.seq_lens)
            for name, table in zip(LAYERS, tables, strict=True)
        }

    def draft_metadata(self, block_tables: Any, seq_lens: Any, *_: Any) -> LayerMetadata:
        return {
            name: SimpleNamespace(
                block_table=torch.from_numpy(table), seq_lens=torch.from_numpy(seq_lens)
            )
            for name, table in zip(LAYERS, block_tables, strict=True)
        }


class Runner(SimpleNamespace):
    """A runner whose model keeps one graph a shape, as vLLM's ``CUDAGraphWrapper`` does.

    A graph goes on reading the memory that the pass read over which it was captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.graphs: dict[BatchDescriptor, Callable[[], torch.Tensor]] = {}
        super().__init__(
            device=device,
            vllm_config=None,
            model=torch.nn.Identity(),
            max_num_reqs=MOST_REQUESTS,
            tree_attention=Trees(),
            input_ids=SimpleNamespace(gpu=torch.zeros(16, dtype=torch.int32, device=device)),
            positions=torch.zeros(16, dtype=torch.int64, device=device),
        )

    def forward_rows(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._model_forward(input_ids=input_ids, positions=positions)

    def _model_forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What was read: ``[rows, 3 + blocks]``, of the last layer."""
        read = context["metadata"][LAYERS[-1]]

        def run() -> torch.Tensor:
            columns = [part.cpu() for part in (input_ids, positions, read.seq_lens)]
            return torch.cat([torch.stack(columns, 1), read.block_table.cpu()], dim=1)

        if context["mode"] is not CUDAGraphMode.FULL:
            return run()
        return self.graphs.setdefault(context["shape"], run)()


context: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def forward_context(metadata: LayerMetadata, _: Any, **given: Any) -> Iterator[None]:
        mode = given.get("cudagraph_runtime_mode", CUDAGraphMode.NONE)
        context.update(metadata=metadata, mode=mode, shape=given.get("batch_descriptor"))
        yield

    for module in ("vllm_tokenswift.engine.draft_pass", draft_graph.__name__):
        monkeypatch.setattr(f"{module}.set_forward_context", forward_context)
    monkeypatch.setattr(draft_graph, "graph_capture", lambda _: nullcontext())
    monkeypatch.setattr(draft_graph, "freeze_gc_for_cudagraph_capture", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


def inputs_of(num_requests: int, seed: int, num_blocks: int = MOST_BLOCKS) -> PassInputs:
    rng = np.random.default_rng(seed)
    return PassInputs(
        tables=rng.integers(1, 99, (len(LAYERS), num_requests, num_blocks)).astype(np.int32),
        seq_lens=rng.integers(1, num_blocks * BLOCK_SIZE, num_requests).astype(np.int32),
        slots=rng.integers(0, 999, num_requests),
        token_ids=rng.integers(0, 999, num_requests).astype(np.int32),
        positions=rng.integers(0, 999, num_requests),
        ranking=[],
    )


def expected(inputs: PassInputs) -> list[list[int]]:
    columns = [inputs.token_ids, inputs.positions, inputs.seq_lens]
    return np.concatenate([np.stack(columns, 1), inputs.tables[-1]], axis=1).tolist()


def test_a_replayed_pass_reads_what_it_is_given(device: torch.device) -> None:
    """Pass after pass, with fewer requests than its graph has room for."""
    draft_pass = GraphedDraftPass(Runner(device), MOST_BLOCKS)
    draft_pass.capture()
    for seed, num_requests in enumerate([1, 3, 4, 2, 1]):
        inputs = inputs_of(num_requests, seed)
        output, _ = draft_pass.forward(inputs)
        assert output.tolist() == expected(inputs)


def test_a_pass_that_was_never_captured_does_not_replay(device: torch.device) -> None:
    """The model may hold graphs of the same shapes, over the buffers of another pass."""
    runner = Runner(device)
    GraphedDraftPass(runner, MOST_BLOCKS).capture()
    other = GraphedDraftPass(runner, MOST_BLOCKS)
    with pytest.raises(RuntimeError, match="before GraphedDraftPass.capture"):
        other.forward(inputs_of(1, seed=0))


def test_a_model_s_draft_passes_are_captured_once(device: torch.device) -> None:
    runner = Runner(device)
    GraphedDraftPass(runner, MOST_BLOCKS).capture()
    captured = dict(runner.graphs)
    with pytest.raises(RuntimeError, match="captured already"):
        GraphedDraftPass(runner, MOST_BLOCKS).capture()
    assert runner.graphs == captured
    GraphedDraftPass(Runner(device), MOST_BLOCKS).capture()  # another model's


@pytest.mark.parametrize(("num_requests", "num_blocks"), [(5, 2), (1, MOST_BLOCKS + 1)])
def test_passes_beyond_what_was_captured_go_the_ordinary_way(
    num_requests: int, num_blocks: int, device: torch.device
) -> None:
    draft_pass = GraphedDraftPass(Runner(device), MOST_BLOCKS)
    inputs = inputs_of(num_requests, 7, num_blocks)
    output, _ = draft_pass.forward(inputs)
    assert output.tolist() == expected(inputs)
