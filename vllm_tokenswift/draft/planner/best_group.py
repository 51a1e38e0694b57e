"""For whom a source that costs time pays, where those who use it share its cost."""

from __future__ import annotations

from collections.abc import Sequence
from math import log1p


def best_group(
    extra: Sequence[float],
    eligible: Sequence[bool],
    tokens: Sequence[float],
    ms: float,
    source_ms: Sequence[float],
) -> list[int]:
    """The requests with whom a source makes the batch's step the fastest, best first.

    Fastest as ``planner.py`` has it. extra: tokens that the source adds to each request. tokens:
    of each, ms: of the step, without it. source_ms: what it costs for one eligible request,
    for two together and so on. Empty where it only slows down.
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
