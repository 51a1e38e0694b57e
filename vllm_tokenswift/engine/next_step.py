"""From what a step accepted to the next one: who is drafted for, and when its pass starts.

Two ways. Ordinarily the host reads what was accepted, drafts, and launches the pass that
verifies the drafts. Once nothing was worth drafting, it does not wait: the next pass, without
drafts, takes the sampled tokens where they lie on the device and is launched before
the host has read them, as plain vLLM's asynchronous scheduling does; the host then only asks
the planner whether drafting would pay again, for the step after that one. Such a draft attempt
takes time, from the step where passes are not prelaunched, else from the host; by back-off many
steps are skipped (``draft/planner/back_off.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vllm_tokenswift.engine.draft_request import NO_DRAFTS, DraftRequest
from vllm_tokenswift.engine.drafter import Drafter
from vllm_tokenswift.engine.prelaunch import Prelauncher
from vllm_tokenswift.engine.request_state import RequestState
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.sampling.acceptance_walk import VerifyResult, VerifyRows
from vllm_tokenswift.tree import DraftTree


class NextStep:
    """Drafts for a runner's next step and launches its pass where it can be foreseen.

    Args:
        runner: whose batch it is.
        drafter: makes the drafts.
        prelauncher: launches the pass.

    Attributes:
        skipped: requests that no draft attempt was made for when the step under way was made.
    """

    def __init__(self, runner: RunnerView, drafter: Drafter, prelauncher: Prelauncher) -> None:
        self.runner = runner
        self.drafter = drafter
        self.prelauncher = prelauncher
        self._expects_drafts = True
        self._is_launched = False
        self.skipped: list[str] = []
        self._requests: list[DraftRequest] = []
        self._accepted: Sequence[VerifyResult] = ()

    def is_undrafted(self, groups: Sequence[VerifyRows]) -> bool:
        """Whether :meth:`launch_undrafted` may be called with the samples of these groups.

        Args:
            groups: by batch row, what the step verifies.
        """
        return not self._expects_drafts and not any(
            len(group.tree) or group.discard for group in groups
        )

    def launch_undrafted(self, tokens: torch.Tensor) -> None:
        """Launches the next pass without drafts, where it can be foreseen.

        Args:
            tokens: int64 ``[requests]`` on the device, samples that nobody has read yet.
        """
        self._is_launched = self.prelauncher.launch_undrafted(tokens)

    def begin_drafts(
        self,
        groups: Sequence[VerifyRows],
        accepted: Sequence[VerifyResult],
        hidden_states: torch.Tensor,
    ) -> None:
        """To be called when the tree sampler has committed what a step emitted, and nobody else.

        The device may begin to draft while the host's indexes take the new tokens in.

        Args:
            groups: by batch row, what was verified.
            accepted: by batch row, what was accepted and emitted.
            hidden_states: ``[query rows, hidden]``, in the form that the heads read.
        """
        rows = self._may_draft(groups, accepted)
        states = [state for _, state, _ in rows]
        skips = bool(rows) and self.drafter.skips_attempt(states, len(groups), self._is_launched)
        self.skipped = [groups[row].req_id for row, _, _ in rows] if skips else []
        if skips:
            return
        block_table = self.runner.block_table()
        self._requests = [
            self._request(row, groups[row], accepted[row], state, block_table[row], max_nodes)
            for row, state, max_nodes in rows
        ]
        self._accepted, self._hidden_states = accepted, hidden_states
        if not self._is_launched:
            self.drafter.launch_heads(self._requests, hidden_states)

    def draft(self) -> dict[str, DraftTree]:
        """The trees of the next step, by request; a request without drafts may be absent."""
        runner, requests = self.runner, self._requests
        is_launched, self._is_launched = self._is_launched, False
        if self.skipped:
            if runner.recorder is not None:
                runner.recorder.note_skipped(self.skipped)
            return {}
        num_others = len(self._accepted) - len(requests)
        if is_launched:
            self._expects_drafts = self.drafter.would_draft(requests, num_others)
            drafts = [NO_DRAFTS] * len(requests)
        else:
            drafts = self.drafter.draft(requests, self._hidden_states, num_others)
            self._expects_drafts = any(len(request_drafts.tree) for request_drafts in drafts)
        if runner.recorder is not None:
            runner.recorder.note_drafts(
                {r.req_id: d for r, d in zip(requests, drafts, strict=True)}
            )
        if is_launched:
            return {}
        drafted = {r.req_id: d.tree for r, d in zip(requests, drafts, strict=True)}
        if not runner.prelaunches or not self.prelauncher.launch(
            drafted, [emitted.tokens for emitted in self._accepted]
        ):
            self.prelauncher.drafted_trees.expect(drafted)
        return drafted

    def _may_draft(
        self, groups: Sequence[VerifyRows], accepted: Sequence[VerifyResult]
    ) -> list[tuple[int, RequestState, int]]:
        """Who may be drafted for: batch row, state, and how many nodes there is room for."""
        states, most = self.runner.request_states, self.runner.most_drafts(len(groups))
        rows: list[tuple[int, RequestState, int]] = []
        for row, (group, emitted) in enumerate(zip(groups, accepted, strict=True)):
            state = states[group.req_id]
            if not emitted.tokens or not state.speculate:
                continue
            # One token more than the drafts is emitted, and all must fit.
            room = state.max_tokens - state.draft.num_tokens - len(emitted.tokens) - 1
            if room > 0:
                rows.append((row, state, min(room, most)))
        return rows

    def _request(
        self,
        row: int,
        group: VerifyRows,
        emitted: VerifyResult,
        state: RequestState,
        blocks: np.ndarray,
        max_nodes: int,
    ) -> DraftRequest:
        root_row = int(self.runner.query_start_loc.np[row + 1]) - len(group.tree) - 1
        return DraftRequest(
            req_id=group.req_id,
            state=state,
            bonus_token=emitted.tokens[-1],
            num_tokens=state.draft.num_tokens + len(emitted.tokens),
            blocks=blocks,
            hidden_row=root_row + (emitted.nodes[-1] if emitted.nodes else 0),
            max_nodes=max_nodes,
            noise=self.runner.visible_noise(group.req_id),
        )
