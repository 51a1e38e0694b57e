"""A mean that forgets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunningMean:
    """Of the newest numbers, about ``memory`` of them.

    Attributes:
        memory: how many of the newest numbers count.
        mean: the mean so far; at first what it starts from, which fades.
        weight: how many numbers the mean stands for.
    """

    memory: float
    mean: float = 0.0
    weight: float = 0.0

    def observe(self, number: float) -> None:
        """Takes one more number in."""
        self.weight = min(self.weight + 1.0, self.memory)
        self.mean += (number - self.mean) / self.weight
