"""Longest-suffix matching: where did the text last look as it does now, and what followed?

The index is a path-compressed trie of *reversed* contexts: the node reached by reading
the text backwards from its end stands for a suffix, and remembers where that suffix last
ended. A new token adds at most one leaf and one inner node, and walks at most
``max_match`` steps, so time per token is flat and memory linear in the text.

Index space: a *text position* counts tokens from 0; a match "ends at" the position of its
last token, and its continuation starts one later.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_TOKEN_BITS = 24
_TEXT_START = -1  # stands before position 0 and equals no token


def _shared(text: array[int], end: int, other: int, known: int, limit: int) -> int:
    """Length, at most ``limit``, of the common suffix of the texts ending at two places.

    end, other: indices of the last tokens, ``other`` the earlier; the last ``known`` tokens
    are known to be equal.
    """
    if (
        other >= limit
        and text[end - limit + 1 : end - known + 1] == text[other - limit + 1 : other - known + 1]
    ):
        return limit
    while known < limit and text[end - known] == text[other - known]:
        known += 1
    return known


class Match(NamedTuple):
    """An earlier occurrence of the text's end: ``length`` equal tokens, then what followed.

    start: text position of the first token after the occurrence.
    """

    length: int
    start: int


class SuffixIndex:
    """Earlier occurrences of the end of one growing text.

    max_match: matches are found exactly up to this length; beyond it the most recent
        occurrence of the last ``max_match`` tokens is taken and its true length measured
        (up to ``max_match`` + 128), because length is what tells how far to trust it.
    """

    _MEASURED_BEYOND = 128

    def __init__(self, max_match: int = 16) -> None:
        if max_match < 1:
            raise ValueError(f"max_match must be at least 1 token, got {max_match}")
        self.max_match = max_match
        # Shifted by one: _text[0] is the sentinel, text position i is _text[i + 1].
        self._text = array("i", [_TEXT_START])
        self._children: dict[int, int] = {}
        self._depth = array("i", [0])
        self._latest = array("i", [0])  # index into _text where this context last ended
        self._num_indexed = 0  # tokens whose context is in the trie: all but the newest

    def __len__(self) -> int:
        """Number of tokens in the text."""
        return len(self._text) - 1

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens. Token ids must lie in 0 .. 2**24 - 1."""
        self._text.extend(tokens)
        text, children, depths, latest = self._text, self._children, self._depth, self._latest
        max_match = self.max_match
        # The newest token's context stays out, so that looking it up cannot find itself.
        for end in range(self._num_indexed + 1, len(text) - 1):
            node = depth = 0
            while True:
                key = (node << _TOKEN_BITS) + text[end - depth] + 1
                child = children.get(key, 0)
                if not child:
                    children[key] = self._new_node(max_match, end)
                    break
                below = depths[child]
                depth += 1
                if below > depth:
                    other = latest[child]
                    shared = _shared(text, end, other, depth, below)
                    if shared < below:
                        # The edge parts here: an inner node takes its shared upper half.
                        inner = self._new_node(shared, end)
                        children[key] = inner
                        inner <<= _TOKEN_BITS
                        children[inner + text[other - shared] + 1] = child
                        children[inner + text[end - shared] + 1] = self._new_node(max_match, end)
                        break
                    depth = below
                latest[child] = end
                if depth == max_match:
                    break
                node = child
        self._num_indexed = max(len(text) - 2, 0)

    def _new_node(self, depth: int, end: int) -> int:
        self._depth.append(depth)
        self._latest.append(end)
        return len(self._depth) - 1

    def match(self, max_matches: int = 1) -> list[Match]:
        """Earlier occurrences of the text's end, the longest first; [] where there is none.

        The first is the longest (of equally long ones the most recent). Further ones are
        shorter or older and continue with a *different* token than every one before.
        """
        return self._find(max_matches)

    def match_after(self, token: int, max_matches: int = 1) -> list[Match]:
        """What :meth:`match` would return if ``token`` were appended; changes nothing.

        Except that the text's newest token is not looked at as an earlier occurrence.
        """
        self._text.append(token)
        matches = self._find(max_matches)
        self._text.pop()
        return matches

    def _find(self, max_matches: int) -> list[Match]:
        """Occurrences of the text's end among the indexed contexts."""
        text, children, depths, latest = self._text, self._children, self._depth, self._latest
        end = len(text) - 1
        path: list[tuple[int, int]] = []  # (length, where it ended in _text), shortest first
        node = depth = 0
        while depth < self.max_match:
            child = children.get((node << _TOKEN_BITS) + text[end - depth] + 1, 0)
            if not child:
                break
            other, below = latest[child], depths[child]
            shared = _shared(text, end, other, depth + 1, below)
            path.append((shared, other))
            if shared < below:
                break
            node, depth = child, below
        matches: list[Match] = []
        followed_by: set[int] = set()
        for length, other in reversed(path):
            follower = text[other + 1]
            if follower in followed_by:
                continue
            followed_by.add(follower)
            if length == self.max_match:
                limit = min(other, length + self._MEASURED_BEYOND)
                length = _shared(text, end, other, length, limit)
            matches.append(Match(length, other))
            if len(matches) >= max_matches:
                break
        return matches

    def continuation(self, match: Match, length: int, after: Sequence[int] = ()) -> list[int]:
        """The ``length`` tokens that followed the match.

        Where they run into the end of the text they repeat from the match's start on: a
        text that loops with period p is continued with period p. For a match found by
        :meth:`match_after`, ``after`` is the hypothetical token (it ends the text then).
        """
        followed = self._text[match.start + 1 : match.start + 1 + length].tolist()
        if len(followed) < length:
            followed += after
        while len(followed) < length:
            followed += followed[: length - len(followed)]
        return followed[:length]
