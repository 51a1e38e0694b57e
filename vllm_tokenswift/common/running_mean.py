"""A mean that forgets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RunningMean:
    """Of the newest numbers, about ``memory`` of them.

    mean, weight: what it starts from, and for how many numbers that stands. It fades.
    """

    memory: float
    mean: float = 0.0
    weight: float = 0.0

    def observe(self, number: float) -> None:
        self.weight = min(self.weight + 1.0, self.memory)
        self.mean += (number - self.mean) / self.weight
