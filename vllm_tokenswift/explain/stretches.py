"""A record summed over stretches of the text's length, and as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_tokenswift.explain.record import Iteration, Record
from vllm_tokenswift.explain.regret import Regret, regrets
from vllm_tokenswift.explain.times import Times, times_of
from vllm_tokenswift.tree import Source


@dataclass
class Stretch:
    """Iterations that began between two positions of the output, summed.

    Attributes:
        first: output tokens before it.
        last: output tokens when it ends.
        tokens: emitted in it.
        iterations: in it.
        drafted: nodes by the source's name.
        accepted: nodes by the source's name.
        passes: self-draft passes.
        decisions: iterations by the planner's word.
        times: what it took, by part.
        plain_ms: what its tokens take when decoded plainly.
        regret: time lost, by cause.
    """

    first: int
    last: int = 0
    tokens: int = 0
    iterations: int = 0
    drafted: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    passes: int = 0
    decisions: Counter[str] = field(default_factory=Counter)
    times: Times = field(default_factory=Times)
    plain_ms: float = 0.0
    regret: Regret = field(default_factory=Regret)

    def add(self, iteration: Iteration, record: Record, regret: Regret) -> None:
        """Takes in one iteration.

        Args:
            iteration: of the record, the next in order.
            record: gives what things cost.
            regret: the time that the iteration lost.
        """
        self.last = iteration.position + iteration.emitted - record.prompt_len
        self.tokens += iteration.emitted
        self.decisions.update(iteration.decisions)
        self.iterations += 1
        for counter, nodes in (
            (self.drafted, iteration.drafted),
            (self.accepted, iteration.accepted),
        ):
            counter.update({s.name.lower(): nodes[s] for s in Source if nodes[s]})
        self.passes += iteration.passes
        self.times += times_of(iteration, record)
        self.plain_ms += iteration.emitted * record.cost.verify_ms(1, iteration.position)
        self.regret += regret


def stretches(record: Record, count: int) -> list[Stretch]:
    """A record cut into stretches of equal numbers of output tokens.

    The prompt's iteration, and the token that it brought, belong to none of them.

    Args:
        record: of a finished generation.
        count: stretches at most.

    Returns:
        The stretches in order; none is empty.
    """
    length = len(record.token_ids) - record.prompt_len
    found: dict[int, Stretch] = {}
    for iteration, regret in zip(record.iterations, regrets(record), strict=True):
        if not iteration.is_decode:
            continue
        first = iteration.position - record.prompt_len
        place = first * count // length
        if place not in found:
            found[place] = Stretch(first)
        found[place].add(iteration, record, regret)
    return list(found.values())


def total(parts: Sequence[Stretch]) -> Stretch:
    """All of a text's stretches as one.

    Args:
        parts: in order, at least one.

    Returns:
        Their sum, from the first's beginning to the last's end.
    """
    whole = Stretch(parts[0].first, parts[-1].last)
    for part in parts:
        whole.tokens += part.tokens
        whole.iterations += part.iterations
        whole.drafted += part.drafted
        whole.accepted += part.accepted
        whole.passes += part.passes
        whole.decisions += part.decisions
        whole.times += part.times
        whole.plain_ms += part.plain_ms
        whole.regret += part.regret
    return whole


def table(parts: Sequence[Stretch]) -> str:
    """One line for each stretch and one for all of them.

    Args:
        parts: in order, at least one.

    Returns:
        The table as text. Under a source stand accepted / drafted nodes; times are in ms.
    """
    whole = total(parts)
    sources = [s.name.lower() for s in Source if whole.drafted[s.name.lower()]]
    decisions = sorted(whole.decisions)
    header = ["output", "tokens", "iterations", "tok/iter", *sources, "passes", *decisions]
    header += ["verify ms", "pass ms", "heads ms", "lost ms"]
    lines = [header]
    for part in [*parts, whole]:
        times = part.times
        lines.append(
            [
                "all" if part is whole else f"{part.first}-{part.last}",
                str(part.tokens),
                str(part.iterations),
                f"{part.tokens / part.iterations:.2f}",
                *(f"{part.accepted[s]}/{part.drafted[s]}" for s in sources),
                str(part.passes),
                *(str(part.decisions[d]) for d in decisions),
                *(f"{ms:.0f}" for ms in (times.verify_ms, times.passes_ms, times.heads_ms)),
                f"{part.regret.total_ms:.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


_CAUSES = {
    "rejected": "rejected nodes verified beside accepted ones",
    "nothing_accepted": "drafting where nothing was accepted",
    "passes": "draft passes and heads that did not pay",
    "too_dear": "accepted drafts that cost more than they saved",
    "left_out": "proposals of the text left out that came",
}


def regret_report(whole: Stretch) -> str:
    """Time lost against the oracle, by cause.

    Args:
        whole: a text's stretches as one (:func:`total`).

    Returns:
        A line for each cause, in ms and as a share of the time spent.
    """
    spent_ms = whole.times.total_ms
    lost = whole.regret
    lines = [
        f"An oracle takes {spent_ms - lost.total_ms:.0f} ms of the {spent_ms:.0f}; "
        f"{_share(lost.total_ms, spent_ms)} were lost:"
    ]
    for cause, ms in lost.by_cause().items():
        lines.append(f"  {_CAUSES[cause]:48} {ms:9.0f} ms  {_share(ms, spent_ms)}")
    return "\n".join(lines)


def _share(ms: float, of_ms: float) -> str:
    return f"{ms / of_ms:6.1%}"
