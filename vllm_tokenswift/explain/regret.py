"""Time lost against an oracle that knows which drafts would have been accepted.

The oracle stands at every iteration of the recorded run and knows the tokens that came. It
would have written on at the fastest pace, in ms per token, that was to be had there:

- a chain that the text proposed (n-grams, suffix matches) and that was accepted, as much of
  the longest one as is fastest: ``V(1 + l) / (1 + l)`` for ``l`` from 0 (plain decoding) to
  its length, where ``V`` is the verify step at this context;
- or what the run itself had accepted, without what it wasted. What heads and self-draft
  passes proposed is not recorded, so it is taken as it was: where they brought something
  accepted, their time is part of this pace, otherwise it is waste.

An iteration that emitted ``e`` tokens in ``R`` ms has lost ``R - e * pace``. With ``d``
nodes drafted, ``a`` accepted, ``C`` ms of side chains and ``H`` ms of passes and heads,
``R = V(1 + d) + C + H``, and the loss is, without remainder, the sum over these causes:

- *rejected*: ``V(1 + d) + C - V(1 + a)`` where ``a > 0``: rows that were verified beside
  the accepted ones; nothing where the pass was faster with them;
- *nothing accepted*: the same where ``a = 0``: drafting where plain decoding was due;
- *passes*: ``H`` where it brought nothing accepted; where it did, what remains above the
  fastest pace of at most ``a`` drafts (the text alone, or plain decoding, was faster);
- *too dear*: that same rest where no pass or heads are to blame: accepted drafts that
  cost more than they saved;
- *left out*: what a longer accepted chain, proposed by the text, would have saved beyond that.

Each is at least 0. The pace is the iteration's own, so an oracle that stood elsewhere after
a longer chain is not followed: proposals of one long repetition count at every iteration in it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from vllm_tokenswift.explain.record import HEAD_SOURCES, Iteration, Record
from vllm_tokenswift.explain.times import times_of

NOTHING_ALLOWED = "none"


@dataclass(frozen=True, slots=True)
class Regret:
    """Milliseconds lost, by cause (the causes are the module's)."""

    rejected: float = 0.0
    nothing_accepted: float = 0.0
    passes: float = 0.0
    too_dear: float = 0.0
    left_out: float = 0.0

    def by_cause(self) -> dict[str, float]:
        """Milliseconds by the cause's name."""
        return {cause.name: getattr(self, cause.name) for cause in fields(self)}

    @property
    def total_ms(self) -> float:
        """All causes together."""
        return sum(self.by_cause().values())

    def __add__(self, other: Regret) -> Regret:
        return Regret(**{name: ms + getattr(other, name) for name, ms in self.by_cause().items()})


def regrets(record: Record) -> list[Regret]:
    """Time lost by every iteration.

    Args:
        record: of a finished generation.

    Returns:
        A regret for each iteration, in their order.
    """
    return [
        _regret(iteration, record, proposed)
        for iteration, proposed in zip(record.iterations, longest_proposals(record), strict=True)
    ]


def longest_proposals(record: Record) -> list[int]:
    """Tokens of the longest chain that the text proposed and that came, at every iteration.

    Args:
        record: its text is replayed through the indexes that the request ran with.

    Returns:
        A number of tokens for each iteration, 0 where nothing might be drafted.
    """
    state, tokens, known = record.draft_state(), record.token_ids, 0
    longest: list[int] = []
    for iteration in record.iterations:
        position = iteration.position
        state.append_tokens(tokens[known:position])
        known = position
        allowed = iteration.is_decode and NOTHING_ALLOWED not in iteration.decisions
        # One token more than the chain is emitted.
        limit = min(record.options.num_speculative_tokens, len(tokens) - position - 1)
        longest.append(
            state.longest_proposal(tokens[position : position + limit]) if allowed else 0
        )
    return longest


def _regret(iteration: Iteration, record: Record, proposed: int) -> Regret:
    if not iteration.is_decode:
        return Regret()
    cost, emitted, accepted = record.cost, iteration.emitted, iteration.num_accepted
    times = times_of(iteration, record)
    heads_ms = times.passes_ms + times.heads_ms
    heads_hit = any(iteration.accepted[source] for source in HEAD_SOURCES)

    useful_ms = min(cost.tree_ms(accepted, 0, iteration.position), times.verify_ms)
    idle_rows_ms = times.verify_ms - useful_ms
    idle_heads_ms = heads_ms
    if heads_hit:
        useful_ms += heads_ms
        idle_heads_ms = 0.0

    chains_ms = cost.step_curve_ms(1, proposed, cost.drafting_ms, iteration.position)
    paces = chains_ms / np.arange(1, 2 + proposed)
    as_short = min(useful_ms / emitted, float(paces[: accepted + 1].min()))
    rest_ms = useful_ms - emitted * as_short
    longer = paces[accepted + 1 :]
    pace = min(as_short, float(longer.min())) if len(longer) else as_short
    heads_to_blame = heads_hit and heads_ms > 0
    return Regret(
        rejected=idle_rows_ms if accepted else 0.0,
        nothing_accepted=0.0 if accepted else idle_rows_ms,
        passes=idle_heads_ms + (rest_ms if heads_to_blame else 0.0),
        too_dear=0.0 if heads_to_blame else rest_ms,
        left_out=emitted * (as_short - pace),
    )
