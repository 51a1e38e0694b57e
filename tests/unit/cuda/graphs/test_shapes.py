"""Which shape a step's full CUDA graph has; vLLM's own dispatcher underneath, no graph is made."""

from __future__ import annotations

import pytest
from vllm.config import CompilationMode, CUDAGraphMode, SchedulerConfig, VllmConfig
from vllm.forward_context import BatchDescriptor

from vllm_tokenswift.cuda.graphs.shapes import TreeGraphDispatcher, graph_widths


@pytest.fixture
def dispatcher() -> TreeGraphDispatcher:
    config = VllmConfig(
        scheduler_config=SchedulerConfig.default_factory(
            max_num_seqs=6, max_num_batched_tokens=2048, max_model_len=2048
        ),
    )
    # What the configuration of a CUDA platform holds; on others vLLM takes the graphs away.
    compilation = config.compilation_config
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.splitting_ops = list(compilation._attention_ops)
    compilation.cudagraph_capture_sizes = [1, 2, 4, 8, 40, 80]
    compilation.max_cudagraph_capture_size = 80
    dispatcher = TreeGraphDispatcher(config, graph_widths(32, group=1))
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 33)
    return dispatcher


def test_widths_go_from_a_plain_decode_to_the_widest_tree() -> None:
    assert graph_widths(63, group=4) == (1, 4, 8, 16, 32, 64)
    assert graph_widths(32, group=1) == (1, 4, 8, 16, 32, 33)
    assert graph_widths(8, group=1) == (1, 4, 8, 9)
    assert graph_widths(1, group=1) == (1, 2)


@pytest.mark.parametrize(
    ("num_drafts", "group", "widest"),
    [
        (32, 3, 33),  # 99 rows in a tile of 128
        (32, 4, 32),
        (32, 8, 32),  # two tiles, not three
        (64, 4, 64),
        (128, 4, 128),
        (36, 4, 37),  # five nodes are more than a tile's last rows
        (16, 16, 16),  # one is not, though eight rows fill a tile
        (16, 14, 17),
        (12, 128, 13),  # each row is a tile
    ],
)
def test_a_few_drafts_do_not_begin_another_tile_of_attention(
    num_drafts: int, group: int, widest: int
) -> None:
    assert graph_widths(num_drafts, group)[-1] == widest


@pytest.mark.parametrize(
    ("num_reqs", "rows", "shape"),
    [
        (1, 2, (1, 4)),
        (1, 4, (1, 4)),
        (1, 5, (1, 8)),
        (1, 17, (1, 32)),
        (1, 33, (1, 33)),
        (2, 33, (2, 33)),
        (3, 9, (4, 16)),
        (5, 6, (6, 8)),
        (6, 8, (6, 8)),
    ],
)
def test_a_step_takes_the_narrowest_graph_that_it_fits(
    dispatcher: TreeGraphDispatcher, num_reqs: int, rows: int, shape: tuple[int, int]
) -> None:
    count, width = shape
    expected = BatchDescriptor(num_tokens=count * width, num_reqs=count, uniform=True)
    assert dispatcher.wide(num_reqs, rows) == expected
    assert expected in dispatcher.cudagraph_keys[CUDAGraphMode.FULL]


@pytest.mark.parametrize(("num_reqs", "rows"), [(1, 34), (7, 2), (3, 33), (6, 16)])
def test_a_step_too_large_for_any_has_none(
    dispatcher: TreeGraphDispatcher, num_reqs: int, rows: int
) -> None:
    assert dispatcher.wide(num_reqs, rows) is None


def test_plain_decodes_keep_graphs_of_one_row_each(dispatcher: TreeGraphDispatcher) -> None:
    mode, shape = dispatcher.dispatch(3, uniform_decode=True)
    assert mode is CUDAGraphMode.FULL
    assert shape == BatchDescriptor(num_tokens=4, num_reqs=4, uniform=True)
    assert dispatcher.full(3, 1) == shape


def test_without_full_graphs_there_are_no_wide_ones(dispatcher: TreeGraphDispatcher) -> None:
    dispatcher.cudagraph_keys[CUDAGraphMode.FULL].clear()
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE, 33)
    assert dispatcher.wide(1, 2) is None
    assert dispatcher.full(1, 1) is None


def test_the_widest_trees_of_a_batch_are_those_that_have_a_graph(
    dispatcher: TreeGraphDispatcher,
) -> None:
    """Here graphs hold 80 rows at most: 2 requests of 33, 4 of 16, 6 of 8."""
    assert [dispatcher.widest(n) for n in (1, 2, 3, 4, 5, 6, 7)] == [33, 33, 16, 16, 8, 8, 1]
