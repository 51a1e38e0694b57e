"""The table of candidates, in which every source's proposal has the same form.

A *proposal* is a small tree of *candidates*: tokens, each with the chance that it is accepted if
its parent is, and the acceptance cell that this chance comes from. The candidates that may
follow each other directly stand together, as a *group*: (first candidate, number of them). Every
proposal begins with one group, its *root*. The tree builder merges proposals while it looks for
the likeliest paths; learning follows the tokens that really came through them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vllm_tokenswift.common.arrays import Floats, Ints
from vllm_tokenswift.common.compiled import entry, inner

# Columns of the candidates. A candidate's chance is its entry in ``rates``; its source a Source;
# its cell where that chance is learned. The group below it is empty where the proposal ends.
TOKEN, SOURCE, CELL, BELOW, NUM_BELOW = 0, 1, 2, 3, 4
CANDIDATE_COLUMNS = 5
NO_CELL = -1  # a candidate whose rate is taken at face value

# What is counted: candidates and proposals in the table, and how many of them, the first, are the
# text's. Heads' stand behind those.
NUM_CANDIDATES, NUM_PROPOSALS = 0, 1
_TEXT_CANDIDATES, _TEXT_PROPOSALS = 2, 3

# How much each source proposes at most.
# Occurrences of the text's end that are continued, the longest first.
MAX_MATCHES = 3
# First tokens of the heads that are followed up in the text (by suffix and n-grams).
FOLLOWED_HEAD_TOKENS = 2
# Contexts that are opened, each the path to a token that is likely enough, and the followers of
# each that are proposed.
MAX_CONTEXTS = 24
MAX_FOLLOWERS = 8
# Matches, n-grams and contexts of the text; heads; a match and n-grams after their first tokens.
MAX_PROPOSALS = MAX_MATCHES + 1 + 1 + 1 + 2 * FOLLOWED_HEAD_TOKENS


def most_candidates(max_depth: int, n: int, k: int, num_head_tokens: int) -> int:
    """Candidates that all sources come to at most.

    Args:
        max_depth: of a path.
        n: tokens of an n-gram.
        k: n-grams that are looked up after a token.
        num_head_tokens: candidates that heads propose.
    """
    lookups = 1 + FOLLOWED_HEAD_TOKENS
    paths = (MAX_MATCHES + FOLLOWED_HEAD_TOKENS) * max_depth
    contexts = MAX_CONTEXTS * MAX_FOLLOWERS
    return paths + contexts + lookups * k * (n - 1) + num_head_tokens + 2 * FOLLOWED_HEAD_TOKENS


CandidateArrays = tuple[Ints, Floats, Ints, Ints]
"""A :class:`Candidates` on its way into compiled code."""


class Candidates(NamedTuple):
    """The arrays of a :class:`CandidateTable`.

    Attributes:
        rows: int32 ``[room, CANDIDATE_COLUMNS]``.
        rates: float64 ``[room]``, the candidates' chances.
        roots: int32 ``[MAX_PROPOSALS, 2]``, each proposal's first group.
        counts: int32 ``[4]``, see above.
    """

    rows: Ints
    rates: Floats
    roots: Ints
    counts: Ints


class CandidateTable:
    """The candidates of one request's sources; grows as it is needed."""

    def __init__(self) -> None:
        self._rows = np.empty((0, CANDIDATE_COLUMNS), np.int32)
        self._rates = np.empty(0)
        self._roots = np.empty((MAX_PROPOSALS, 2), np.int32)
        self._counts = np.zeros(4, np.int32)
        self.arrays: CandidateArrays = (self._rows, self._rates, self._roots, self._counts)

    def make_room(self, num_candidates: int) -> None:
        """Grows to hold that many candidates in all; those that there are stay."""
        missing = num_candidates - len(self._rates)
        if missing > 0:
            more = np.empty((missing, CANDIDATE_COLUMNS), np.int32)
            self._rows = np.concatenate((self._rows, more))
            self._rates = np.concatenate((self._rates, np.empty(missing)))
            self.arrays = (self._rows, self._rates, self._roots, self._counts)

    def drop_heads(self) -> None:
        """Keeps what the text proposes alone."""
        self._counts[:2] = self._counts[2:]

    def longest_path(self, tokens: Ints) -> int:
        """How many of the tokens some proposals hold, from the first without a gap.

        Args:
            tokens: int32 ``[.]``, that follow the bonus token.
        """
        return _longest_path(self.arrays, tokens)


@inner
def clear_table(table: Candidates) -> None:
    """Drops all candidates."""
    table.counts[:] = 0


@inner
def note_end_of_text(table: Candidates) -> None:
    """What is in the table is the text's."""
    counts = table.counts
    counts[_TEXT_CANDIDATES], counts[_TEXT_PROPOSALS] = counts[0], counts[1]


@inner
def drop_heads(table: Candidates) -> None:
    """Keeps what the text proposes alone."""
    counts = table.counts
    counts[0], counts[1] = counts[_TEXT_CANDIDATES], counts[_TEXT_PROPOSALS]


@inner
def add_candidate(table: Candidates, token: int, source: int, cell: int, rate: float) -> int:
    """Adds a candidate that nothing follows so far; returns its row."""
    row = table.counts[NUM_CANDIDATES]
    rows = table.rows
    rows[row, TOKEN], rows[row, SOURCE], rows[row, CELL] = token, source, cell
    rows[row, BELOW], rows[row, NUM_BELOW] = 0, 0
    table.rates[row] = rate
    table.counts[NUM_CANDIDATES] = row + 1
    return row


@inner
def put_below(table: Candidates, row: int, first: int, size: int) -> None:
    """Puts a group below a candidate."""
    table.rows[row, BELOW], table.rows[row, NUM_BELOW] = first, size


@inner
def add_proposal(table: Candidates, first: int, size: int) -> None:
    """Makes a group of candidates, and all below them, a proposal."""
    number = table.counts[NUM_PROPOSALS]
    table.roots[number, 0], table.roots[number, 1] = first, size
    table.counts[NUM_PROPOSALS] = number + 1


@inner
def put_proposal_below(table: Candidates, proposal: int, token: int, source: int) -> None:
    """Puts a whole proposal below a token that it does not propose itself.

    The token claims nothing of its own: whoever proposes it is continued by this.
    """
    row = add_candidate(table, token, source, NO_CELL, 0.0)
    root = table.roots[proposal]
    put_below(table, row, root[0], root[1])
    root[0], root[1] = row, 1


@entry
def _longest_path(table_arrays: CandidateArrays, tokens: Ints) -> int:
    table = Candidates(*table_arrays)
    groups = table.roots[: table.counts[NUM_PROPOSALS]].copy()
    rows = table.rows
    for depth in range(len(tokens)):
        is_found = False
        for proposal in range(len(groups)):
            below, num_below = 0, 0
            for row in range(groups[proposal, 0], groups[proposal, 0] + groups[proposal, 1]):
                if rows[row, TOKEN] == tokens[depth]:
                    is_found = True
                    below, num_below = rows[row, BELOW], rows[row, NUM_BELOW]
            groups[proposal, 0], groups[proposal, 1] = below, num_below
        if not is_found:
            return depth
    return len(tokens)
