"""Compiling drafting before the first request comes.

    python -m vllm_tokenswift.draft.warm_up

compiles for other processes, which find it on disk.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import get_args

import numpy as np

from vllm_tokenswift.common.arrays import Keys
from vllm_tokenswift.common.compiled import everything_compiled
from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.gumbel_noise import SPLITMIX, GumbelNoise
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlanMode, PlannedRequest, Planner
from vllm_tokenswift.draft.planner.self_draft_acceptance import SelfDraftPath
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.top_tokens import NO_TOKEN, TOP_K_COLUMNS, VerifyTopK
from vllm_tokenswift.draft.tree_builder import NO_NODES, num_followed
from vllm_tokenswift.tree import EMPTY_TREE

# A slow core takes a fourth of it.
_MOST_SECONDS = 120.0


def warm_up(mode: PlanMode) -> None:
    """Drafts for a tiny text in every way that a planner may.

    Compiles what no process on this machine has compiled before (some 20 s), or loads it
    (0.5 s).

    Args:
        mode: of the planner.
    """
    # Chains cost something, so that branches are weighed; nodes cost next to nothing.
    cost = CostModel(((1, 1.0), (65, 1.1)), chain_ms=0.01, draft_points=((0, 1.0),))
    planner = Planner(cost, mode=mode, shapes_of=lambda _: [(4, 8)])
    state = DraftState(sampled=True)
    state.append_tokens([*range(200), 0, 1, 2, 0, 1])  # long enough for every table to grow
    noise = GumbelNoise(SPLITMIX, _keys)
    noise.weighed(0.5, 0, 7)
    SelfDraftPath().follow([7], [0.5], 0, state.cells, noise)
    planner.plan([PlannedRequest(state, None, state.num_tokens, 8)])  # as greedy text has it
    heads = HeadProposals([[7, 8], [9, 9]], [[0.6, 0.2], [0.3, 0.2]], free=False)
    for candidates in (None, heads):
        request = PlannedRequest(state, candidates, state.num_tokens, 8, noise=noise)
        planner.plan([request])
        planner.plan([request, request])
    state.append_tokens(
        [2], VerifyTopK(EMPTY_TREE, np.full((1, TOP_K_COLUMNS), NO_TOKEN, np.int32))
    )
    planner.plan([PlannedRequest(state, None, state.num_tokens, 8, noise=noise)])
    num_followed(NO_NODES, np.zeros(1, np.int32))
    assert state.contexts is not None
    state.contexts.drop_lighter()


def _keys(num_positions: int) -> Keys:
    return np.arange(num_positions, dtype=np.uint64)


class CompilingAhead:
    """Compiles in a process of its own, for one that has other things to do before it drafts.

    A new machine takes about as long for it as for loading and compiling a model. Nothing is
    started where all is on disk already, or where nothing can be kept.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        try:
            done = everything_compiled()
            done.parent.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # RuntimeError: there is no home
            return
        if done.exists():
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait(self) -> None:
        """Returns when that process has ended, however, or takes too long: what it did not compile
        is compiled when it is needed."""
        if self._process is None:
            return
        try:
            self._process.wait(timeout=_MOST_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main() -> None:
    os.nice(5)  # the model's process should not wait
    for mode in get_args(PlanMode):
        warm_up(mode)
    everything_compiled().touch()


if __name__ == "__main__":
    main()
