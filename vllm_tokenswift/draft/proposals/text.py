"""What the text proposes: how it went on where it looked so before, and its frequent n-grams."""

from __future__ import annotations

import numpy as np

from vllm_tokenswift.common.arrays import Floats, Ints
from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.draft.acceptance import (
    RATE,
    continued_match_cell,
    match_cell,
    ngram_cell,
)
from vllm_tokenswift.draft.proposals.ngram_table import (
    COUNT,
    NgramArrays,
    Ngrams,
    ranked_rows,
    times_first,
)
from vllm_tokenswift.draft.proposals.suffix_index import (
    LENGTH,
    SuffixArrays,
    Suffixes,
    continuation,
    find_matches,
)
from vllm_tokenswift.draft.proposals.table import (
    BELOW,
    MAX_MATCHES,
    NO_CELL,
    NUM_BELOW,
    NUM_CANDIDATES,
    CandidateArrays,
    Candidates,
    add_candidate,
    add_proposal,
    clear_table,
    note_end_of_text,
    put_below,
)
from vllm_tokenswift.tree import Source

_NGRAM, _SUFFIX = int(Source.NGRAM), int(Source.SUFFIX)


@entry
def propose_text(
    cells: Floats,
    table_arrays: CandidateArrays,
    suffix_arrays: SuffixArrays,
    ngram_arrays: NgramArrays,
    token: int,
    max_depth: int,
) -> None:
    """Fills the table with what the text says may follow its last token.

    Args:
        cells: of the request (:func:`~vllm_tokenswift.draft.acceptance.new_cells`).
        table_arrays: whose other candidates are dropped.
        suffix_arrays: of its suffix index; a ``max_match`` of 0 is off.
        ngram_arrays: of its n-gram table; a ``k`` of 0 is off.
        token: the text's last.
        max_depth: of a path in tokens.
    """
    table = Candidates(*table_arrays)
    clear_table(table)
    propose_at_end(cells, table, Suffixes(*suffix_arrays), Ngrams(*ngram_arrays), token, max_depth)
    note_end_of_text(table)


@inner
def propose_at_end(
    cells: Floats,
    table: Candidates,
    suffixes: Suffixes,
    ngrams: Ngrams,
    token: int,
    max_depth: int,
) -> None:
    """Adds what may follow the text's last token."""
    end = suffixes.counts[LENGTH]
    propose_after(cells, table, suffixes, ngrams, end, token, MAX_MATCHES, max_depth)


@inner
def propose_after(
    cells: Floats,
    table: Candidates,
    suffixes: Suffixes,
    ngrams: Ngrams,
    end: int,
    token: int,
    max_matches: int,
    max_depth: int,
) -> None:
    """Adds what may follow a token: continuations of matches, and n-grams.

    end: the token's place, where the text ends.
    """
    matches = find_matches(suffixes, end, max_matches)
    counted = ngrams.ngrams
    rows = ranked_rows(counted, ngrams.firsts, ngrams.k, token)
    total = times_first(ngrams.firsts, token)
    for rank in range(len(matches)):
        path = continuation(suffixes.text, end, matches[rank, 1], max_depth)
        times_seen = 0
        for place in range(len(rows)):
            if counted[rows[place], 1] == path[0]:
                times_seen += counted[rows[place], COUNT]
        support = times_seen / total if total > 0 else 0.0
        _propose_path(cells, table, path, matches[rank, 0], support, rank > 0)
    if len(rows) > 0:
        propose_ngrams(cells, table, counted, rows, total, max_depth, True)


@inner
def _propose_path(
    cells: Floats,
    table: Candidates,
    path: Ints,
    match_length: int,
    support: float,
    is_alternative: bool,
) -> None:
    """Adds what followed an earlier occurrence of the text's end.

    match_length: how many tokens before it matched. support: share of the path's first token
    among what followed the bonus token so far. is_alternative: a longer match is followed by
    another token.
    """
    first = table.counts[NUM_CANDIDATES]
    for index in range(len(path)):
        if index == 0:
            cell = match_cell(match_length, support, is_alternative)
        else:
            cell = continued_match_cell(match_length + index)
            put_below(table, first + index - 1, first + index, 1)
        add_candidate(table, path[index], _SUFFIX, cell, cells[cell, RATE])
    add_proposal(table, first, 1)


@inner
def propose_ngrams(
    cells: Floats,
    table: Candidates,
    ngrams: Ints,
    rows: Ints,
    total: int,
    max_depth: int,
    is_learned: bool,
) -> None:
    """Adds n-grams that begin with one token, grouped by shared prefixes, as one proposal.

    rows: the n-grams, ranked, one at least. total: how often that token began an n-gram, the
    unlisted ones included. is_learned: False takes a token's share at face value. Groups stand in
    the order of their depth.
    """
    root = table.counts[NUM_CANDIDATES]
    last_depth = min(ngrams.shape[1] + COUNT - 1, max_depth)
    number = len(rows)
    # Groups to be opened: n-grams from, to, their depth, how often all, the candidate above.
    opened = np.empty((number * last_depth + 1, 5), np.int32)
    opened[0, 0], opened[0, 1], opened[0, 2], opened[0, 3], opened[0, 4] = 0, number, 0, total, -1
    num_opened, index = 1, 0
    rows = rows.copy()
    while index < num_opened:
        low, high, depth = opened[index, 0], opened[index, 1], opened[index, 2]
        group, above = table.counts[NUM_CANDIDATES], opened[index, 4]
        while low < high:
            # The n-grams that share the first one's token move up to it, in their order.
            token, frequency, shared = ngrams[rows[low], depth + 1], 0, low
            for place in range(low, high):
                row = rows[place]
                if ngrams[row, depth + 1] == token:
                    frequency += ngrams[row, COUNT]
                    for back in range(place, shared, -1):
                        rows[back] = rows[back - 1]
                    rows[shared] = row
                    shared += 1
            rate = frequency / opened[index, 3]
            cell = NO_CELL
            if is_learned:
                cell = ngram_cell(frequency, rate, depth + 1)
                rate = cells[cell, RATE]
            candidate = add_candidate(table, token, _NGRAM, cell, rate)
            if depth + 1 < last_depth:
                opened[num_opened, 0], opened[num_opened, 1] = low, shared
                opened[num_opened, 2], opened[num_opened, 3] = depth + 1, frequency
                opened[num_opened, 4] = candidate
                num_opened += 1
            low = shared
        if above >= 0:
            put_below(table, above, group, table.counts[NUM_CANDIDATES] - group)
        index += 1
    end = table.counts[NUM_CANDIDATES]
    has_below = table.rows[root, NUM_BELOW] > 0
    add_proposal(table, root, table.rows[root, BELOW] - root if has_below else end - root)
