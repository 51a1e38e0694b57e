"""What a source that costs time adds, learned from the iterations with it and without it.

A self-draft pass costs a pass of the target, free heads one of its LM head.

Iterations emit one token or ten, as the text happens to repeat itself, and heads bring a few
tenths: comparing the iterations that had them with those that had not takes hundreds, and where
they are always asked there are no others. But what an iteration would have emitted without
them is known once its tokens are: as many as the nodes planned without them follow. So every
iteration with heads is compared with itself.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from vllm_tokenswift.common.running_mean import RunningMean
from vllm_tokenswift.draft.tree_builder import TAKEN_COLUMNS, Ints

# Expected tokens of an iteration without the source, at which a bucket begins.
_EXPECTED_EDGES = (1.3, 1.8, 2.5, 4.0, 7.0)
# The draft pass knows one more token almost surely; and what follows it is found in the text.
SELF_DRAFT_PRIOR = 0.9
# The design study's tokens per iteration with free heads and without them: 2.71 and 2.3.
FREE_HEADS_PRIOR = 0.4
_PRIOR_WEIGHT = 4.0
# Heads bring half a token an iteration, mostly none and now and then several.
FREE_HEADS_PRIOR_WEIGHT = 8.0
# Nodes that are drafted because of the source.
_NODES_PRIOR = 4.0
_MEMORY = 32.0
_LONG_AGO = 1 << 30
_MAX_BACKOFF = 8

NO_NODES: Ints = np.empty((0, TAKEN_COLUMNS), np.int32)


class SourceBenefit:
    """Tokens an iteration emits beyond what is expected of it, without the source and with it.

    Kept apart by that expectation: where the text is surely continued the source adds little.

    prior: tokens it is taken to add before anything was seen. prior_weight: iterations that
        this counts for.

    ``asked_last``: what was decided last. ``nodes``: drafted because of the source, on average.
    ``planned``: the nodes that were planned without it when it was asked last, as
    :func:`~vllm_tokenswift.draft.tree_builder.take_best_first` gives them.
    """

    def __init__(self, prior: float, prior_weight: float = _PRIOR_WEIGHT) -> None:
        size = len(_EXPECTED_EDGES) + 1
        self._beyond = [RunningMean(_MEMORY, 0.0, _PRIOR_WEIGHT) for _ in range(size)]
        self._added = [RunningMean(_MEMORY, prior, prior_weight) for _ in range(size)]
        self._nodes = RunningMean(_MEMORY, _NODES_PRIOR, _PRIOR_WEIGHT)
        self.asked_last = False
        self.planned = NO_NODES
        self._awaits_drafts = False
        self._pending: tuple[float, bool, float] | None = None
        self._steps_since_pass = 0
        self._backoff = 1

    @property
    def nodes(self) -> float:
        return self._nodes.mean

    def tokens(self, expected: float, with_pass: bool) -> float:
        """Tokens to count on where the plan without the source expects ``expected``."""
        bucket = bisect_right(_EXPECTED_EDGES, expected)
        tokens = max(1.0, expected + self._beyond[bucket].mean)
        return tokens + self._added[bucket].mean if with_pass else tokens

    def wants_probe(self, interval: float) -> bool:
        """Whether the last trial is long enough ago to ask again.

        interval: decisions between trials that the time set aside for them allows; stretched
        while trials fail. A trial that paid is repeated at once.
        """
        return self._steps_since_pass >= interval * self._backoff

    def decided(
        self, expected: float, with_pass: bool, to_pay: float, planned: Ints = NO_NODES
    ) -> None:
        """Remember a decision; :meth:`drafted` and :meth:`observe` tell how it ended.

        to_pay: tokens added that pay for the source. planned: see :class:`SourceBenefit`; kept.
        """
        self.asked_last = with_pass
        self.planned = planned
        self._awaits_drafts = with_pass
        self._pending = (expected, with_pass, to_pay)
        self._steps_since_pass = 0 if with_pass else self._steps_since_pass + 1

    def drafted(self, num_nodes: int) -> None:
        """How many nodes were drafted upon the last decision; without the source, no news."""
        if self._awaits_drafts:
            self._awaits_drafts = False
            self._nodes.observe(max(0, num_nodes - len(self.planned)))

    def observe(self, num_tokens: int, num_without: int | None = None) -> None:
        """The iteration decided on last emitted ``num_tokens``.

        num_without: what it would have emitted without the source, where it had it and that is
        known; else what such iterations emit stands for it.
        """
        if self._pending is None:
            return
        expected, with_pass, to_pay = self._pending
        self._pending = None
        bucket = bisect_right(_EXPECTED_EDGES, expected)
        if not with_pass:
            self._beyond[bucket].observe(num_tokens - expected)
            return
        if num_without is not None:
            self._beyond[bucket].observe(num_without - expected)
        without = self.tokens(expected, with_pass=False) if num_without is None else num_without
        added = num_tokens - without
        self._added[bucket].observe(added)
        if added >= to_pay:
            self._backoff = 1
            self._steps_since_pass = _LONG_AGO
        else:
            self._backoff = min(self._backoff * 2, _MAX_BACKOFF)
