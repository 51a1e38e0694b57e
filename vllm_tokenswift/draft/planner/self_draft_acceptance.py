"""How often the token of a self-draft pass comes, by the age of the blocks it reads.

Of each pass one token is followed: the likeliest one. An iteration's passes make a *path*, each
token below the one before. They are compared with the tokens that came as far as these are known:
where all before a token came, it did or did not.

The *age* of a pass is the number of tokens written since its blocks were selected, 0 where it
reads the whole cache.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

from vllm_tokenswift.common.arrays import Floats
from vllm_tokenswift.common.running_mean import RunningMean
from vllm_tokenswift.draft.acceptance import head_rate
from vllm_tokenswift.draft.gumbel_noise import GumbelNoise
from vllm_tokenswift.tree import Source

# Ages at which a bucket begins: the whole cache; blocks as good as new; older and older.
_AGE_EDGES = (1, 33, 129, 513, 2049)
_YOUNG = 1
# Between the agreement of the full cache with a fresh selection and with an old one.
_PRIOR = 0.9
_PRIOR_WEIGHT = 4.0
_MEMORY = 256.0
# What is known of further passes is forgotten while there are none, so that they are tried again.
_KEPT_UNASKED = 1 - 1 / 128


@dataclass
class SelfDraftPath:
    """The tokens of an iteration's passes for one request, as far as they were followed.

    Attributes:
        tokens: of each pass the one followed.
        reach: the learned chance that the path comes as far as each.
        ages: of each pass, in tokens.
    """

    tokens: list[int] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)

    def follow(
        self,
        tokens: Sequence[int],
        probabilities: Sequence[float],
        age: int,
        cells: Floats,
        noise: GumbelNoise | None,
    ) -> int:
        """Goes on along the likeliest token that a pass proposes.

        Args:
            tokens: that it proposes.
            probabilities: of each.
            age: of the pass, in tokens.
            cells: the request's learned acceptance.
            noise: that will decide its samples.

        Returns:
            The token's place among them.
        """
        depth = len(self.tokens)
        if noise is not None:
            proposed = zip(tokens, probabilities, strict=True)
            probabilities = [noise.chance(p, depth, token) for token, p in proposed]
        place = max(range(len(tokens)), key=probabilities.__getitem__)
        rate = head_rate(cells, int(Source.SELF), probabilities[place], depth + 1)
        self.reach.append((self.reach[-1] if depth else 1.0) * rate)
        self.tokens.append(tokens[place])
        self.ages.append(age)
        return place


class SelfDraftAcceptance:
    """What was learned from one request's paths."""

    def __init__(self) -> None:
        self._first = [_Mean() for _ in range(len(_AGE_EDGES) + 1)]  # by age
        self._further = _Mean()
        self._after = _Mean()
        self._path: SelfDraftPath | None = None
        self._age = 0
        self._since_selection = [0] * len(self._first)  # tokens of passes, by age

    def note_path(self, path: SelfDraftPath) -> None:
        """This step's passes, one at least; :meth:`observe_tokens` tells what came."""
        self._path = path
        if path.ages[0] < self._age:
            self._since_selection = [0] * len(self._since_selection)
        self._age = path.ages[0]
        for age in path.ages:
            self._since_selection[_bucket(age)] += 1

    def observe_tokens(self, tokens: Sequence[int]) -> int:
        """Learns from what an iteration emitted.

        Args:
            tokens: emitted, one at least.

        Returns:
            How many of them are the further passes': those of the path, the first left out. The
            first pass would have brought the rest by itself.
        """
        if self._path is None:
            return 0
        path, self._path = self._path, None
        if len(path.tokens) == 1:
            self._further.weight *= _KEPT_UNASKED
        # What follows the tokens emitted is not known yet.
        for depth, (token, drafted) in enumerate(zip(tokens, path.tokens, strict=False)):
            rate = self._further if depth else self._first[_bucket(path.ages[0])]
            rate.observe(float(token == drafted))
            if token != drafted:
                return max(depth - 1, 0)
        if len(tokens) > len(path.tokens):
            self._after.observe(len(tokens) - len(path.tokens) - 1)
        return min(len(tokens), len(path.tokens)) - 1

    def first_rate(self, age: int) -> float:
        """Chance that the token of a step's first pass comes.

        Args:
            age: of the pass, in tokens.
        """
        rate = _PRIOR
        bucket = _bucket(age)
        for known in self._first[min(bucket, _YOUNG) : bucket + 1]:
            rate = known.value(rate)
        return rate

    def further_rate(self, age: int) -> float:
        """The same of a further pass, where all before it came; the first's until it is known.

        Args:
            age: of the pass, in tokens.
        """
        return self._further.value(self.first_rate(age))

    @property
    def after(self) -> float:
        """Tokens that other sources bring below a path that came, on average."""
        return self._after.value(0.0)

    @property
    def lost(self) -> float:
        """Tokens lost since the selection because it grew old, as far as that is certain.

        The sum over passes since then of ``max(0, h(1..32) - h(a) - s)``, where ``h(a)``
        is how often such tokens came at that age and ``s`` the standard error of the difference.
        """
        young, tokens = self._first[_YOUNG], 0.0
        for old, count in zip(
            self._first[_YOUNG + 1 :], self._since_selection[_YOUNG + 1 :], strict=True
        ):
            if count and old.weight and young.weight:
                error = sqrt(young.variance / young.weight + old.variance / old.weight)
                tokens += count * max(0.0, young.mean - old.mean - error)
        return tokens


@dataclass
class _Mean(RunningMean):
    """Of what was seen; no prior fades in it."""

    memory: float = _MEMORY

    def value(self, prior: float) -> float:
        """The mean, with the prior for what was not seen."""
        total = prior * _PRIOR_WEIGHT + self.mean * self.weight
        return total / (_PRIOR_WEIGHT + self.weight)

    @property
    def variance(self) -> float:
        """Of one observation that is 0 or 1, one of each kind taken as seen besides."""
        rate = (self.mean * self.weight + 1.0) / (self.weight + 2.0)
        return rate * (1.0 - rate)


def _bucket(age: int) -> int:
    return bisect_right(_AGE_EDGES, age)
