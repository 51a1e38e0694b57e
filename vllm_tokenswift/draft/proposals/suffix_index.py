"""Longest-suffix matching: where did the text last look as it does now, and what followed?

The index is a path-compressed trie of *reversed* contexts: the node reached by reading
the text backwards from its end stands for a suffix, and remembers where that suffix last
ended. A new token adds at most one leaf and one inner node, and walks at most
``max_match`` steps, so time per token is flat and memory linear in the text.

Index space: a *text position* counts tokens from 0; a match "ends at" the position of its
last token, and its continuation starts one later. A *place* in the array ``text`` is one
more: ``text[0]`` is a sentinel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_tokenswift.common.arrays import Ints
from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.common.hashing import hashed

MEASURED_BEYOND = 128
_TEXT_START = -1  # stands before position 0 and equals no token
# Columns of the edges, a hash table: from a node by a token to the node below (0: no edge), how
# many tokens that node's suffix has (an inner node's; a leaf stands for all longer ones as
# well), and the place at which it last ended.
_FROM, _BY, _TO, _DEPTH, _LATEST = 0, 1, 2, 3, 4
_EDGE_COLUMNS = 5
# What is counted. The root is a node.
LENGTH, _NODES, _EDGES = 0, 1, 2

SuffixArrays = tuple[Ints, Ints, Ints, int]
"""A :class:`Suffixes` on its way into compiled code."""


class Suffixes(NamedTuple):
    """The arrays of a :class:`SuffixIndex`.

    Attributes:
        text: int32 ``[.]``, a sentinel, the tokens, room for more.
        edges: int32 ``[., 5]``, see above.
        counts: int32 ``[3]``, see above.
        max_match: tokens that are matched exactly, 0 where there is no matching.
    """

    text: Ints
    edges: Ints
    counts: Ints
    max_match: int


@inner
def _shared(text: Ints, end: int, other: int, known: int, limit: int) -> int:
    """Length, at most ``limit``, of the common suffix of the texts ending at two places.

    end, other: places of the last tokens, ``other`` the earlier; the last ``known`` tokens
    are known to be equal.
    """
    while known < limit and text[end - known] == text[other - known]:
        known += 1
    return known


@inner
def _edge(edges: Ints, node: int, token: int) -> int:
    """The row of an edge, or the free one where it belongs."""
    mask = len(edges) - 1
    row = hashed(node, token) & mask
    while edges[row, _TO] != 0 and (edges[row, _FROM] != node or edges[row, _BY] != token):
        row = (row + 1) & mask
    return row


@inner
def _add_node(edges: Ints, counts: Ints, above: int, token: int, depth: int, latest: int) -> None:
    """A new node below another."""
    row = _edge(edges, above, token)
    edges[row, _FROM], edges[row, _BY], edges[row, _TO] = above, token, counts[_NODES]
    edges[row, _DEPTH], edges[row, _LATEST] = depth, latest
    counts[_NODES] += 1
    counts[_EDGES] += 1


@inner
def _index(text: Ints, edges: Ints, counts: Ints, end: int, max_match: int) -> None:
    """Enters the contexts that end at a place."""
    node = depth = 0
    while True:
        row = _edge(edges, node, text[end - depth])
        child = edges[row, _TO]
        if child == 0:
            _add_node(edges, counts, node, text[end - depth], max_match, end)
            return
        below, other = edges[row, _DEPTH], edges[row, _LATEST]
        depth += 1
        edges[row, _LATEST] = end
        if below > depth:
            shared = _shared(text, end, other, depth, below)
            if shared < below:
                # The edge parts here: an inner node takes its shared upper half.
                inner_node = counts[_NODES]
                counts[_NODES] += 1
                edges[row, _TO], edges[row, _DEPTH] = inner_node, shared
                lower = _edge(edges, inner_node, text[other - shared])
                edges[lower, _FROM], edges[lower, _BY] = inner_node, text[other - shared]
                edges[lower, _TO] = child
                edges[lower, _DEPTH], edges[lower, _LATEST] = below, other
                counts[_EDGES] += 1
                _add_node(edges, counts, inner_node, text[end - shared], max_match, end)
                return
            depth = below
        if depth == max_match:
            return
        node = child


@inner
def append_to_text(index: Suffixes, tokens: Ints) -> int:
    """Appends tokens as long as there is room for what they add; returns how many."""
    text, edges, counts = index.text, index.edges, index.counts
    for place in range(len(tokens)):
        length = counts[LENGTH]
        # A hypothetical token goes behind the last.
        if length + 2 >= len(text) or 2 * (counts[_EDGES] + 2) > len(edges):
            return place
        # The newest token's context stays out, so that looking it up cannot find itself.
        if length > 0:
            _index(text, edges, counts, length, index.max_match)
        text[length + 1] = tokens[place]
        counts[LENGTH] = length + 1
    return len(tokens)


@entry
def _append_tokens(text: Ints, edges: Ints, counts: Ints, max_match: int, tokens: Ints) -> int:
    return append_to_text(Suffixes(text, edges, counts, max_match), tokens)


@entry
def _enter_edges(edges: Ints, larger: Ints) -> None:
    """Enters all edges into a larger, empty table."""
    for row in range(len(edges)):
        if edges[row, _TO] != 0:
            place = _edge(larger, edges[row, _FROM], edges[row, _BY])
            for column in range(_EDGE_COLUMNS):
                larger[place, column] = edges[row, column]


@inner
def find_matches(index: Suffixes, end: int, max_matches: int) -> Ints:
    """Earlier occurrences of the text that ends at a place, the longest first.

    int32 ``[matches, 2]``: how many tokens are equal, and the place at which they end. Each
    is followed by another token than all before it.
    """
    text, edges, max_match = index.text, index.edges, index.max_match
    path = np.empty((max_match, 2), np.int32)  # as returned, but the shortest first
    steps = node = depth = 0
    while depth < max_match:
        row = _edge(edges, node, text[end - depth])
        child = edges[row, _TO]
        if child == 0:
            break
        other, below = edges[row, _LATEST], edges[row, _DEPTH]
        shared = _shared(text, end, other, depth + 1, below)
        path[steps, 0], path[steps, 1] = shared, other
        steps += 1
        if shared < below:
            break
        node, depth = child, below
    matches = np.empty((max_matches, 2), np.int32)
    num_found = 0
    while steps > 0 and num_found < max_matches:
        steps -= 1
        length, other = path[steps, 0], path[steps, 1]
        follower = text[other + 1]
        is_new = True
        for earlier in range(num_found):
            is_new = is_new and text[matches[earlier, 1] + 1] != follower
        if is_new:
            if length == max_match:
                limit = min(other, max_match + MEASURED_BEYOND)
                length = _shared(text, end, other, length, limit)
            matches[num_found, 0], matches[num_found, 1] = length, other
            num_found += 1
    return matches[:num_found]


@entry
def _find_matches(
    text: Ints, edges: Ints, counts: Ints, max_match: int, end: int, max_matches: int
) -> Ints:
    return find_matches(Suffixes(text, edges, counts, max_match), end, max_matches)


@entry
def continuation(text: Ints, end: int, other: int, length: int) -> Ints:
    """The ``length`` tokens that followed the occurrence that ends at place ``other``.

    end: where the text ends. Where they run into that they repeat from the occurrence on: a
    text that loops with period p is continued with period p.
    """
    tokens = np.empty(length, np.int32)
    period = end - other
    for index in range(length):
        tokens[index] = text[other + 1 + index] if index < period else tokens[index - period]
    return tokens


class Match(NamedTuple):
    """An earlier occurrence of the text's end, and what followed.

    Attributes:
        length: equal tokens.
        start: text position of the first token after the occurrence.
    """

    length: int
    start: int


class SuffixIndex:
    """Earlier occurrences of the end of one growing text.

    Args:
        max_match: matches are found exactly up to this length in tokens; beyond it the most
            recent occurrence of the last ``max_match`` tokens is taken and its true length
            measured (up to ``max_match`` + 128), because length is what tells how far to
            trust it.

    Attributes:
        arrays: the fields of :class:`Suffixes`.

    Raises:
        ValueError: where ``max_match`` is less than 1.
    """

    def __init__(self, max_match: int = 16) -> None:
        if max_match < 1:
            raise ValueError(f"max_match must be at least 1 token, got {max_match}")
        self._text = np.full(64, _TEXT_START, np.int32)
        self._edges = np.zeros((128, _EDGE_COLUMNS), np.int32)
        self._counts = np.array([0, 1, 0], np.int32)
        self.arrays: SuffixArrays = (self._text, self._edges, self._counts, max_match)

    @classmethod
    def off(cls) -> SuffixIndex:
        """An index that keeps no text and finds nothing."""
        index = cls()
        index.arrays = (*index.arrays[:3], 0)
        return index

    def __len__(self) -> int:
        """Number of tokens in the text."""
        return int(self._counts[LENGTH])

    @property
    def num_edges(self) -> int:
        """Edges of the trie."""
        return int(self._counts[_EDGES])

    def append_tokens(self, tokens: Ints) -> None:
        """Takes in committed tokens.

        Args:
            tokens: int32 ``[.]``.
        """
        if self.arrays[-1] == 0:
            return
        num_done = 0
        while True:
            num_done += _append_tokens(*self.arrays, tokens[num_done:])
            if num_done == len(tokens):
                return
            self._grow()

    def _grow(self) -> None:
        """Doubles what is full, or nearly."""
        length, _, num_edges = self._counts.tolist()
        if length + 2 >= len(self._text):
            self._text = np.concatenate((self._text, np.empty_like(self._text)))
        if 2 * (num_edges + 2) > len(self._edges):
            larger = np.zeros((2 * len(self._edges), _EDGE_COLUMNS), np.int32)
            _enter_edges(self._edges, larger)
            self._edges = larger
        self.arrays = (self._text, self._edges, self._counts, self.arrays[-1])

    def match(self, max_matches: int = 1) -> list[Match]:
        """Earlier occurrences of the text's end, the longest first.

        Args:
            max_matches: how many are looked for.

        Returns:
            An empty list where there is none. The first is the longest (of equally long ones
            the most recent). Further ones are shorter or older and continue with a
            *different* token than every one before.
        """
        found = _find_matches(*self.arrays, len(self), max_matches)
        return [Match(length, place) for length, place in found.tolist()]

    def continuation(self, match: Match, length: int) -> list[int]:
        """What followed a match (:func:`continuation`).

        Args:
            match: of the text as it stands.
            length: tokens asked for.

        Returns:
            That many tokens.
        """
        tokens: list[int] = continuation(self._text, len(self), match.start, length).tolist()
        return tokens
