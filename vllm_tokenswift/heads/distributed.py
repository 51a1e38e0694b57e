"""Several processes that train one set of heads, started by torchrun or accelerate.

Both say who a process is in the environment (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``),
which is all that is used. The target is whole on every GPU; gradients are summed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

# Other ranks wait while rank 0 has the target write its training text.
_PATIENCE = timedelta(hours=12)


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()

    def sum(self, *tensors: Tensor) -> None:
        """Add up each tensor over the ranks, in place."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor)


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Join the group this process was started in, or stand alone.

    device: a torch device, or ``auto``: a GPU where there is one, else the CPU.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    chosen = torch.device(kind, local_rank) if kind == "cuda" else torch.device(kind)
    if world_size == 1:
        yield Ranks(0, 1, chosen)
        return
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE)
    try:
        yield Ranks(dist.get_rank(), world_size, chosen)
    finally:
        dist.destroy_process_group()
