"""What an iteration took, by part, under the record's cost model.

Times are those of the request alone: in a batch it shares them with the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.explain.record import Iteration, Record


@dataclass(frozen=True, slots=True)
class Times:
    """What was spent, in ms.

    Attributes:
        verify_ms: of the verify pass.
        passes_ms: of self-draft passes.
        heads_ms: of free heads.
    """

    verify_ms: float = 0.0
    passes_ms: float = 0.0
    heads_ms: float = 0.0

    @property
    def total_ms(self) -> float:
        """All parts together."""
        return self.verify_ms + self.passes_ms + self.heads_ms

    def __add__(self, other: Times) -> Times:
        return Times(
            self.verify_ms + other.verify_ms,
            self.passes_ms + other.passes_ms,
            self.heads_ms + other.heads_ms,
        )


def times_of(iteration: Iteration, record: Record) -> Times:
    """What a decode iteration took (the prompt's is not drafting's).

    Args:
        iteration: of the record.
        record: gives the cost model and the budget of a draft pass.

    Returns:
        The estimated times.
    """
    cost, position = record.cost, iteration.position
    kv_tokens = min(record.options.budget_tokens, position)
    return Times(
        cost.tree_ms(iteration.num_drafted, iteration.side_chains, position),
        iteration.passes * _pass_ms(cost, kv_tokens) if iteration.passes else 0.0,
        cost.heads_ms * iteration.free_heads,
    )


def _pass_ms(cost: CostModel, kv_tokens: int) -> float:
    """Where contexts are too short for a draft pass to be measured, it is a plain pass."""
    if cost.draft_points:
        return cost.draft_pass_ms(kv_tokens)
    return cost.verify_ms(1, kv_tokens)
