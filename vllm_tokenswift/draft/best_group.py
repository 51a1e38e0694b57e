"""For whom a source that costs time pays, where those who use it share its cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def best_group(
    extra: Sequence[float],
    eligible: Sequence[bool],
    tokens: float,
    ms: float,
    source_ms: Callable[[int], float],
) -> list[int]:
    """The requests with whom a source makes the batch's step the fastest, best first.

    extra: tokens that the source adds to each request. tokens, ms: of the step without it.
    source_ms: what it costs for that many requests together. Empty where it only slows down.
    """
    order = sorted(
        (index for index, may in enumerate(eligible) if may), key=lambda i: (-extra[i], i)
    )
    best, best_rate, extra_tokens = 0, tokens / ms, 0.0
    for count, index in enumerate(order, start=1):
        extra_tokens += extra[index]
        rate = (tokens + extra_tokens) / (ms + source_ms(count))
        if rate > best_rate:
            best_rate, best = rate, count
    return order[:best]
