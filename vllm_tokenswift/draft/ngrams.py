"""Token reutilization: the most frequent n-grams of the sequence so far (paper, section 3.3).

The paper keeps pairs (n-gram, frequency) and retrieves the ``k`` most frequent that
begin with ``argmax p_0``. Here the ranking per first token is kept as the text grows:
an n-gram's rank changes only when it is seen again, and then only upwards, so one
insertion into a list of at most ``k`` keeps the top-k exact and a look-up is a copy.
"""

from __future__ import annotations

from collections.abc import Iterable

_TOKEN_BITS = 24


# (the tokens after the first, n - 1 of them; how often the n-gram was seen). A plain tuple:
# there are many, and the garbage collector leaves plain tuples of numbers alone.
Ngram = tuple[tuple[int, ...], int]


class NgramTable:
    """Counts every n-gram of one sequence; ranks the top ``k`` of each first token.

    n: tokens in an n-gram, the first included (at least 2).
    k: how many a look-up returns at most (0 switches the table off).

    Counts are exact and nothing is forgotten, the newest tokens included. Memory is
    one packed integer and one count per *distinct* n-gram (about 100 bytes; at most one
    per token of text), and ``k`` ranked entries per first token: what is capped is the
    ranking, and what falls out of it still counts and comes back when seen often enough.
    Extending costs O(k) a token and a look-up O(k), whatever the length of the text.
    """

    def __init__(self, n: int = 4, k: int = 20) -> None:
        if n < 2:
            raise ValueError(f"n must be at least 2 (a first token and one to propose), got {n}")
        if k < 0:
            raise ValueError(f"k must be 0 (off) or more, got {k}")
        self.n = n
        self.k = k
        self._counts: dict[int, int] = {}
        self._ranked: dict[int, list[Ngram]] = {}
        self._totals: dict[int, int] = {}
        self._recent: tuple[int, ...] = ()
        self._key = 0
        self._mask = (1 << (_TOKEN_BITS * n)) - 1

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens. Token ids must lie below 2**24."""
        k, n, mask = self.k, self.n, self._mask
        if k == 0:
            return
        counts, ranked, totals = self._counts, self._ranked, self._totals
        key, recent = self._key, self._recent
        for token in tokens:
            key = ((key << _TOKEN_BITS) | token) & mask
            if len(recent) < n - 1:
                recent = (*recent, token)
                continue
            first = recent[0]
            recent = (*recent[1:], token)
            count = counts.get(key, 0) + 1
            counts[key] = count
            top = ranked.get(first)
            if top is None:
                ranked[first] = [(recent, count)]
                totals[first] = 1
                continue
            totals[first] += 1
            if top[0][0] == recent:
                top[0] = (recent, count)
            elif len(top) < k or top[-1][1] <= count:
                self._rank(top, recent, count)
        self._key, self._recent = key, recent

    def _rank(self, top: list[Ngram], tokens: tuple[int, ...], frequency: int) -> None:
        """Move an n-gram that was just seen to its place: by count, of equals the newest first."""
        place = -1
        for rank, (other_tokens, other_frequency) in enumerate(top):
            if place < 0 and other_frequency <= frequency:
                place = rank
            if other_tokens == tokens:
                del top[rank]
                break
        if place < 0:
            place = len(top)
        top.insert(place, (tokens, frequency))
        if len(top) > self.k:
            top.pop()

    def lookup(self, first_token: int) -> list[Ngram]:
        """The at most ``k`` most frequent n-grams beginning with ``first_token``.

        Most frequent first, of equally frequent ones the most recently seen first.
        """
        return list(self._ranked.get(first_token, ()))

    def total(self, first_token: int) -> int:
        """How many n-grams (ranked or not) began with ``first_token``."""
        return self._totals.get(first_token, 0)
