"""What a step verifies, and what becomes of what it accepted."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from vllm_tokenswift.draft.top_tokens import VerifyTopK
from vllm_tokenswift.engine.next_step import NextStep
from vllm_tokenswift.engine.runner_view import RunnerView
from vllm_tokenswift.engine.step import Step
from vllm_tokenswift.engine.step_trees import StepTrees
from vllm_tokenswift.sampling.acceptance_walk import VerifyResult, VerifyRows
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree


class Verifier:
    """From a step's trees to its commit, for one runner."""

    def __init__(self, runner: RunnerView) -> None:
        self._runner = runner

    def rows_of(self, step: Step, skipped: Collection[str]) -> list[VerifyRows]:
        """What the tree sampler verifies, by batch row.

        Args:
            step: launched.
            skipped: requests that nothing was drafted for, though it might have been: nobody
                looks at what the target finds likeliest there.
        """
        runner, batch = self._runner, self._runner.input_batch
        trees = {rows.req_id: rows.tree for rows in step.trees.trees}
        return [
            VerifyRows(
                req_id,
                tree := trees.get(req_id, EMPTY_TREE),
                discard=bool(runner.discard_request_mask.np[batch_row]),
                dead_nodes=(
                    frozenset(range(1, len(tree) + 1))
                    if req_id in step.placeholders
                    else step.dead_nodes.get(req_id, frozenset())
                ),
                wants_top_k=req_id not in skipped and self._wants_top_k(req_id, tree),
            )
            for batch_row, req_id in enumerate(batch.req_ids)
        ]

    def _wants_top_k(self, req_id: str, tree: DraftTree) -> bool:
        """Whether drafting looks at what the target finds likeliest at a request's rows."""
        runner = self._runner
        is_cheap = runner.top_k_is_cheap or runner.input_batch.num_reqs == 1 or len(tree) > 0
        return is_cheap and runner.request_states[req_id].wants_top_k

    def commit(
        self,
        trees: StepTrees,
        groups: Sequence[VerifyRows],
        results: Sequence[VerifyResult],
        hidden_states: torch.Tensor,
        next_step: NextStep,
    ) -> None:
        """Makes what a step emitted part of every state: tokens, KV cache, texts.

        The device begins to draft for the next step before the cache and the texts have it.

        Args:
            trees: the step's.
            groups: by batch row, what was verified.
            results: by batch row, what was accepted and emitted.
            hidden_states: ``[query rows, hidden]``, in the form that heads read.
            next_step: which drafts with them.
        """
        runner = self._runner
        emitting = [(rows, result) for rows, result in zip(groups, results, strict=True)]
        emitting = [(rows, result) for rows, result in emitting if result.tokens]
        for rows, result in emitting:
            runner.tree_sampler.commit_tokens(rows.req_id, result.tokens)
        next_step.begin_drafts(groups, results, hidden_states)
        if trees.trees:
            nodes = {g.req_id: r.nodes for g, r in zip(groups, results, strict=True)}
            runner.stats.tokens_moved += runner.tree_attention.commit(
                trees, nodes, runner.block_table()
            )
        for rows, result in emitting:
            top_k = None if result.top_k is None else VerifyTopK(rows.tree, result.top_k)
            runner.request_states[rows.req_id].draft.append_tokens(result.tokens, top_k)
            if runner.recorder is not None:
                runner.recorder.note_iteration(
                    rows.req_id, rows.tree, result.nodes, result.tokens, len(groups)
                )
