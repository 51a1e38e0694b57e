"""What followed the newest tokens wherever they stood before, counted.

For the last token, the last two and the last three there is a list each of what came next, and
how often: a *weight* that halves every 3,000 tokens, because a long text drifts. Mixed, they come
near the target's own distribution where a text goes on in its own words without repeating
itself; and with a distribution and the noise that will decide the sample
(``draft/gumbel_noise.py``) the likeliest draft is ``argmax q / E``.

A verify pass tells more than which token was drawn: what the target found likeliest, and how
likely, also at the drafts that it did not accept, whose contexts often come a little later
(``draft/top_tokens.py``; Luo et al., "Turning Trash into Treasure", 2024, keep such candidates by
the last token). Where this top-k is known, each of its tokens is counted by its probability
instead of the drawn one by 1.

Lists lie in a *pool* and move to a larger place when they are full, so a context that was seen
once takes little room. A list holds the weightiest followers, the newest of equals first;
where it may not grow, a new follower takes the place of the last or wears it down.

At most ``MOST_CONTEXTS`` are kept: when there are as many, the lighter half of them is dropped,
which are those that were seen long ago, or only as unlikely.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_tokenswift.common.arrays import Floats, Ints, Longs, Weights
from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.common.hashing import hashed
from vllm_tokenswift.draft.top_tokens import TOP_K, TopKRows, VerifyTopK

# Tokens of the longest context.
ORDERS = 3
# Followers that a list has room for: at first, and at most.
_FEWEST, _MOST = 2, 16
MOST_FOLLOWERS = ORDERS * _MOST
# Numbers of the pool that the lists of a context may take for one token: all its sizes.
_MOST_ADDED = 4 * _MOST
# Contexts of a text that are kept.
MOST_CONTEXTS = 1 << 15
# Tokens after which a weight is half of what it was.
_HALF_LIFE = 3000.0
# A context of weight N with d followers that were drawn, each seen for the first time (no more than
# a list holds), has a share of N / (N + 1 + 4 d) in the mixture; the shorter ones share the rest
# (Witten and Bell, 1991). A verify top-k is no sample of the text, and leaves d as it was.
_UNSEEN = 4.0
_UNKNOWN = 1.0

# Columns of the table: where the list lies in the pool, how many followers it has room for, how
# many it holds, how many were new to it when they were drawn, and when its weights were last
# brought up to date.
_PLACE, _ROOM, _LISTED, _DISTINCT, _WHEN = 0, 1, 2, 3, 4
_COLUMNS = 5
# What is counted: rows of the table and numbers of the pool in use, tokens.
_ROWS, _POOL, _LENGTH = 0, 1, 2

ContextArrays = tuple[Longs, Ints, Weights, Ints, Ints]
"""A :class:`Contexts` on its way into compiled code."""


class Contexts(NamedTuple):
    """The arrays of a :class:`ContextTable`.

    Attributes:
        keys: int64 ``[.]``, a hash table of contexts.
        table: int32 ``[., 5]``, see above.
        pool: float32 ``[.]``, tokens (below 2 ** 24) and weights in turns.
        counts: int32 ``[3]``, see above.
        recent: int32 ``[ORDERS]``, the newest tokens, the newest first, -1 where there is none.
    """

    keys: Longs
    table: Ints
    pool: Weights
    counts: Ints
    recent: Ints


@inner
def _faded(now: int, when: int) -> float:
    """What is left of a weight."""
    return 2.0 ** ((when - now) / _HALF_LIFE)


@inner
def _longer(key: int, token: int) -> int:
    """The key of a context that one more token stands before; 0 is the empty one's."""
    return hashed(key, token) | 1


@inner
def _row(keys: Longs, key: int) -> int:
    """The row of a context, or the free one where it belongs."""
    mask = len(keys) - 1
    row = (key >> 1) & mask
    while keys[row] != 0 and keys[row] != key:
        row = (row + 1) & mask
    return row


@inner
def _move_up(pool: Weights, at: int, first: int, token: int, weight: float) -> None:
    """Puts a follower at a free place of a list, or before those that weigh no more."""
    while at > first and pool[at - 1] <= weight:
        pool[at], pool[at + 1] = pool[at - 2], pool[at - 1]
        at -= 2
    pool[at], pool[at + 1] = token, weight


@inner
def _fade(table: Ints, pool: Weights, now: int, row: int) -> None:
    """Brings the weights of a list up to date."""
    if table[row, _WHEN] == now:
        return
    faded = _faded(now, table[row, _WHEN])
    table[row, _WHEN] = now
    first = table[row, _PLACE]
    for at in range(first, first + 2 * table[row, _LISTED], 2):
        pool[at + 1] *= faded


@inner
def _add_follower(
    table: Ints, pool: Weights, counts: Ints, row: int, token: int, weight: float
) -> bool:
    """A context is followed by a token so often more; returns whether that is new to the list."""
    place, room, listed = table[row, _PLACE], table[row, _ROOM], table[row, _LISTED]
    for at in range(place, place + 2 * listed, 2):
        if pool[at] == token:
            _move_up(pool, at, place, token, pool[at + 1] + weight)
            return False
    if listed == room and room < _MOST:
        moved = counts[_POOL]
        for index in range(2 * room):
            pool[moved + index] = pool[place + index]
        place = table[row, _PLACE] = moved
        room = table[row, _ROOM] = 2 * room
        counts[_POOL] += 2 * room
    last = place + 2 * (room - 1)
    if listed < room:
        table[row, _LISTED] += 1
        _move_up(pool, place + 2 * listed, place, token, weight)
    elif pool[last + 1] <= weight:
        _move_up(pool, last, place, token, weight)
    else:
        pool[last + 1] -= weight
    return True


@inner
def _has_room(keys: Longs, pool: Weights, counts: Ints) -> bool:
    """For what one more token adds."""
    rows_fit = 2 * (counts[_ROWS] + ORDERS) <= len(keys)
    return rows_fit and counts[_POOL] + ORDERS * _MOST_ADDED <= len(pool)


@inner
def _list_of(keys: Longs, table: Ints, pool: Weights, counts: Ints, key: int, number: int) -> int:
    """The row of a context, its list's weights brought up to date; a new one has room for the
    ``number`` of followers that are to be added."""
    row = _row(keys, key)
    if keys[row] == 0:
        room = _FEWEST
        while room < number:
            room *= 2
        keys[row] = key
        table[row, _PLACE], table[row, _ROOM] = counts[_POOL], room
        table[row, _LISTED] = table[row, _DISTINCT] = 0
        table[row, _WHEN] = counts[_LENGTH]
        counts[_ROWS] += 1
        counts[_POOL] += 2 * room
    _fade(table, pool, counts[_LENGTH], row)
    return row


@inner
def _make_newest(recent: Ints, counts: Ints, token: int) -> None:
    for order in range(ORDERS - 1, 0, -1):
        recent[order] = recent[order - 1]
    recent[0] = token
    counts[_LENGTH] += 1


@entry
def _count_tokens(arrays: ContextArrays, tokens: Ints) -> int:
    """Counts tokens as long as there is room for what they add; returns how many."""
    keys, table, pool, counts, recent = arrays
    for index in range(len(tokens)):
        if not _has_room(keys, pool, counts):
            return index
        key = 0
        for order in range(ORDERS):
            if recent[order] < 0:
                break
            key = _longer(key, recent[order])
            row = _list_of(keys, table, pool, counts, key, 1)
            table[row, _DISTINCT] += _add_follower(table, pool, counts, row, tokens[index], 1.0)
        _make_newest(recent, counts, tokens[index])
    return len(tokens)


@entry
def _count_top_k(
    arrays: ContextArrays,
    tree: tuple[Ints, Ints],
    top_k: TopKRows,
    probabilities: Weights,
    first: int,
) -> int:
    """Counts the top-k of a tree's nodes, from ``first`` on as long as there is room for them;
    returns the number of the next.

    tree: tokens and parents of the one that stood behind the newest tokens. probabilities: the
    same memory as ``top_k``.
    """
    keys, table, pool, counts, recent = arrays
    drafts, parents = tree
    for node in range(first, len(top_k)):
        if not _has_room(keys, pool, counts):
            return node
        if top_k[node, 0] < 0:
            continue
        number = 0
        while number < TOP_K and top_k[node, number] >= 0:
            number += 1
        key, above, of_text = 0, node, 0
        for _ in range(ORDERS):
            if above > 0:
                token, above = drafts[above - 1], parents[above - 1]
            else:
                token, of_text = recent[of_text], of_text + 1
            if token < 0:
                break
            key = _longer(key, token)
            row = _list_of(keys, table, pool, counts, key, number)
            for place in range(number):
                probability = probabilities[node, TOP_K + place]
                _add_follower(table, pool, counts, row, top_k[node, place], probability)
    return len(top_k)


@entry
def _skip_tokens(arrays: ContextArrays, tokens: Ints) -> None:
    """Tokens become the newest, and are not counted."""
    _, _, _, counts, recent = arrays
    for token in tokens:
        _make_newest(recent, counts, token)


@inner
def _enter(keys: Longs, table: Ints, row: int, other_keys: Longs, other: Ints) -> int:
    """Enters a context into another table; returns its row there."""
    place = _row(other_keys, keys[row])
    other_keys[place] = keys[row]
    for column in range(_COLUMNS):
        other[place, column] = table[row, column]
    return place


@entry
def _enter_rows(keys: Longs, table: Ints, larger_keys: Longs, larger: Ints) -> None:
    """Enters all contexts into a larger, empty table."""
    for row in range(len(keys)):
        if keys[row] != 0:
            _enter(keys, table, row, larger_keys, larger)


@inner
def _total(table: Ints, pool: Weights, row: int) -> float:
    """The weights of a context's followers together, as they were last brought up to date."""
    first, total = table[row, _PLACE], 0.0
    for at in range(first, first + 2 * table[row, _LISTED], 2):
        total += pool[at + 1]
    return total


@entry
def _weigh_contexts(arrays: ContextArrays, weights: Floats) -> None:
    """Writes what each context weighs now, float64 ``[rows in use]``, in the table's order."""
    keys, table, pool, counts, _ = arrays
    number = 0
    for row in range(len(keys)):
        if keys[row] != 0:
            faded = _faded(counts[_LENGTH], table[row, _WHEN])
            weights[number] = _total(table, pool, row) * faded
            number += 1


@entry
def _enter_weightier(
    arrays: ContextArrays, weights: Floats, limit: float, kept_arrays: ContextArrays
) -> None:
    """Enters the contexts that weigh more than ``limit`` into an empty table and pool.

    weights: see :func:`_weigh_contexts`. kept_arrays: with the same counts.
    """
    contexts, kept = Contexts(*arrays), Contexts(*kept_arrays)
    counts = kept.counts
    number = counts[_ROWS] = counts[_POOL] = 0
    for row in range(len(contexts.keys)):
        if contexts.keys[row] == 0:
            continue
        number += 1
        if weights[number - 1] <= limit:
            continue
        place = _enter(contexts.keys, contexts.table, row, kept.keys, kept.table)
        kept.table[place, _PLACE] = counts[_POOL]
        for index in range(2 * contexts.table[row, _LISTED]):
            kept.pool[counts[_POOL] + index] = contexts.pool[contexts.table[row, _PLACE] + index]
        counts[_POOL] += 2 * contexts.table[row, _ROOM]
        counts[_ROWS] += 1


@inner
def mix_followers(contexts: Contexts, newest: Ints, found: Ints, shares: Floats) -> int:
    """What followed some tokens, by its share in the mixture; returns how many tokens did.

    Args:
        contexts: what was counted.
        newest: int32 ``[ORDERS]``, the tokens, the newest first, -1 where there is none.
        found: int32 ``[MOST_FOLLOWERS]``, where the followers are written.
        shares: float64 ``[MOST_FOLLOWERS]``, where their shares are written, which add up to
            less than 1.
    """
    keys, table, pool, counts = contexts.keys, contexts.table, contexts.pool, contexts.counts
    number = key = 0
    for order in range(ORDERS):
        if newest[order] < 0:
            break
        key = _longer(key, newest[order])
        row = _row(keys, key)
        if keys[row] == 0:
            break
        first, listed = table[row, _PLACE], table[row, _LISTED]
        total = _total(table, pool, row)
        weight = total * _faded(counts[_LENGTH], table[row, _WHEN])
        share = weight / (weight + _UNKNOWN + _UNSEEN * min(table[row, _DISTINCT], _MOST))
        for index in range(number):
            shares[index] *= 1.0 - share
        for at in range(first, first + 2 * listed, 2):
            index = 0
            while index < number and found[index] != pool[at]:
                index += 1
            if index == number:
                found[index], shares[index] = int(pool[at]), 0.0
                number += 1
            shares[index] += share * pool[at + 1] / total
    return number


class ContextTable:
    """The followers of one growing text's contexts.

    Attributes:
        arrays: the fields of :class:`Contexts`.
    """

    def __init__(self) -> None:
        self._keys = np.zeros(128, np.int64)
        self._table = np.zeros((128, _COLUMNS), np.int32)
        self._pool = np.zeros(1024, np.float32)
        self._counts = np.zeros(3, np.int32)
        self._recent = np.full(ORDERS, -1, np.int32)
        self._set_arrays()

    def _set_arrays(self) -> None:
        self.arrays: ContextArrays = (
            self._keys,
            self._table,
            self._pool,
            self._counts,
            self._recent,
        )

    def append_tokens(self, tokens: Ints) -> None:
        """Takes in committed tokens of which nothing more is known.

        Args:
            tokens: int32 ``[.]``.
        """
        num_done = 0
        while True:
            num_done += _count_tokens(self.arrays, tokens[num_done:])
            if num_done == len(tokens):
                return
            self._grow()

    def append_verified(self, tokens: Ints, verified: VerifyTopK) -> None:
        """Takes in tokens that a verify pass emitted, and counts what it found likeliest.

        Args:
            tokens: int32 ``[.]``, emitted.
            verified: the top-k of the pass.
        """
        tree, top_k = (verified.tree.tokens, verified.tree.parents), verified.top_k
        node = 0
        while True:
            node = _count_top_k(self.arrays, tree, top_k, top_k.view(np.float32), node)
            if node == len(top_k):
                break
            self._grow()
        _skip_tokens(self.arrays, tokens)

    def _grow(self) -> None:
        """Doubles what is full, or nearly, or drops contexts where there are enough."""
        num_rows, in_pool, _ = self._counts.tolist()
        if num_rows + ORDERS > MOST_CONTEXTS:
            self.drop_lighter()
            return
        if 2 * (num_rows + ORDERS) > len(self._keys):
            keys = np.zeros(2 * len(self._keys), np.int64)
            table = np.zeros((len(keys), _COLUMNS), np.int32)
            _enter_rows(self._keys, self._table, keys, table)
            self._keys, self._table = keys, table
        if in_pool + ORDERS * _MOST_ADDED > len(self._pool):
            self._pool = np.concatenate((self._pool, np.zeros_like(self._pool)))
        self._set_arrays()

    def drop_lighter(self) -> None:
        """Drops the contexts that weigh no more than the middle one of them."""
        weights = np.empty(self._counts[_ROWS])
        _weigh_contexts(self.arrays, weights)
        median = float(np.partition(weights, len(weights) // 2)[len(weights) // 2])
        keys, table, pool = map(np.zeros_like, (self._keys, self._table, self._pool))
        kept: ContextArrays = (keys, table, pool, self._counts, self._recent)
        _enter_weightier(self.arrays, weights, median, kept)
        self._keys, self._table, self._pool = keys, table, pool
        self._set_arrays()
