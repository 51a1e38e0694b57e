"""What a source that costs time adds, learned from the iterations with it and without it.

A self-draft pass costs a pass of the target, free heads one of its LM head.
"""

from __future__ import annotations

from bisect import bisect_right

# Expected tokens of an iteration without the pass, at which a bucket begins.
_EXPECTED_EDGES = (1.3, 1.8, 2.5, 4.0, 7.0)
# The draft pass knows one more token almost surely; and what follows it is found in the text.
SELF_DRAFT_PRIOR = 0.9
# The design study's tokens per iteration with free heads and without them: 2.71 and 2.3.
FREE_HEADS_PRIOR = 0.4
_PRIOR_WEIGHT = 4.0
# Nodes that are drafted because of the source, before any were.
_NODES_PRIOR = 4.0
# Heads bring half a token an iteration, mostly none and now and then several: a few
# iterations say nothing about them.
FREE_HEADS_PRIOR_WEIGHT = 24.0
_MEMORY = 32.0
_LONG_AGO = 1 << 30
_MAX_BACKOFF = 8


class SourceGain:
    """Tokens an iteration emits beyond what is expected of it without the source.

    Kept apart by that expectation: where the text is surely continued the source adds little.

    prior: tokens it is taken to add before anything was seen. prior_weight: iterations that
        this counts for.

    ``asked_last``: what was decided last. ``nodes``: drafted because of the source on average,
    of the iterations with it.
    """

    def __init__(self, prior: float, prior_weight: float = _PRIOR_WEIGHT) -> None:
        size = len(_EXPECTED_EDGES) + 1
        self._extra = {False: [0.0] * size, True: [prior] * size}
        self._weights = {False: [_PRIOR_WEIGHT] * size, True: [prior_weight] * size}
        self.asked_last = False
        self.nodes = _NODES_PRIOR
        self._num_drafted = 0
        self._nodes_without: int | None = None
        self._pending: tuple[float, bool, float] | None = None
        self._steps_since_pass = 0
        self._backoff = 1

    def tokens(self, expected: float, with_pass: bool) -> float:
        """Tokens to count on where the plan without the pass expects ``expected``."""
        return max(1.0, expected + self._extra[with_pass][bisect_right(_EXPECTED_EDGES, expected)])

    def wants_probe(self, interval: float) -> bool:
        """Whether the last trial is long enough ago to ask again.

        interval: decisions between trials that the time set aside for them allows; stretched
        while trials fail. A trial that paid is repeated at once.
        """
        return self._steps_since_pass >= interval * self._backoff

    def decided(
        self, expected: float, with_pass: bool, break_even: float, nodes_without: int
    ) -> None:
        """Remember a decision; :meth:`drafted` and :meth:`observe` tell how it ended.

        break_even: tokens beyond ``expected`` that pay for the pass. nodes_without: that the
        plan without it has.
        """
        self.asked_last = with_pass
        self._nodes_without = nodes_without if with_pass else None
        self._pending = (expected, with_pass, break_even)
        self._steps_since_pass = 0 if with_pass else self._steps_since_pass + 1

    def drafted(self, num_nodes: int) -> None:
        """How many nodes the tree upon the last decision has."""
        if self._nodes_without is None:
            return
        more = max(0, num_nodes - self._nodes_without)
        self._nodes_without = None
        self._num_drafted += 1
        weight = min(self._num_drafted + _PRIOR_WEIGHT, _MEMORY)
        self.nodes += (more - self.nodes) / weight

    def observe(self, num_tokens: int) -> None:
        """The iteration decided on last emitted ``num_tokens``."""
        if self._pending is None:
            return
        expected, with_pass, break_even = self._pending
        self._pending = None
        if with_pass and num_tokens - expected >= break_even:
            self._backoff = 1
            self._steps_since_pass = _LONG_AGO
        elif with_pass:
            self._backoff = min(self._backoff * 2, _MAX_BACKOFF)
        bucket = bisect_right(_EXPECTED_EDGES, expected)
        weight = min(self._weights[with_pass][bucket] + 1.0, _MEMORY)
        self._weights[with_pass][bucket] = weight
        extra = self._extra[with_pass][bucket]
        self._extra[with_pass][bucket] = extra + (num_tokens - expected - extra) / weight
