"""Which blocks a request's draft pass reads: sinks, the important, the newest.

Index space: *logical* blocks of the request (block ``i`` holds positions
``i * block_size ..``). They are mapped to physical blocks anew at each step, so
that neither preemption nor a prefix-cache hit can leave a stale block behind.

The paper's rule ("Dynamic KV Cache Updates"), in blocks: the first ``|S|`` tokens stay;
the rest of the budget ``|B|`` holds the most important blocks, in falling order of
importance; every token written since the selection pushes the least important
one out; when all are out, the scores are computed again.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt


class Mode(enum.Enum):
    """The ablation of the paper: the whole cache, a selection made once, or renewed."""

    FULL = "full"
    STATIC = "static"
    DYNAMIC = "dynamic"


class Due(enum.Enum):
    """Why blocks have to be selected: there is no selection (yet, or after preemption), nothing is
    left of it (the paper's rule), or as many tokens were written as the options allow."""

    FIRST = "first"
    USED_UP = "used_up"
    INTERVAL = "interval"


class DraftBlockTable:
    """The draft block table of one request, for every layer.

    Args:
        mode: whether blocks are left out, and selected again.
        block_size: tokens of a KV block.
        budget_tokens: ``|B|``, rounded down to whole blocks, but never below sinks + 2 blocks.
        sink_tokens: ``|S|``, rounded up to whole blocks.
        refresh_tokens: select again when that many tokens were written since the last
            selection; None is the paper's rule: when no selected block is left, unless it is
            forgotten before (the planner of self-draft passes says when that pays).
    """

    def __init__(
        self,
        mode: Mode,
        block_size: int,
        budget_tokens: int,
        sink_tokens: int,
        refresh_tokens: int | None,
    ) -> None:
        self.mode = mode
        self.block_size = block_size
        self.sink_blocks = -(-sink_tokens // block_size)
        self.budget_blocks = max(budget_tokens // block_size, self.sink_blocks + 2)
        self.refresh_tokens = refresh_tokens
        self._selected: npt.NDArray[np.int32] | None = None  # [layers, candidates]
        self._first_recent = 0  # logical block of the oldest token not ranked
        self._selected_at = 0  # tokens in the cache when the selection was made
        self._tables: dict[tuple[int, int], npt.NDArray[np.int32]] = {}  # the last one made

    def forget(self) -> None:
        """Drops the selection: the next pass makes it again (as it must after preemption)."""
        self._selected = None
        self._tables.clear()

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence fits the budget whole: then there is nothing to leave out.

        Args:
            num_tokens: of the sequence.
        """
        return -(-num_tokens // self.block_size) <= self.budget_blocks

    @property
    def may_be_early(self) -> bool:
        """Whether somebody else may renew the selection (:meth:`forget`) before it is due."""
        return self.mode is Mode.DYNAMIC and self.refresh_tokens is None

    def age(self, num_tokens: int) -> int:
        """Tokens written since the selection that a pass reads by.

        Args:
            num_tokens: of the sequence that it reads.

        Returns:
            The age in tokens, 0 where the pass reads all blocks.
        """
        if self._selected is None or self.mode is Mode.FULL or self.fits(num_tokens):
            return 0
        return num_tokens - self._selected_at

    def needs_selection(self, num_tokens: int) -> bool:
        """Whether the scores have to be computed (again) before the next partial pass.

        Args:
            num_tokens: of the sequence that it reads.
        """
        return self.due(num_tokens) is not None

    def due(self, num_tokens: int) -> Due | None:
        """Why the scores have to be computed before the next partial pass.

        Args:
            num_tokens: of the sequence that it reads.

        Returns:
            The reason, None where they need not be computed.
        """
        if self.mode is Mode.FULL or self.fits(num_tokens):
            return None
        if self._selected is None:
            return Due.FIRST
        if self.mode is Mode.STATIC:
            return None
        if (
            self.refresh_tokens is not None
            and num_tokens - self._selected_at >= self.refresh_tokens
        ):
            return Due.INTERVAL
        return Due.USED_UP if self._room(num_tokens) <= 0 else None

    def select(self, masses: npt.NDArray[np.float32], num_tokens: int) -> None:
        """Ranks the blocks between the sinks and the newest; ties go to the newer block.

        Args:
            masses: float32 ``[layers, blocks]`` over all blocks of the sequence.
            num_tokens: tokens in the cache.
        """
        self._first_recent = (num_tokens - 1) // self.block_size
        self._selected_at = num_tokens
        ranked = masses[:, self.sink_blocks : self._first_recent]
        order = np.argsort(-ranked[:, ::-1], axis=1, kind="stable")
        newest_first = ranked.shape[1] - 1 - order
        room = max(self._room(num_tokens), 0)
        self._selected = (newest_first[:, :room] + self.sink_blocks).astype(np.int32)
        self._tables.clear()

    def blocks(self, num_tokens: int, num_layers: int) -> npt.NDArray[np.int32]:
        """The logical blocks that a draft pass reads.

        Args:
            num_tokens: tokens in the cache, the one that the pass writes included.
            num_layers: of the model.

        Returns:
            int32 ``[layers, blocks]``, ascending. The last column is always the block of the
            newest token, so that a sequence of these blocks is full up to its last block.
        """
        num_blocks = -(-num_tokens // self.block_size)
        key = num_blocks, num_layers
        if key not in self._tables:  # they change once in ``block_size`` tokens
            self._tables = {key: self._make_blocks(num_tokens, num_layers)}
        return self._tables[key]

    def _make_blocks(self, num_tokens: int, num_layers: int) -> npt.NDArray[np.int32]:
        num_blocks = -(-num_tokens // self.block_size)
        if self._selected is None or self.mode is Mode.FULL or self.fits(num_tokens):
            return np.tile(np.arange(num_blocks, dtype=np.int32), (num_layers, 1))
        if self.mode is Mode.STATIC:
            # The selection stays; what is pushed out are the older of the newer blocks.
            kept = self._selected
            room = self.budget_blocks - self.sink_blocks - kept.shape[1]
            first_recent = max(self._first_recent, num_blocks - max(room, 1))
        else:
            kept = self._selected[:, : max(self._room(num_tokens), 0)]
            first_recent = self._first_recent
        sinks = np.tile(np.arange(self.sink_blocks, dtype=np.int32), (num_layers, 1))
        recent = np.tile(np.arange(first_recent, num_blocks, dtype=np.int32), (num_layers, 1))
        return np.concatenate([sinks, np.sort(kept, axis=1), recent], axis=1)

    def _room(self, num_tokens: int) -> int:
        """Selected blocks that the budget still has room for beside sinks and newest."""
        recent = -(-num_tokens // self.block_size) - self._first_recent
        return self.budget_blocks - self.sink_blocks - recent
