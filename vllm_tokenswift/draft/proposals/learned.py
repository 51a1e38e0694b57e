"""What an iteration's tokens teach: acceptance of all that was proposed, and the text's indexes."""

from __future__ import annotations

from vllm_tokenswift.common.arrays import Floats, Ints
from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.draft.acceptance import observe_candidate
from vllm_tokenswift.draft.proposals.ngram_table import NgramArrays, Ngrams, count_ngrams
from vllm_tokenswift.draft.proposals.suffix_index import SuffixArrays, Suffixes, append_to_text
from vllm_tokenswift.draft.proposals.table import (
    BELOW,
    CELL,
    NO_CELL,
    NUM_BELOW,
    NUM_PROPOSALS,
    TOKEN,
    CandidateArrays,
    Candidates,
    clear_table,
)


@entry
def learn_tokens(
    cells: Floats,
    table_arrays: CandidateArrays,
    suffix_arrays: SuffixArrays,
    ngram_arrays: NgramArrays,
    tokens: Ints,
) -> tuple[int, int]:
    """Learns from what was proposed, and extends the indexes as long as they have room.

    Args:
        cells: of the request (:func:`~vllm_tokenswift.draft.acceptance.new_cells`).
        table_arrays: what was proposed to follow the text before these tokens; it is dropped.
        suffix_arrays: of its suffix index; a ``max_match`` of 0 is off.
        ngram_arrays: of its n-gram table; a ``k`` of 0 is off.
        tokens: int32 ``[.]``, that came.

    Returns:
        How many of the tokens each index took; all where it is off.
    """
    table, suffixes, ngrams = (
        Candidates(*table_arrays),
        Suffixes(*suffix_arrays),
        Ngrams(*ngram_arrays),
    )
    _learn_acceptance(cells, table, tokens)
    clear_table(table)
    num_indexed = num_counted = len(tokens)
    if suffixes.max_match > 0:
        num_indexed = append_to_text(suffixes, tokens)
    if ngrams.k > 0:
        num_counted = count_ngrams(ngrams, tokens)
    return num_indexed, num_counted


@inner
def _learn_acceptance(cells: Floats, table: Candidates, tokens: Ints) -> None:
    """Follows the tokens that came through every proposal; each candidate on the way had its
    chance."""
    rows, roots = table.rows, table.roots
    for proposal in range(table.counts[NUM_PROPOSALS]):
        first, size = roots[proposal, 0], roots[proposal, 1]
        for token in tokens:
            below, num_below = 0, 0
            for row in range(first, first + size):
                is_accepted = rows[row, TOKEN] == token
                if rows[row, CELL] != NO_CELL:
                    observe_candidate(cells, rows[row, CELL], is_accepted)
                if is_accepted:
                    below, num_below = rows[row, BELOW], rows[row, NUM_BELOW]
            if num_below == 0:
                break
            first, size = below, num_below
