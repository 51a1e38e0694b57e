"""What the demo's table says about two texts: speed, acceptance, diversity, identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_tokenswift.demo.texts import Written
from vllm_tokenswift.metrics import Stats


def distinct(tokens: Sequence[int], n: int) -> float:
    """Distinct-n, the paper's measure of diversity.

    Args:
        tokens: of a text.
        n: length of the n-grams.

    Returns:
        Distinct n-grams over all n-grams; 0 for a text shorter than n.
    """
    ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Where two texts part.

    Args:
        left: tokens of one of them.
        right: tokens of the other.

    Returns:
        Index of the first token that differs, None where the texts are identical.
    """
    for index, (left_token, right_token) in enumerate(zip(left, right, strict=False)):
        if left_token != right_token:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


@dataclass(frozen=True)
class Comparison:
    """A plain text and TokenSwift's of the same request.

    Attributes:
        plain: written by plain vLLM.
        tokenswift: written with TokenSwift.
        gamma_plus_1: the paper's gamma + 1, the levels of the head tree. Suffix matches go
            deeper than that, so alpha and beta of a repetitive text can exceed 1.
    """

    plain: Written
    tokenswift: Written
    gamma_plus_1: int

    @property
    def stats(self) -> Stats:
        """TokenSwift's counters of the text."""
        counters = dict(self.tokenswift.stats)
        counters.pop("decisions", None)  # the planner's, beside the counters
        return Stats(**counters)

    @property
    def speed_up(self) -> float:
        """Tokens a second, over plain vLLM's."""
        return self.tokenswift.tokens_per_second / self.plain.tokens_per_second

    @property
    def tokens_per_iteration(self) -> float:
        """Tokens that a verify pass brought; plain decoding has 1."""
        return self.stats.num_emitted_tokens / max(1, self.stats.num_iterations)

    @property
    def alpha(self) -> float:
        """Acceptance rate (paper, equation for alpha)."""
        return self.stats.alpha(self.gamma_plus_1 - 1)

    @property
    def beta(self) -> float:
        """N-gram acceptance rate (paper, equation for beta)."""
        return self.stats.beta(self.gamma_plus_1 - 1)

    @property
    def identical(self) -> str:
        """In words: yes, or where the first difference is."""
        index = first_difference(self.plain.tokens, self.tokenswift.tokens)
        return "yes" if index is None else f"up to token {index}"

    def rows(self) -> list[tuple[str, str, str]]:
        """The table's rows, in its order: (what, plain, TokenSwift)."""
        plain, ours = self.plain, self.tokenswift
        rows = [
            ("tokens", f"{len(plain.tokens):,}", f"{len(ours.tokens):,}"),
            ("tokens/s", f"{plain.tokens_per_second:.1f}", f"{ours.tokens_per_second:.1f}"),
            ("speed-up", "1.00", f"{self.speed_up:.2f}"),
            ("tokens per iteration", "1.00", f"{self.tokens_per_iteration:.2f}"),
            ("acceptance rate alpha", "", f"{self.alpha:.3f}"),
            ("n-gram acceptance rate beta", "", f"{self.beta:.3f}"),
        ]
        rows += [
            (f"Distinct-{n}", f"{distinct(plain.tokens, n):.3f}", f"{distinct(ours.tokens, n):.3f}")
            for n in range(1, 5)
        ]
        return [*rows, ("tokens identical", "", self.identical)]


def table(comparison: Comparison) -> str:
    """A comparison as text, under its request's name.

    Args:
        comparison: of two texts.

    Returns:
        The table, several lines.
    """
    lines = [f"{comparison.plain.name}", f"  {'':30}{'plain vLLM':>14}{'TokenSwift':>18}"]
    lines += [f"  {what:30}{plain:>14}{ours:>18}" for what, plain, ours in comparison.rows()]
    return "\n".join(lines)
