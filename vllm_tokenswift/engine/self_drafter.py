"""Self-draft passes of one step: the first, and further ones below what it proposes.

Each pass reads its token at the next position and writes its KV at that position's slot, over
the same partial blocks. The verify pass overwrites the slots of the positions it verifies;
those beyond lie behind the computed tokens, and are written again before anything reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_tokenswift.draft.planner.planner import Planner, StepPlan
from vllm_tokenswift.draft.planner.self_draft import PathEnd, SelfDraftPlanner
from vllm_tokenswift.draft.planner.self_draft_acceptance import SelfDraftPath
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.engine.draft_pass import DraftPass, DraftRow
from vllm_tokenswift.engine.draft_request import DraftRequest
from vllm_tokenswift.engine.head_drafter import HeadDrafter, SelfDraftRows
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.options import MAX_SELF_DRAFT_STEPS

ToStates = Callable[[Any], torch.Tensor]
"""What a pass of the model returned -> hidden states ``[rows, hidden]``."""


@dataclass
class _Passed:
    """A request that has a pass, and what its passes proposed.

    Attributes:
        request: what is drafted for.
        place: its place among the step's requests.
        allocated_blocks: blocks of its row of the block table.
        path: the tokens that its passes go along.
        rows: what each pass proposed.
    """

    request: DraftRequest
    place: int
    allocated_blocks: int
    path: SelfDraftPath = field(default_factory=SelfDraftPath)
    rows: SelfDraftRows = field(default_factory=SelfDraftRows)

    def age(self, depth: int) -> int | None:
        """How old the blocks are that a further pass reads.

        A pass below drafts selects no blocks: it would rank them for tokens that may not come.

        Args:
            depth: of the pass, from 0.

        Returns:
            Tokens since the blocks were selected; None where the pass cannot be run.
        """
        table, num_tokens = self.request.state.table, self.request.num_tokens + depth
        has_slot = num_tokens <= self.allocated_blocks * table.block_size
        if depth >= MAX_SELF_DRAFT_STEPS or not has_slot or table.needs_selection(num_tokens):
            return None
        return table.age(num_tokens)


class SelfDrafter:
    """Runs the passes of a step's requests; the planner says how many.

    Args:
        runner: whose batch it is.
        draft_pass: the runner's.
        head_drafter: drafts below what passes propose.
        planner: whose decisions are counted.
        post_norm: takes from what a pass returned the hidden states after the final norm.
        read_by_heads: takes from it those that heads start from; None where heads do not read a
            draft pass's.
    """

    def __init__(
        self,
        runner: RunnerView,
        draft_pass: DraftPass,
        head_drafter: HeadDrafter,
        planner: Planner,
        post_norm: ToStates,
        read_by_heads: ToStates | None,
    ) -> None:
        self._runner = runner
        self._draft_pass = draft_pass
        self._head_drafter = head_drafter
        self._decisions = planner.decisions
        self._planner = SelfDraftPlanner(planner)
        self._post_norm, self._read_by_heads = post_norm, read_by_heads

    def propose(
        self, requests: Sequence[DraftRequest], plan: StepPlan, wanted: Sequence[bool]
    ) -> list[HeadProposals]:
        """What passes propose, and heads below it.

        Args:
            requests: those that have a pass.
            plan: of the whole step without passes.
            wanted: who in the step has one.
        """
        places = [place for place, want in enumerate(wanted) if want]
        passed = [
            _Passed(request, place, self._allocated_blocks(request))
            for request, place in zip(requests, places, strict=True)
        ]
        self._renew_blocks(passed, plan)
        output = self._run(passed, [request.bonus_token for request in requests], depth=0)
        if not self._planner.is_asked:
            return self._head_drafter.candidates(requests, *self._states(output))
        ages: list[int | None] = [None] * len(wanted)
        for row in passed:
            ages[row.place] = row.age(1)
        if self._planner.may_go_on(plan, ages, wanted):
            proposals = self._multi_step(passed, output, plan)
        else:
            proposals = self._head_drafter.candidates(requests, *self._states(output))
            for row, proposed in zip(passed, proposals, strict=True):
                self._follow_token(row, proposed.tokens[0], proposed.probabilities[0], plan)
        for row in passed:
            row.request.state.draft.self_draft_acceptance.note_path(row.path)
        return proposals

    def _multi_step(
        self, passed: Sequence[_Passed], output: Any, plan: StepPlan
    ) -> list[HeadProposals]:
        """Goes on from the first pass;

        Args:
            output: what the model returned for it.
        """
        ends: list[PathEnd | None] = [None] * len(plan.requests)
        starts: dict[int, torch.Tensor] = {}  # for heads, by place, of those that stopped early
        running, depth = list(passed), 0
        while True:
            own, start = self._states(output)
            depth += 1
            top = self._head_drafter.own_top([row.request for row in running], own)
            for row, tokens, probabilities in zip(running, *top, strict=True):
                followed = self._follow_token(row, tokens, probabilities, plan)
                row.rows.add(tokens, probabilities, followed)
                ends[row.place] = PathEnd(row.path, row.age(depth))
            goes_on = self._planner.go_on(plan, ends)
            going_on = [row for row in running if goes_on[row.place]]
            if not going_on:
                break
            for state, row in enumerate(running):
                if goes_on[row.place]:
                    continue
                ends[row.place] = PathEnd(row.path, None)
                if start is not None:
                    # CUDA graphs share their memory: the next pass may run over these states.
                    starts[row.place] = start[state].clone()
            output = self._run(going_on, [row.path.tokens[-1] for row in going_on], depth)
            running = going_on
        if starts and start is not None:
            starts.update((row.place, start[state]) for state, row in enumerate(running))
            start = torch.stack([starts[row.place] for row in passed])
        return self._head_drafter.candidates_below(
            [row.request for row in passed], [row.rows for row in passed], start
        )

    def _follow_token(
        self,
        row: _Passed,
        tokens: Sequence[int],
        probabilities: Sequence[float],
        plan: StepPlan,
    ) -> int:
        """Goes on along the likeliest token; returns its place among them."""
        planned, depth = plan.requests[row.place], len(row.path.tokens)
        age = row.request.state.table.age(row.request.num_tokens + depth)
        return row.path.follow(tokens, probabilities, age, planned.state.cells, planned.noise)

    def _run(self, passed: Sequence[_Passed], tokens: Sequence[int], depth: int) -> Any:
        """A pass at the position ``depth`` after the bonus token's;

        Args:
            tokens: those it reads.
        """
        rows = [
            DraftRow(
                row.request.req_id,
                token,
                row.request.num_tokens + depth,
                row.request.blocks,
                row.request.state.table,
            )
            for row, token in zip(passed, tokens, strict=True)
        ]
        output = self._draft_pass.run(rows)
        stats = self._runner.stats
        stats.num_draft_passes += 1
        assert self._draft_pass.last is not None
        stats.num_selections += len(self._draft_pass.last.refreshed)
        return output

    def _renew_blocks(self, passed: Sequence[_Passed], plan: StepPlan) -> None:
        """Drops selections that the planner finds too old, and counts why others are made."""
        selected = [False] * len(plan.requests)
        for row in passed:
            table, num_tokens = row.request.state.table, row.request.num_tokens
            due = table.due(num_tokens)
            if due is not None:
                self._decisions[f"select_{due.value}"] += 1
            selected[row.place] = due is None and table.may_be_early and table.age(num_tokens) > 0
        early = self._planner.wants_fresh_blocks(plan, selected)
        for row in passed:
            if early[row.place]:
                row.request.state.table.forget()

    def _states(self, output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The pass's own states, and those that heads start from."""
        start = self._read_by_heads(output) if self._read_by_heads is not None else None
        return self._post_norm(output), start

    def _allocated_blocks(self, request: DraftRequest) -> int:
        batch = self._runner.input_batch
        row = batch.req_id_to_index[request.req_id]
        return int(batch.block_table[0].num_blocks_per_row[row])
