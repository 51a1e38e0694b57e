"""A record as a picture: what was drafted, accepted and spent over the text's length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_tokenswift.explain.stretches import Stretch
from vllm_tokenswift.tree import Source


def draw(parts: Sequence[Stretch], title: str, path: Path) -> None:
    """Draws a record: nodes above, times below, over the length of the output.

    Args:
        parts: stretches of the output in order, at least one; each is a step along the x axis.
        title: above the picture.
        path: of the PNG that is written.

    Raises:
        OSError: where it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (drafts, times) = pyplot.subplots(2, 1, figsize=(10, 8), sharex=True)
    _nodes(drafts, parts)
    _times(times, parts)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _nodes(panel: Any, parts: Sequence[Stretch]) -> None:
    accepted_top = drafted_bottom = [0.0] * len(parts)
    drafted_by_any = False
    for source in Source:
        name, color = source.name.lower(), f"C{source.value}"
        if not any(part.drafted[name] for part in parts):
            continue
        drafted_by_any = True
        accepted = [part.accepted[name] / part.iterations for part in parts]
        drafted = [-part.drafted[name] / part.iterations for part in parts]
        accepted_top = _stack(panel, parts, accepted_top, accepted, color=color, label=name)
        drafted_bottom = _stack(panel, parts, drafted_bottom, drafted, color=color, alpha=0.4)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_ylabel("nodes an iteration: accepted above 0, drafted below")
    if drafted_by_any:
        panel.legend()


def _times(panel: Any, parts: Sequence[Stretch]) -> None:
    top = [0.0] * len(parts)
    for label, spent_ms in (
        ("verify", [part.times.verify_ms for part in parts]),
        ("draft passes", [part.times.passes_ms for part in parts]),
        ("heads", [part.times.heads_ms for part in parts]),
    ):
        if any(spent_ms):
            ms_a_token = [ms / part.tokens for ms, part in zip(spent_ms, parts, strict=True)]
            top = _stack(panel, parts, top, ms_a_token, alpha=0.6, label=label)
    edges = _edges(parts)
    plain = [part.plain_ms / part.tokens for part in parts]
    oracle = [(part.times.total_ms - part.regret.total_ms) / part.tokens for part in parts]
    panel.stairs(plain, edges, baseline=None, color="black", label="plain decoding")
    panel.stairs(oracle, edges, baseline=None, color="black", linestyle=":", label="oracle")
    panel.set_ylabel("estimated ms a token")
    panel.set_xlabel("output tokens")
    panel.set_ylim(bottom=0)
    panel.legend()


def _stack(
    panel: Any,
    parts: Sequence[Stretch],
    base: Sequence[float],
    heights: Sequence[float],
    **style: Any,
) -> list[float]:
    """Draws ``heights`` upon ``base`` (below it where negative); returns where they end."""
    ends = [b + height for b, height in zip(base, heights, strict=True)]
    panel.stairs(ends, _edges(parts), baseline=base, fill=True, **style)
    return ends


def _edges(parts: Sequence[Stretch]) -> list[int]:
    """Output tokens at the borders of the stretches."""
    return [parts[0].first, *(part.last for part in parts)]
