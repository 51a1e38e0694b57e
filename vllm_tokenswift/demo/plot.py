"""The demo's picture: when each token came, plain and with TokenSwift."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vllm_tokenswift.demo.measures import Comparison


def time_against_tokens(comparisons: Sequence[Comparison], title: str, path: Path) -> None:
    """Draws when each token came, a panel for each comparison.

    Args:
        comparisons: at least one.
        title: above the picture.
        path: of the PNG that is written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(comparisons), figsize=(6 * len(comparisons), 4.5), squeeze=False, sharey=True
    )
    for panel, comparison in zip(panels[0], comparisons, strict=True):
        for written, label in (
            (comparison.plain, "plain vLLM"),
            (comparison.tokenswift, "TokenSwift"),
        ):
            panel.plot(written.counts, written.seconds, label=label)
        panel.set_title(f"{comparison.plain.name}: {comparison.speed_up:.2f} times as fast")
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
        panel.legend()
    panels[0][0].set_ylabel("seconds")
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
