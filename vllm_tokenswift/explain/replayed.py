"""A record of a replay: what a plan would have done with a text, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tokenswift.draft.candidates import HeadCandidates
from vllm_tokenswift.draft.planner import Planner
from vllm_tokenswift.draft.replay import Heads, replay
from vllm_tokenswift.explain.record import PROMPT, Iteration, Record, nodes_by_source
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.tree import DraftTree


def replayed_record(
    name: str,
    tokens: Sequence[int],
    planner: Planner,
    limit: int,
    prompt_len: int = 1,
    self_heads: Heads | None = None,
    free_heads: Heads | None = None,
) -> Record:
    """The record of :func:`~vllm_tokenswift.draft.replay.replay` of ``tokens``."""
    iterations = [Iteration(prompt_len, emitted=1, decisions=(PROMPT,))]

    def add(
        position: int, tree: DraftTree, accepted: list[int], heads: HeadCandidates | None
    ) -> None:
        drafted_by_source, accepted_by_source = nodes_by_source(tree, accepted)
        decisions = ["drafted" if len(tree) else "plain"]
        if heads is not None:
            decisions.append("free_heads" if heads.free else "self_draft")
        iterations.append(
            Iteration(
                position,
                emitted=min(len(accepted) + 1, len(tokens) - position),
                drafted=drafted_by_source,
                accepted=accepted_by_source,
                side_chains=len(tree.chains) - 1,
                passes=int(heads is not None and not heads.free),
                free_heads=heads is not None and heads.free,
                decisions=tuple(decisions),
            )
        )

    replay(tokens, planner, limit, prompt_len, self_heads, free_heads, on_iteration=add)
    options = TokenSwiftOptions(
        num_speculative_tokens=limit, plan=planner.mode, budget_tokens=planner.budget
    )
    return Record(name, prompt_len, list(tokens), planner.cost, options, iterations)
