"""Launches that are always the same, as one call of the host each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from vllm.distributed.parallel_state import graph_capture
from vllm.utils.gc_utils import freeze_gc_for_cudagraph_capture

Launches = Callable[[], None]


def captured(launches: Sequence[Launches], device: torch.device) -> list[Launches]:
    """Captures a CUDA graph of each, on a GPU.

    Each is run once before it is captured, which compiles its kernels. The graphs share one
    pool of memory, and so must not run at the same time.

    Args:
        launches: what launches kernels, the same ones on the same memory each time.
        device: where they run.

    Returns:
        What to call in place of each: the replay of its graph; without a GPU itself.
    """
    if device.type != "cuda":
        return list(launches)
    replays: list[Launches] = []
    pool = torch.cuda.graph_pool_handle()
    with freeze_gc_for_cudagraph_capture(), graph_capture(device) as context:
        for launch in launches:
            launch()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=context.stream):
                launch()
            replays.append(graph.replay)
    torch.cuda.synchronize()
    return replays
