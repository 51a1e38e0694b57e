"""Texts that engines are asked to write, and the same as they came, with their times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WINDOWED_PENALTY = "vllm_tokenswift.sampling.processors:WindowedPenalty"
# The paper's recipe, with the penalty that the embedded model bears.
PENALISED = {
    "temperature": 1.0,
    "min_p": 0.1,
    "extra_args": {"penalty_theta": 1.1, "penalty_window": 1024},
}


@dataclass(frozen=True)
class TextRequest:
    """One text to write.

    Attributes:
        name: for the progress bar.
        prompt: a user's message.
        sampling: keyword arguments of vLLM's ``SamplingParams``.
    """

    name: str
    prompt: str
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """Texts to write at the same time (vLLM batches what is there at every step).

    Attributes:
        name: for the progress bar.
        texts: the batch.
    """

    name: str
    texts: list[TextRequest]


@dataclass
class Written:
    """A text as it came.

    Attributes:
        name: the request's.
        tokens: of the output.
        counts: tokens that were there, whenever some came.
        seconds: since the request was given, when ``counts[i]`` tokens were there.
        stats: what TokenSwift's counters grew by, empty on other engines.
        logprobs: by position, token -> log probability, where the request asked for them.
        text: the tokens, decoded.
    """

    name: str
    tokens: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    text: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Of the decoding: the first token, which is the prompt's pass, is not counted."""
        return (self.counts[-1] - self.counts[0]) / (self.seconds[-1] - self.seconds[0])


@dataclass
class WrittenBatch:
    """A batch as it came.

    Attributes:
        name: the batch's.
        texts: as they came; ``seconds`` of each since the batch was given.
        stats: of the whole batch, see :class:`Written`; those of its texts are empty.
    """

    name: str
    texts: list[Written]
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Of the decoding: from when every text had its first token until all had their last."""
        begin = max(text.seconds[0] for text in self.texts)
        end = max(text.seconds[-1] for text in self.texts)
        before = sum(
            max(n for n, at in zip(text.counts, text.seconds, strict=True) if at <= begin)
            for text in self.texts
        )
        return (sum(len(text.tokens) for text in self.texts) - before) / (end - begin)
