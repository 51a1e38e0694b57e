"""When nobody looks whether drafts would pay, where a look takes time from the step.

After a pass over all weights the code and the data that look for drafts are no longer in the
processor's caches: on a CPU a look takes as long for four requests as for sixteen, and that is
4% of a small model's step. So a batch counts what looking brought it: the tokens emitted beyond
one, less those that plain decoding would have written in the time that look and drafts took.
While that is below nothing, only one step in four is looked at; the others go by as if nobody
speculated. What a new text is trusted with counts once for a batch, whose requests are evidence for
each other: one request is looked at some thirty times before its first rest, sixteen are six times.

On a GPU no step without drafts waits for a look, but looks take the host, which has the next
step to make: there the planner says how many may go by (:meth:`Planner.rests_meanwhile`).
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tokenswift.common.running_mean import RunningMean

# A look for all requests of a batch on a CPU of two cores: planning, what it prepares, and the
# indexes that take in the tokens. Where a step takes less than 15 ms they stay in its caches.
_LOOK_MS = 0.6
_MOST_OF_A_STEP = 0.04
_SKIPPED_IN_A_ROW = 3
# Looks in the average, and what it starts from: looks in vain at a text that has just begun end
# after some thirty.
_MEMORY = 16.0
_PRIOR = 0.2


class BackOff:
    """Of one request; a function of texts and the cost model alone, the same on every rank.

    ``gain``: tokens that a look has brought it, on average; ``trusted``: what is left in it of
    those that it started from.
    """

    def __init__(self) -> None:
        self.gain = RunningMean(_MEMORY, _PRIOR, _MEMORY)
        self.trusted = _PRIOR
        self._skipped = 0
        self._lost: float | None = None

    def may_skip(self, in_a_row: int = _SKIPPED_IN_A_ROW) -> bool:
        """Whether fewer steps than that went by since the last look."""
        return self._skipped < in_a_row

    def skipped(self) -> None:
        """A step went by without a look."""
        self._skipped += 1

    def looked_meanwhile(self) -> None:
        """Somebody looked while the step was under way, which took no time from it."""
        self._skipped = 0

    def looked(self, plain_ms: float, more_ms: float) -> None:
        """A step's drafts were planned; :meth:`observe` tells what it emitted.

        plain_ms: of the batch's step without drafts; more_ms: what those planned add.
        """
        self._skipped = 0
        self._lost = more_ms / plain_ms + min(_LOOK_MS / plain_ms, _MOST_OF_A_STEP)

    def observe(self, num_tokens: int) -> None:
        """What the step emitted that was looked at last."""
        if self._lost is None:
            return
        self.gain.observe(num_tokens - 1 - self._lost)
        self.trusted -= self.trusted / _MEMORY
        self._lost = None


def rests(requests: Sequence[BackOff]) -> bool:
    """Whether a batch's next step may go by without a look."""
    seen = sum(r.gain.mean - r.trusted for r in requests)
    trusted = sum(r.trusted for r in requests) / len(requests)
    return seen + trusted < 0 and all(r.may_skip() for r in requests)
