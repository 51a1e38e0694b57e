"""What followed the newest tokens wherever they stood before, counted.

For the last token, the last two and the last three there is a list each of what came next, and
how often: a *weight* that halves every 3,000 tokens, because a long text drifts. Mixed, they come
near the target's own distribution where a text goes on in its own words without repeating
itself; and with a distribution and the noise that will decide the sample
(``draft/gumbel_noise.py``) the likeliest draft is ``argmax q / E``. After 60,000 sampled tokens 31
nodes chosen so brought 4.8 tokens an iteration; without forgetting 4.1, and n-grams and longest
matches by themselves 3.2.

A token that was drawn says which one it was. The target said more when it was drawn: what it
found likeliest there, and how likely; and it said so at the drafts too that it did not accept,
whose contexts often come a little later (``draft/top_tokens.py``; Luo et al., "Turning Trash into
Treasure", 2024, keep such candidates by the last token). Where that was heard, each of those is
counted by its probability instead of the drawn one by 1. On a text's tokens 6,000 to 6,600 that
took 1.42 tokens an iteration to 1.50, and with the drafts not accepted to 1.62.

Lists lie in a *pool* and move to a larger place when they are full, so a context that was seen
once takes little room. A list holds the weightiest followers, the newest of equals first;
where it may not grow, a new follower takes the place of the last or wears it down.

At most ``MOST_CONTEXTS`` are kept: when there are as many, the lighter half of them is dropped,
which are those that were heard of long ago, or only as unlikely.
"""

from __future__ import annotations

from math import exp

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.common.hashing import hashed
from vllm_tokenswift.draft.exponential_noise import exponential
from vllm_tokenswift.draft.top_tokens import TOP_K, TopKRows, VerifyTopK

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Weights = npt.NDArray[np.float32]
ContextArrays = tuple[Longs, Ints, Weights, Ints, Ints]

# Tokens of the longest context. A fourth brought nothing more.
ORDERS = 3
# Followers that a list has room for: at first, and at most.
_FEWEST, _MOST = 2, 16
MOST_FOLLOWERS = ORDERS * _MOST
# SamplingNumbers of the pool that the lists of a context may take for one token: all its sizes.
_MOST_ADDED = 4 * _MOST
# Contexts of a text that are kept.
MOST_CONTEXTS = 1 << 15
# Tokens after which a weight is half of what it was. 1,000 to 20,000 were tried.
_HALF_LIFE = 3000.0
# A context of weight N with d followers that were drawn, each seen for the first time (no more than
# a list holds), has a share of N / (N + 1 + 4 d) in the mixture; the shorter ones share the rest
# (Witten and Bell, 1991). What the target said itself is no sample of it, and leaves d as it was.
# 1, 2 and 4 were tried, and 4 was best or as good; instead of 1, 0.25 to 2 made no difference.
_UNSEEN = 4.0
_UNSAID = 1.0
_LEAST_NOISE = 1e-9

# Columns of the table: where the list lies in the pool, how many followers it has room for, how
# many it holds, how many were new to it when they were drawn, and when its weights were last
# brought up to date.
_PLACE, _ROOM, _LISTED, _DISTINCT, _WHEN = 0, 1, 2, 3, 4
_COLUMNS = 5
# What is counted: rows of the table and numbers of the pool in use, tokens.
_ROWS, _POOL, _LENGTH = 0, 1, 2


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
def _add(table: Ints, pool: Weights, counts: Ints, row: int, token: int, weight: float) -> bool:
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
def _go_on(recent: Ints, counts: Ints, token: int) -> None:
    """A token becomes the newest."""
    for order in range(ORDERS - 1, 0, -1):
        recent[order] = recent[order - 1]
    recent[0] = token
    counts[_LENGTH] += 1


@entry
def _extend(
    keys: Longs, table: Ints, pool: Weights, counts: Ints, recent: Ints, tokens: Ints
) -> int:
    """Counts tokens as long as there is room for what they add; returns how many."""
    for index in range(len(tokens)):
        if not _has_room(keys, pool, counts):
            return index
        key = 0
        for order in range(ORDERS):
            if recent[order] < 0:
                break
            key = _longer(key, recent[order])
            row = _list_of(keys, table, pool, counts, key, 1)
            table[row, _DISTINCT] += _add(table, pool, counts, row, tokens[index], 1.0)
        _go_on(recent, counts, tokens[index])
    return len(tokens)


@entry
def _hear(
    keys: Longs,
    table: Ints,
    pool: Weights,
    counts: Ints,
    recent: Ints,
    drafts: Ints,
    parents: Ints,
    said: TopKRows,
    probabilities: Weights,
    first: int,
) -> int:
    """Counts what was said at a tree's nodes, from ``first`` on as long as there is room for it;
    returns the number of the next.

    drafts, parents: of the tree that stood behind the newest tokens. probabilities: the same
    memory as ``said``.
    """
    for node in range(first, len(said)):
        if not _has_room(keys, pool, counts):
            return node
        if said[node, 0] < 0:
            continue
        number = 0
        while number < TOP_K and said[node, number] >= 0:
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
                _add(table, pool, counts, row, said[node, place], probability)
    return len(said)


@entry
def _pass_on(recent: Ints, counts: Ints, tokens: Ints) -> None:
    """Tokens become the newest, and are not counted."""
    for token in tokens:
        _go_on(recent, counts, token)


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
def _weights(keys: Longs, table: Ints, pool: Weights, counts: Ints, weights: Floats) -> None:
    """Writes what each context weighs now, float64 ``[rows in use]``, in the table's order."""
    number = 0
    for row in range(len(keys)):
        if keys[row] != 0:
            faded = _faded(counts[_LENGTH], table[row, _WHEN])
            weights[number] = _total(table, pool, row) * faded
            number += 1


@entry
def _enter_weightier(
    keys: Longs,
    table: Ints,
    pool: Weights,
    weights: Floats,
    limit: float,
    kept_keys: Longs,
    kept: Ints,
    kept_pool: Weights,
    counts: Ints,
) -> None:
    """Enters the contexts that weigh more than ``limit`` into an empty table and pool.

    weights: see :func:`_weights`.
    """
    number = counts[_ROWS] = counts[_POOL] = 0
    for row in range(len(keys)):
        if keys[row] == 0:
            continue
        number += 1
        if weights[number - 1] <= limit:
            continue
        place = _enter(keys, table, row, kept_keys, kept)
        kept[place, _PLACE] = counts[_POOL]
        for index in range(2 * table[row, _LISTED]):
            kept_pool[counts[_POOL] + index] = pool[table[row, _PLACE] + index]
        counts[_POOL] += 2 * table[row, _ROOM]
        counts[_ROWS] += 1


@inner
def mix_followers(
    keys: Longs,
    table: Ints,
    pool: Weights,
    counts: Ints,
    recent: Ints,
    found: Ints,
    shares: Floats,
) -> int:
    """What followed these newest tokens, by its share in the mixture; returns how many tokens.

    keys, table, pool, counts: of a :class:`ContextTable`. recent: int32 ``[ORDERS]``, the newest
    first, -1 where there is none. Writes ``found``, int32 ``[MOST_FOLLOWERS]``, the tokens, and
    ``shares``, which add up to less than 1.
    """
    number = key = 0
    for order in range(ORDERS):
        if recent[order] < 0:
            break
        key = _longer(key, recent[order])
        row = _row(keys, key)
        if keys[row] == 0:
            break
        first, listed = table[row, _PLACE], table[row, _LISTED]
        total = _total(table, pool, row)
        weight = total * _faded(counts[_LENGTH], table[row, _WHEN])
        share = weight / (weight + _UNSAID + _UNSEEN * min(table[row, _DISTINCT], _MOST))
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


@inner
def likeliest_followers(
    found: Ints, shares: Floats, number: int, noise_kind: int, key: np.uint64, most: int
) -> int:
    """Turns shares into the chances that the noise leaves them, and moves the ``most`` likeliest
    to the front, likeliest first; returns how many these are.

    A token x would be drawn at the time ``E_x / q_x``, the earliest of all is. Of those found a
    token's chance is its share of ``q / E``. What was never seen here, of mass u together, comes
    before it unless its noise, which nobody looks at, is larger: ``exp(-u E_x / q_x)``.

    key: of the position's noise.
    """
    unseen, total = 1.0, 0.0
    for index in range(number):
        unseen -= shares[index]
        shares[index] /= max(exponential(noise_kind, key, found[index]), _LEAST_NOISE)
        total += shares[index]
    kept = min(number, most)
    for index in range(number):
        token, weight = found[index], shares[index]
        chance = weight / total * exp(-unseen / weight)
        if index >= kept and shares[kept - 1] >= chance:
            continue
        place = min(index, kept - 1)
        while place > 0 and shares[place - 1] < chance:
            found[place], shares[place] = found[place - 1], shares[place - 1]
            place -= 1
        found[place], shares[place] = token, chance
    return kept


class ContextTable:
    """The followers of one growing text's contexts.

    ``keys``: int64 ``[.]``, a hash table of contexts; ``table``: int32 ``[., 5]``, see above;
    ``pool``: float32 ``[.]``, tokens (below 2 ** 24) and weights in turns; ``counts``: int32
    ``[3]``, see above; ``recent``: int32 ``[ORDERS]``, the newest tokens, the newest first.
    """

    def __init__(self) -> None:
        self.keys = np.zeros(128, np.int64)
        self.table = np.zeros((128, _COLUMNS), np.int32)
        self.pool = np.zeros(1024, np.float32)
        self.counts = np.zeros(3, np.int32)
        self.recent = np.full(ORDERS, -1, np.int32)

    @property
    def arrays(self) -> ContextArrays:
        """``keys``, ``table``, ``pool``, ``counts`` and ``recent``."""
        return self.keys, self.table, self.pool, self.counts, self.recent

    def extend(self, tokens: Ints) -> None:
        """Append committed tokens, int32, of which nothing more is known."""
        done = 0
        while True:
            done += _extend(
                self.keys, self.table, self.pool, self.counts, self.recent, tokens[done:]
            )
            if done == len(tokens):
                return
            self._grow()

    def hear(self, tokens: Ints, heard: VerifyTopK) -> None:
        """Append the tokens, int32, that a verify pass emitted, and count what it said."""
        tree, said = heard.tree, heard.top_k
        node = 0
        while True:
            node = _hear(
                self.keys,
                self.table,
                self.pool,
                self.counts,
                self.recent,
                tree.tokens,
                tree.parents,
                said,
                said.view(np.float32),
                node,
            )
            if node == len(said):
                break
            self._grow()
        _pass_on(self.recent, self.counts, tokens)

    def _grow(self) -> None:
        """Doubles what is full, or nearly, or drops contexts where there are enough."""
        num_rows, in_pool, _ = self.counts.tolist()
        if num_rows + ORDERS > MOST_CONTEXTS:
            self.drop_lighter()
            return
        if 2 * (num_rows + ORDERS) > len(self.keys):
            keys = np.zeros(2 * len(self.keys), np.int64)
            table = np.zeros((len(keys), _COLUMNS), np.int32)
            _enter_rows(self.keys, self.table, keys, table)
            self.keys, self.table = keys, table
        if in_pool + ORDERS * _MOST_ADDED > len(self.pool):
            self.pool = np.concatenate((self.pool, np.zeros_like(self.pool)))

    def drop_lighter(self) -> None:
        """Drops the contexts that weigh no more than the middle one of them."""
        weights = np.empty(self.counts[_ROWS])
        _weights(self.keys, self.table, self.pool, self.counts, weights)
        median = float(np.partition(weights, len(weights) // 2)[len(weights) // 2])
        keys, table, pool = map(np.zeros_like, (self.keys, self.table, self.pool))
        _enter_weightier(
            self.keys, self.table, self.pool, weights, median, keys, table, pool, self.counts
        )
        self.keys, self.table, self.pool = keys, table, pool


NO_CONTEXTS: ContextArrays = (
    np.zeros(0, np.int64),
    np.zeros((0, _COLUMNS), np.int32),
    np.zeros(0, np.float32),
    np.zeros(3, np.int32),
    np.full(ORDERS, -1, np.int32),
)
"""The arrays of a table that nothing was counted in."""
