"""Token reutilization: the most frequent n-grams of the sequence so far (paper, section 3.3).

The paper keeps pairs (n-gram, frequency) and retrieves the ``k`` most frequent that
begin with ``argmax p_0``. Here the ranking per first token is kept as the text grows:
an n-gram's rank changes only when it is seen again, and then only upwards, so one
insertion into a list of at most ``k`` keeps the top-k exact and a look-up is a walk along it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_tokenswift.common.arrays import Ints
from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.common.hashing import hashed

# Columns of the n-grams behind their n tokens: how often seen, and the next in rank of those
# with the same first token (an n-gram's number is its row + 1; 0: none).
COUNT, NEXT = -2, -1
# Columns of the first tokens, a hash table: the token + 1 (0: free), the n-gram that ranks
# first, and how often the token began an n-gram.
_TOKEN, _HEAD, _TOTAL = 0, 1, 2
# What is counted.
_NGRAMS, _FIRSTS, _WINDOW = 0, 1, 2

NgramArrays = tuple[Ints, Ints, Ints, Ints, Ints, int]
"""A :class:`Ngrams` on its way into compiled code."""


class Ngrams(NamedTuple):
    """The arrays of a :class:`NgramTable`.

    Attributes:
        slots: int32 ``[.]``, the numbers of the n-grams, a hash table.
        ngrams: int32 ``[., n + 2]``, see above.
        firsts: int32 ``[., 3]``, see above.
        window: int32 ``[n]``, the newest tokens.
        counts: int32 ``[3]``, see above.
        k: n-grams that are ranked of each first token, 0 where the table is off.
    """

    slots: Ints
    ngrams: Ints
    firsts: Ints
    window: Ints
    counts: Ints
    k: int


@inner
def _slot(slots: Ints, ngrams: Ints, tokens: Ints) -> int:
    """Where the number of an n-gram stands, or belongs."""
    n = ngrams.shape[1] + COUNT
    place = 0
    for index in range(n):
        place = hashed(place, tokens[index])
    mask = len(slots) - 1
    place &= mask
    while slots[place] != 0:
        row = slots[place] - 1
        index = 0
        while index < n and ngrams[row, index] == tokens[index]:
            index += 1
        if index == n:
            break
        place = (place + 1) & mask
    return place


@inner
def _first_row(firsts: Ints, token: int) -> int:
    """The row of a first token, or the free one where it belongs."""
    mask = len(firsts) - 1
    row = hashed(token, 0) & mask
    while firsts[row, _TOKEN] != 0 and firsts[row, _TOKEN] != token + 1:
        row = (row + 1) & mask
    return row


@inner
def _rank(ngrams: Ints, first: Ints, number: int, k: int) -> None:
    """Moves an n-gram that was just seen to its place: by count, of equals the newest first."""
    count = ngrams[number - 1, COUNT]
    before = previous = ranked = 0
    is_placed = False
    current = first[_HEAD]
    while current != 0 and current != number:
        if not is_placed and ngrams[current - 1, COUNT] <= count:
            before, is_placed = previous, True
        previous, current = current, ngrams[current - 1, NEXT]
        ranked += 1
    if current == number:
        if not is_placed:
            return
        ngrams[previous - 1, NEXT] = ngrams[number - 1, NEXT]
    elif not is_placed:
        if ranked == k:
            return
        before = previous
    if before == 0:
        ngrams[number - 1, NEXT] = first[_HEAD]
        first[_HEAD] = number
    else:
        ngrams[number - 1, NEXT] = ngrams[before - 1, NEXT]
        ngrams[before - 1, NEXT] = number
    if current != number and ranked == k:
        # The last one falls out of the ranking; its count is kept.
        current = first[_HEAD]
        while ngrams[current - 1, NEXT] != previous:
            current = ngrams[current - 1, NEXT]
        ngrams[current - 1, NEXT] = 0


@inner
def count_ngrams(table: Ngrams, tokens: Ints) -> int:
    """Appends tokens as long as there is room for what they add; returns how many."""
    slots, ngrams, firsts, window = table.slots, table.ngrams, table.firsts, table.window
    counts, n = table.counts, len(table.window)
    for index in range(len(tokens)):
        if (
            counts[_NGRAMS] + 1 > len(ngrams)
            or 2 * (counts[_NGRAMS] + 1) > len(slots)
            or 2 * (counts[_FIRSTS] + 1) > len(firsts)
        ):
            return index
        if counts[_WINDOW] == n:
            for place in range(n - 1):
                window[place] = window[place + 1]
        else:
            counts[_WINDOW] += 1
        window[counts[_WINDOW] - 1] = tokens[index]
        if counts[_WINDOW] < n:
            continue
        slot = _slot(slots, ngrams, window)
        if slots[slot] == 0:
            counts[_NGRAMS] += 1
            slots[slot] = counts[_NGRAMS]
            for place in range(n):
                ngrams[slots[slot] - 1, place] = window[place]
            ngrams[slots[slot] - 1, COUNT] = 0
            ngrams[slots[slot] - 1, NEXT] = 0
        ngrams[slots[slot] - 1, COUNT] += 1
        first = firsts[_first_row(firsts, window[0])]
        if first[_TOKEN] == 0:
            counts[_FIRSTS] += 1
            first[_TOKEN] = window[0] + 1
        first[_TOTAL] += 1
        _rank(ngrams, first, slots[slot], table.k)
    return len(tokens)


@entry
def _append_tokens(
    slots: Ints, ngrams: Ints, firsts: Ints, window: Ints, counts: Ints, k: int, tokens: Ints
) -> int:
    return count_ngrams(Ngrams(slots, ngrams, firsts, window, counts, k), tokens)


@entry
def _enter_ngrams(ngrams: Ints, number: int, larger: Ints) -> None:
    """Enters the first ``number`` n-grams into a larger, empty table of slots."""
    for row in range(number):
        larger[_slot(larger, ngrams, ngrams[row])] = row + 1


@entry
def _enter_firsts(firsts: Ints, larger: Ints) -> None:
    """Enters all first tokens into a larger, empty table."""
    for row in range(len(firsts)):
        if firsts[row, _TOKEN] != 0:
            place = _first_row(larger, firsts[row, _TOKEN] - 1)
            for column in range(firsts.shape[1]):
                larger[place, column] = firsts[row, column]


@entry
def ranked_rows(ngrams: Ints, firsts: Ints, k: int, token: int) -> Ints:
    """Rows of the most frequent n-grams that begin with a token, int32 ``[at most k]``."""
    rows = np.empty(k, np.int32)
    number = firsts[_first_row(firsts, token), _HEAD]
    num_found = 0
    while number != 0:
        rows[num_found] = number - 1
        num_found += 1
        number = ngrams[number - 1, NEXT]
    return rows[:num_found]


@inner
def times_first(firsts: Ints, token: int) -> int:
    """How often a token began an n-gram, those included that are not ranked."""
    return int(firsts[_first_row(firsts, token), _TOTAL])


class NgramTable:
    """Counts every n-gram of one sequence; ranks the top ``k`` of each first token.

    Counts are exact and nothing is forgotten, the newest tokens included. Memory is
    ``n`` + 2 numbers and two slots per *distinct* n-gram (at most one per token of text), and
    two rows per first token: what is capped is the ranking, and what falls out of it still
    counts and comes back when seen often enough. Appending costs O(k) a token and a look-up
    O(k), whatever the length of the text.

    Args:
        n: tokens in an n-gram, the first included (at least 2).
        k: how many a look-up returns at most (0 switches the table off).

    Attributes:
        arrays: the fields of :class:`Ngrams`.

    Raises:
        ValueError: where ``n`` or ``k`` is too small.
    """

    def __init__(self, n: int = 4, k: int = 20) -> None:
        if n < 2:
            raise ValueError(f"n must be at least 2 (a first token and one to propose), got {n}")
        if k < 0:
            raise ValueError(f"k must be 0 (off) or more, got {k}")
        self.n = n
        self.k = k
        self._slots = np.zeros(128, np.int32)
        self._ngrams = np.empty((64, n + 2), np.int32)
        self._firsts = np.zeros((128, 3), np.int32)
        self._window = np.zeros(n, np.int32)
        self._counts = np.zeros(3, np.int32)
        self._set_arrays()

    def _set_arrays(self) -> None:
        self.arrays: NgramArrays = (
            self._slots,
            self._ngrams,
            self._firsts,
            self._window,
            self._counts,
            self.k,
        )

    def append_tokens(self, tokens: Ints) -> None:
        """Takes in committed tokens.

        Args:
            tokens: int32 ``[.]``.
        """
        if self.k == 0:
            return
        num_done = 0
        while True:
            num_done += _append_tokens(*self.arrays, tokens[num_done:])
            if num_done == len(tokens):
                return
            self._grow()

    def _grow(self) -> None:
        """Doubles what is full."""
        num_ngrams, num_firsts, _ = self._counts.tolist()
        if num_ngrams + 1 > len(self._ngrams):
            self._ngrams = np.concatenate((self._ngrams, np.empty_like(self._ngrams)))
        if 2 * (num_ngrams + 1) > len(self._slots):
            self._slots = np.zeros(2 * len(self._slots), np.int32)
            _enter_ngrams(self._ngrams, num_ngrams, self._slots)
        if 2 * (num_firsts + 1) > len(self._firsts):
            larger = np.zeros((2 * len(self._firsts), 3), np.int32)
            _enter_firsts(self._firsts, larger)
            self._firsts = larger
        self._set_arrays()

    def lookup(self, first_token: int) -> list[tuple[tuple[int, ...], int]]:
        """The at most ``k`` most frequent n-grams that begin with a token.

        Args:
            first_token: of the n-grams.

        Returns:
            (The tokens after the first, how often seen), most frequent first, of equally
            frequent ones the most recently seen first.
        """
        rows = self._ngrams[ranked_rows(self._ngrams, self._firsts, self.k, first_token)]
        return [(tuple(row[1:COUNT]), row[COUNT]) for row in rows.tolist()]
