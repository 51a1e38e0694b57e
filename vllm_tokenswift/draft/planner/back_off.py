"""When steps go by without a draft attempt, where an attempt takes time from the step.

An *attempt* looks whether drafts would pay, and costs time whether it finds any or not. So a batch
counts what attempts brought it: the tokens emitted beyond one, less those that plain decoding
would have written in the time that attempt and drafts took. While that is below nothing, there is
an attempt in one step of four; the others are *skipped*, as if nobody speculated. What a new text
is trusted with counts once for a batch, whose requests are evidence for each other: one request
has some thirty attempts before its first skipped step, sixteen have six.

On a GPU no step without drafts waits for an attempt, but attempts take the host, which has the next
step to make: there the planner says how many may go by (:meth:`Planner.skip_step_meanwhile`).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tokenswift.common.running_mean import RunningMean

# An attempt for all requests of a batch on a CPU of two cores; of a short step it takes less.
_ATTEMPT_MS = 0.6
_MOST_OF_A_STEP = 0.04
_SKIPPED_IN_A_ROW = 3
# Attempts in the average, and what it starts from.
_MEMORY = 16.0
_PRIOR = 0.2


class BackOff:
    """Of one request; a function of texts and the cost model alone, the same on every rank.

    Attributes:
        benefit: tokens that an attempt has brought it, on average.
        trusted: what is left in it of those that it started from.
    """

    def __init__(self) -> None:
        self.benefit = RunningMean(_MEMORY, _PRIOR, _MEMORY)
        self.trusted = _PRIOR
        self._num_skipped = 0
        self._lost: float | None = None

    def may_skip(self, in_a_row: int = _SKIPPED_IN_A_ROW) -> bool:
        """Whether fewer steps than that went by since the last attempt."""
        return self._num_skipped < in_a_row

    def note_skipped(self) -> None:
        """A step goes by without an attempt."""
        self._num_skipped += 1

    def note_free_attempt(self) -> None:
        """There was an attempt while the step was under way, which took no time from it."""
        self._num_skipped = 0

    def note_attempt(self, plain_ms: float, more_ms: float) -> None:
        """A step's drafts were planned; :meth:`observe_emitted` tells what it emitted.

        Args:
            plain_ms: of the batch's step without drafts.
            more_ms: what those planned add.
        """
        self._num_skipped = 0
        self._lost = more_ms / plain_ms + min(_ATTEMPT_MS / plain_ms, _MOST_OF_A_STEP)

    def observe_emitted(self, num_tokens: int) -> None:
        """What the step of the last attempt emitted."""
        if self._lost is None:
            return
        self.benefit.observe(num_tokens - 1 - self._lost)
        self.trusted -= self.trusted / _MEMORY
        self._lost = None


def may_skip_step(requests: Sequence[BackOff]) -> bool:
    """Whether a batch's next step may go by without an attempt.

    Args:
        requests: of the batch, one at least.
    """
    seen = sum(r.benefit.mean - r.trusted for r in requests)
    trusted = sum(r.trusted for r in requests) / len(requests)
    return seen + trusted < 0 and all(r.may_skip() for r in requests)
