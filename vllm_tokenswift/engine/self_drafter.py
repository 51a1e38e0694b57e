"""Self-draft passes of one step: the first, and further ones in a row below what it says.

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
    """A request that has a pass, and what its passes said. place: among the step's requests.

    allocated_blocks: of its row of the block table.
    """

    request: DraftRequest
    place: int
    allocated_blocks: int
    path: SelfDraftPath = field(default_factory=SelfDraftPath)
    rows: SelfDraftRows = field(default_factory=SelfDraftRows)

    def age(self, depth: int) -> int | None:
        """Of the blocks that a further pass at ``depth`` (from 0) reads; None: it cannot be run.

        A pass below drafts selects no blocks: it would rank them for tokens that may not come.
        """
        table, num_tokens = self.request.state.table, self.request.num_tokens + depth
        has_slot = num_tokens <= self.allocated_blocks * table.block_size
        if depth >= MAX_SELF_DRAFT_STEPS or not has_slot or table.needs_selection(num_tokens):
            return None
        return table.age(num_tokens)


class SelfDrafter:
    """Runs the passes of a step's requests; the planner says how many.

    post_norm: hidden states after the final norm. read_by_heads: those that heads start from,
    None where heads do not read a draft pass's.
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

    def candidates(
        self, requests: Sequence[DraftRequest], plan: StepPlan, wanted: Sequence[bool]
    ) -> list[HeadProposals]:
        """What passes say, and heads below it.

        requests: those that have a pass. plan: of the whole step without passes. wanted: who in
        the step has one.
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
        for one in passed:
            ages[one.place] = one.age(1)
        if self._planner.may_go_on(plan, ages, wanted):
            found = self._in_a_row(passed, output, plan)
        else:
            found = self._head_drafter.candidates(requests, *self._states(output))
            for one, candidates in zip(passed, found, strict=True):
                self._follow(one, candidates.tokens[0], candidates.probabilities[0], plan)
        for one in passed:
            one.request.state.draft.self_draft_acceptance.note_path(one.path)
        return found

    def _in_a_row(
        self, passed: Sequence[_Passed], output: Any, plan: StepPlan
    ) -> list[HeadProposals]:
        """Goes on from the first pass; output: what the model returned for it."""
        ends: list[PathEnd | None] = [None] * len(plan.requests)
        starts: dict[int, torch.Tensor] = {}  # for heads, by place, of those that stopped early
        going, depth = list(passed), 0
        while True:
            own, start = self._states(output)
            depth += 1
            said = self._head_drafter.own_top([one.request for one in going], own)
            for one, tokens, probabilities in zip(going, *said, strict=True):
                place = self._follow(one, tokens, probabilities, plan)
                one.rows.add(tokens, probabilities, place)
                ends[one.place] = PathEnd(one.path, one.age(depth))
            again = self._planner.go_on(plan, ends)
            rest = [one for one in going if again[one.place]]
            if not rest:
                break
            for row, one in enumerate(going):
                if again[one.place]:
                    continue
                ends[one.place] = PathEnd(one.path, None)
                if start is not None:
                    # CUDA graphs share their memory: the next pass may run over these states.
                    starts[one.place] = start[row].clone()
            output = self._run(rest, [one.path.tokens[-1] for one in rest], depth)
            going = rest
        if starts and start is not None:
            starts.update((one.place, start[row]) for row, one in enumerate(going))
            start = torch.stack([starts[one.place] for one in passed])
        return self._head_drafter.candidates_below(
            [one.request for one in passed],
            [one.rows for one in passed],
            start,
        )

    def _follow(
        self,
        one: _Passed,
        tokens: Sequence[int],
        probabilities: Sequence[float],
        plan: StepPlan,
    ) -> int:
        planned, depth = plan.requests[one.place], len(one.path.tokens)
        age = one.request.state.table.age(one.request.num_tokens + depth)
        return one.path.follow(tokens, probabilities, age, planned.state.cells, planned.noise)

    def _run(self, passed: Sequence[_Passed], tokens: Sequence[int], depth: int) -> Any:
        """A pass at the position ``depth`` after the bonus token's; tokens: those it reads."""
        rows = [
            DraftRow(
                one.request.req_id,
                token,
                one.request.num_tokens + depth,
                one.request.blocks,
                one.request.state.table,
            )
            for one, token in zip(passed, tokens, strict=True)
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
        for one in passed:
            table, num_tokens = one.request.state.table, one.request.num_tokens
            due = table.due(num_tokens)
            if due is not None:
                self._decisions[f"select_{due.value}"] += 1
            selected[one.place] = due is None and table.may_be_early and table.age(num_tokens) > 0
        early = self._planner.wants_fresh_blocks(plan, selected)
        for one in passed:
            if early[one.place]:
                one.request.state.table.forget()

    def _states(self, output: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The pass's own states, and those that heads start from."""
        start = self._read_by_heads(output) if self._read_by_heads is not None else None
        return self._post_norm(output), start

    def _allocated_blocks(self, request: DraftRequest) -> int:
        batch = self._runner.input_batch
        row = batch.req_id_to_index[request.req_id]
        return int(batch.block_table[0].num_blocks_per_row[row])
