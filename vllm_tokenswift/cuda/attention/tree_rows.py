"""The tree rows of one step on the device, in buffers whose addresses never change.

Index spaces: *tree rows* are the first query rows of the step, those of its *leading
requests*; vLLM puts decoding requests before prefills where a metadata builder names
a ``reorder_batch_threshold``. A request without drafts is a tree of one node, a
chain of drafts a tree with one path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.utils import CpuGpuBuffer

from vllm_tokenswift.cuda.attention.ancestor_rows import pack_rows
from vllm_tokenswift.cuda.attention.tree_kernel import MAX_DRAFT_NODES, pack_ancestors
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

MAX_TREE_ROWS = MAX_DRAFT_NODES + 1


@dataclass
class DeviceTreeRows:
    """What attention needs to know of a step's tree rows; all tensors on the device.

    Attributes:
        num_rows: query rows of the leading requests; the rest of the step's rows follow.
        max_rows: a bound of one request's rows.
        start_loc: int32 ``[requests + 1]``, first query row of each leading request.
        prefix_lens: int32 ``[requests]``, tokens in the KV cache before the request's rows.
        max_prefix_len: a bound of them.
        ancestors: int64 ``[num_rows, 2]``, see :func:`pack_ancestors`.
        schedule: FlashAttention 3's schedule of the prefix part, or None.
        max_num_splits: FlashAttention's bound on splits of a prefix; 0 leaves it the choice.
        rest: the stock metadata of the requests after the leading ones, or None.
    """

    num_rows: int
    max_rows: int
    start_loc: torch.Tensor
    prefix_lens: torch.Tensor
    max_prefix_len: int
    ancestors: torch.Tensor
    schedule: torch.Tensor | None = None
    max_num_splits: int = 0
    rest: Any = None


class TreeRowBuffers:
    """Owns the buffers and fills them for each step.

    Args:
        max_num_reqs: most requests of a batch.
        max_num_tokens: most query rows of a step.
    """

    def __init__(self, max_num_reqs: int, max_num_tokens: int, device: torch.device) -> None:
        max_rows = min(max_num_tokens, max_num_reqs * MAX_TREE_ROWS)
        self._ancestors = CpuGpuBuffer(max_rows, 2, dtype=torch.int64, device=device)
        self._start_loc = CpuGpuBuffer(max_num_reqs + 1, dtype=torch.int32, device=device)
        self._prefix_lens = CpuGpuBuffer(max_num_reqs, dtype=torch.int32, device=device)
        chain = DraftTree.chain([0] * MAX_DRAFT_NODES)
        self._chain = torch.from_numpy(pack_ancestors(chain)).to(device)

    @property
    def prefix_lens(self) -> torch.Tensor:
        """int32 ``[max_num_reqs]`` on the device; a step of decodes lays them out with the rest."""
        lens: torch.Tensor = self._prefix_lens.gpu
        return lens

    @property
    def ancestors(self) -> torch.Tensor:
        """int64 ``[rows, 2]`` on the device, for all the tree rows that a step may have."""
        words: torch.Tensor = self._ancestors.gpu
        return words

    def uniform_chains(self, common: CommonAttentionMetadata, width: int) -> DeviceTreeRows:
        """All requests as chains, by work on the device alone.

        The same addresses and launches for equal shapes, as a CUDA graph needs.

        Args:
            common: of a batch that runs with ``width`` rows a request in all, padding at the end
                included.
            width: most rows of a request.
        """
        num_reqs = common.num_reqs
        starts = common.query_start_loc
        prefix_lens = self._prefix_lens.gpu[:num_reqs]
        torch.sub(common.seq_lens[:num_reqs], starts[1:], out=prefix_lens)
        # A padded request has no rows and nothing cached.
        prefix_lens.add_(starts[:-1]).clamp_(min=0)
        ancestors = self._ancestors.gpu[: num_reqs * width]
        widths = np.diff(common.query_start_loc_cpu[: num_reqs + 1].numpy())
        if num_reqs == 1 or ((widths == width) | (widths == 0)).all():
            ancestors.view(num_reqs, width, 2).copy_(self._chain[:width])
        else:
            rows = torch.arange(num_reqs * width, dtype=torch.int32, device=ancestors.device)
            request = torch.searchsorted(starts[1:], rows, right=True).clamp_(max=num_reqs - 1)
            node = (rows - starts[request]).clamp_(max=width - 1)
            torch.index_select(self._chain, 0, node, out=ancestors)
        return DeviceTreeRows(
            num_reqs * width, width, starts, prefix_lens, common.max_seq_len, ancestors
        )

    def fill(
        self,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        trees: Sequence[tuple[int, DraftTree]],
    ) -> DeviceTreeRows:
        """The leading requests as chains, except where a tree is given.

        Args:
            query_start_loc: int32 ``[requests + 1]``, of the leading requests.
            seq_lens: int32 ``[requests]``, tokens of each with its rows.
            trees: ``(request, tree)``, a request's last rows.
        """
        num_reqs = len(seq_lens)
        self._start_loc.np[: num_reqs + 1] = query_start_loc
        widths = np.diff(query_start_loc)
        self._prefix_lens.np[:num_reqs] = seq_lens - widths
        return DeviceTreeRows(
            int(query_start_loc[-1]),
            int(widths.max()),
            self._start_loc.copy_to_gpu(num_reqs + 1),
            self._prefix_lens.copy_to_gpu(num_reqs),
            int(self._prefix_lens.np[:num_reqs].max()),
            self.fill_ancestors(query_start_loc, trees),
        )

    def fill_ancestors(
        self,
        query_start_loc: npt.NDArray[np.int32],
        trees: Sequence[tuple[int, DraftTree]],
    ) -> torch.Tensor:
        """The ancestors alone, into the same buffer; arguments as for :meth:`fill`."""
        num_drafts = np.zeros(len(query_start_loc) - 1, np.int32)
        for request, tree in trees:
            num_drafts[request] = len(tree)
        parents = [tree.parents for _, tree in trees] or [EMPTY_TREE.parents]
        pack_rows(query_start_loc, num_drafts, np.concatenate(parents), self._ancestors.np)
        filled: torch.Tensor = self._ancestors.copy_to_gpu(int(query_start_loc[-1]))
        return filled
