"""The loss curves as a PNG: one panel for each head, as in the paper's last figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def plot_losses(losses: Sequence[Sequence[float]], path: Path) -> None:
    """losses: for each step, the mean cross-entropy (nats) of each head."""
    num_heads = len(losses[0])
    figure = Figure(figsize=(4 * num_heads, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    steps = range(1, len(losses) + 1)
    for head in range(num_heads):
        axes = figure.add_subplot(1, num_heads, head + 1)
        axes.plot(steps, [loss[head] for loss in losses], linewidth=1)
        axes.set_title(f"head {head}: the token {head + 2} ahead")
        axes.set_xlabel("step")
        axes.set_ylabel("cross-entropy (nats)")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
