"""A record of a replay: what a plan would have done with a text, without a model."""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tokenswift.draft.planner.planner import Planner
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.explain.record import PROMPT, Iteration, Record
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.tree import DraftTree


class ReplayRecorder:
    """Follows :func:`~vllm_tokenswift.explain.replay.replay`; :meth:`add` is its ``on_iteration``.

    Args:
        name: the record's request id.
        tokens: the text that is replayed.
        planner: that plans for it.
        limit: nodes of a tree at most, as the replay is given it.
        prompt_len: tokens that are there before the first iteration, as the replay is given it.
    """

    def __init__(
        self, name: str, tokens: Sequence[int], planner: Planner, limit: int, prompt_len: int = 1
    ) -> None:
        self._name = name
        self._tokens = list(tokens)
        self._planner = planner
        self._limit = limit
        self._prompt_len = prompt_len
        self._iterations = [Iteration(prompt_len, emitted=1, decisions=(PROMPT,))]

    def add(
        self, position: int, tree: DraftTree, accepted: list[int], heads: HeadProposals | None
    ) -> None:
        """Notes one iteration.

        Args:
            position: tokens of the text before it.
            tree: what was drafted.
            accepted: nodes of the tree, from the root's child down.
            heads: what heads or a draft pass had proposed, None where they were not asked.
        """
        drafted_by_source, accepted_by_source = tree.nodes_by_source(accepted)
        decisions = ["drafted" if len(tree) else "plain"]
        if heads is not None:
            decisions.append("free_heads" if heads.free else "self_draft")
        self._iterations.append(
            Iteration(
                position,
                emitted=min(len(accepted) + 1, len(self._tokens) - position),
                drafted=drafted_by_source,
                accepted=accepted_by_source,
                side_chains=len(tree.chains) - 1,
                passes=heads.own_depths if heads is not None and not heads.free else 0,
                free_heads=heads.num_passes if heads is not None and heads.free else 0,
                decisions=tuple(decisions),
            )
        )

    def record(self) -> Record:
        """The record, once the replay has ended."""
        planner = self._planner
        options = TokenSwiftOptions(
            num_speculative_tokens=self._limit, plan=planner.mode, budget_tokens=planner.budget
        )
        return Record(
            self._name, self._prompt_len, self._tokens, planner.cost, options, self._iterations
        )
