"""Counters of what was drafted, accepted and emitted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_tokenswift.tree import DraftTree, Source

_OF_THE_TEXT = (Source.NGRAM, Source.SUFFIX, Source.CONTEXT)


@dataclass
class Stats:
    """Sums over requests and steps since the worker started.

    Attributes:
        num_iterations: verify passes counted per request (the paper's ``T``), plain decode
            steps included.
        num_drafting_iterations: those that carried drafts.
        num_emitted_tokens: tokens sampled.
        num_draft_tokens: nodes verified.
        num_accepted_tokens: the sum of ``a_i`` of the paper's equation for alpha.
        num_ngram_tokens: the sum of ``b_i`` of the equation for beta: tokens accepted in
            iterations whose accepted path came from n-gram reuse (table, suffix or context).
        num_draft_passes: self-draft passes, each for all requests that wanted it.
        num_selections: times that a request's important blocks were selected.
        tokens_moved: accepted tokens whose KV did not lie where plain decoding puts it.
        num_passes_ahead: verify passes launched before their step was scheduled.
        num_passes_unread: those launched before the tokens that they go on from were read.
        num_passes_dropped: those for a step that did not come.
        drafted_by_source: nodes verified, by the source's name.
        accepted_by_source: nodes accepted, by the source's name.
    """

    num_iterations: int = 0
    num_drafting_iterations: int = 0
    num_emitted_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_ngram_tokens: int = 0
    num_draft_passes: int = 0
    num_selections: int = 0
    tokens_moved: int = 0
    num_passes_ahead: int = 0
    num_passes_unread: int = 0
    num_passes_dropped: int = 0
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    accepted_by_source: dict[str, int] = field(default_factory=dict)

    def count_iteration(self, tree: DraftTree, accepted_nodes: list[int], num_emitted: int) -> None:
        """Counts one request's iteration.

        Args:
            tree: what was verified for it, empty in a plain step.
            accepted_nodes: of the tree, from the root's child down.
            num_emitted: tokens that it brought.
        """
        self.num_iterations += 1
        self.num_emitted_tokens += num_emitted
        if not len(tree):
            return
        self.num_drafting_iterations += 1
        self.num_draft_tokens += len(tree)
        self.num_accepted_tokens += len(accepted_nodes)
        drafted, accepted = tree.nodes_by_source(accepted_nodes)
        for total, nodes in (
            (self.drafted_by_source, drafted),
            (self.accepted_by_source, accepted),
        ):
            for source in Source:
                if nodes[source]:
                    name = source.name.lower()
                    total[name] = total.get(name, 0) + nodes[source]
        if accepted_nodes and tree.sources[accepted_nodes[-1] - 1] in _OF_THE_TEXT:
            self.num_ngram_tokens += len(accepted_nodes)

    def alpha(self, gamma: int) -> float:
        """Acceptance rate, paper equation for alpha: accepted / ((gamma + 1) * T).

        Args:
            gamma: heads; the head tree has one level more.
        """
        return self.num_accepted_tokens / max(1, (gamma + 1) * self.num_iterations)

    def beta(self, gamma: int) -> float:
        """N-gram acceptance rate, paper equation for beta.

        Args:
            gamma: heads; the head tree has one level more.
        """
        return self.num_ngram_tokens / max(1, (gamma + 1) * self.num_iterations)

    def as_dict(self) -> dict[str, Any]:
        """All counters by name, as plain JSON values of their own."""
        return {
            **vars(self),
            "drafted_by_source": dict(self.drafted_by_source),
            "accepted_by_source": dict(self.accepted_by_source),
        }
