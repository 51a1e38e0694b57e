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
from collections.abc import Sequence
from math import log1p

from vllm_tokenswift.common.arrays import Ints
from vllm_tokenswift.common.running_mean import RunningMean
from vllm_tokenswift.draft.tree_builder import NO_NODES

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


class SourceBenefit:
    """Tokens an iteration emits beyond what is expected of it, without the source and with it.

    Kept apart by that expectation: where the text is surely continued the source adds little.

    Args:
        prior: tokens it is taken to add before anything was seen.
        prior_weight: iterations that this counts for.

    Attributes:
        asked_last: what was decided last.
        nodes_without: the nodes that were planned without it when it was asked last, of
            :class:`~vllm_tokenswift.draft.tree_builder.DraftedNodes`.
    """

    def __init__(self, prior: float, prior_weight: float = _PRIOR_WEIGHT) -> None:
        size = len(_EXPECTED_EDGES) + 1
        self._beyond = [RunningMean(_MEMORY, 0.0, _PRIOR_WEIGHT) for _ in range(size)]
        self._added = [RunningMean(_MEMORY, prior, prior_weight) for _ in range(size)]
        self._nodes = RunningMean(_MEMORY, _NODES_PRIOR, _PRIOR_WEIGHT)
        self.asked_last = False
        self.nodes_without = NO_NODES
        self._awaits_drafts = False
        self._pending: tuple[float, bool, float] | None = None
        self._steps_since_use = 0
        self._backoff = 1

    @property
    def mean_nodes(self) -> float:
        """Nodes drafted because of the source, on average."""
        return self._nodes.mean

    def expected_tokens(self, planned: float, with_source: bool) -> float:
        """Tokens of an iteration to count on.

        Args:
            planned: tokens that the plan without the source expects.
            with_source: whether the source is used.
        """
        bucket = bisect_right(_EXPECTED_EDGES, planned)
        tokens = max(1.0, planned + self._beyond[bucket].mean)
        return tokens + self._added[bucket].mean if with_source else tokens

    def wants_probe(self, interval: float) -> bool:
        """Whether the last trial is long enough ago to ask again.

        A trial that paid is repeated at once.

        Args:
            interval: decisions between trials that the time set aside for them allows;
                stretched while trials fail.
        """
        return self._steps_since_use >= interval * self._backoff

    def note_decision(
        self, planned: float, with_source: bool, to_pay: float, nodes_without: Ints = NO_NODES
    ) -> None:
        """Remembers a decision; :meth:`observe_drafted` and :meth:`observe_emitted` tell how it
        ended.

        Args:
            planned: tokens that the plan without the source expects.
            with_source: what was decided.
            to_pay: tokens added that pay for the source.
            nodes_without: see :class:`SourceBenefit`; kept.
        """
        self.asked_last = with_source
        self.nodes_without = nodes_without
        self._awaits_drafts = with_source
        self._pending = (planned, with_source, to_pay)
        self._steps_since_use = 0 if with_source else self._steps_since_use + 1

    def observe_drafted(self, num_nodes: int) -> None:
        """How many nodes were drafted upon the last decision; without the source, no news."""
        if self._awaits_drafts:
            self._awaits_drafts = False
            self._nodes.observe(max(0, num_nodes - len(self.nodes_without)))

    def observe_emitted(self, num_tokens: int, num_without: int | None = None) -> None:
        """What the iteration decided on last emitted.

        Args:
            num_tokens: emitted.
            num_without: what it would have emitted without the source, where it had it and that
                is known; else what such iterations emit stands for it.
        """
        if self._pending is None:
            return
        planned, with_source, to_pay = self._pending
        self._pending = None
        bucket = bisect_right(_EXPECTED_EDGES, planned)
        if not with_source:
            self._beyond[bucket].observe(num_tokens - planned)
            return
        if num_without is not None:
            self._beyond[bucket].observe(num_without - planned)
        without: float | None = num_without
        if without is None:
            without = self.expected_tokens(planned, with_source=False)
        added = num_tokens - without
        self._added[bucket].observe(added)
        if added >= to_pay:
            self._backoff = 1
            self._steps_since_use = _LONG_AGO
        else:
            self._backoff = min(self._backoff * 2, _MAX_BACKOFF)


def best_group(
    extra: Sequence[float],
    eligible: Sequence[bool],
    tokens: Sequence[float],
    ms: float,
    source_ms: Sequence[float],
) -> list[int]:
    """The requests with whom a source makes the batch's step the fastest, best first.

    Fastest as ``planner.py`` has it: those who use a source share its cost.

    Args:
        extra: ``[requests]``, tokens that the source adds to each.
        eligible: ``[requests]``, who may use it.
        tokens: ``[requests]``, of each without it.
        ms: of the step without it.
        source_ms: what it costs for one eligible request, for two together and so on.

    Returns:
        Places of requests, none where it only slows down.
    """
    order = sorted(
        (index for index, may in enumerate(eligible) if may),
        key=lambda i: (-extra[i] / tokens[i], i),
    )
    best, best_speed, sum_of_logs = 0, 0.0, 0.0
    for count, index in enumerate(order, start=1):
        sum_of_logs += log1p(max(extra[index], -0.99 * tokens[index]) / tokens[index])
        speed = sum_of_logs - len(tokens) * log1p(source_ms[count - 1] / ms)
        if speed > best_speed:
            best_speed, best = speed, count
    return order[:best]
