"""What a draft pass and heads propose, and what the text says may follow their first tokens."""

from __future__ import annotations

import numpy as np

from vllm_tokenswift.common.arrays import Floats, Ints
from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.draft.acceptance import RATE, head_cell
from vllm_tokenswift.draft.gumbel_noise import (
    NO_NOISE,
    Noise,
    NoiseArrays,
    chance,
    exponential,
    position_key,
    weighed,
)
from vllm_tokenswift.draft.proposals.head_proposals import HeadArrays, HeadRows
from vllm_tokenswift.draft.proposals.ngram_table import NgramArrays, Ngrams
from vllm_tokenswift.draft.proposals.suffix_index import LENGTH, SuffixArrays, Suffixes
from vllm_tokenswift.draft.proposals.table import (
    FOLLOWED_HEAD_TOKENS,
    NO_CELL,
    NUM_CANDIDATES,
    NUM_PROPOSALS,
    CandidateArrays,
    Candidates,
    add_candidate,
    add_proposal,
    drop_heads,
    put_below,
    put_proposal_below,
)
from vllm_tokenswift.draft.proposals.text import propose_after
from vllm_tokenswift.tree import Source

# How probable a first token of the heads has to be for the text to be asked about it.
_FOLLOWED_PROBABILITY = 0.1

_UNKNOWN, _SELF, _HEADS = int(Source.UNKNOWN), int(Source.SELF), int(Source.HEADS)
_FREE_HEADS = int(Source.FREE_HEADS)


@entry
def propose_heads(
    cells: Floats,
    table_arrays: CandidateArrays,
    head_arrays: HeadArrays,
    suffix_arrays: SuffixArrays,
    ngram_arrays: NgramArrays,
    noise_arrays: NoiseArrays,
    max_depth: int,
) -> None:
    """Adds what heads propose, and what the text says may follow their first tokens; what other
    heads proposed before is dropped.

    Args:
        cells: of the request (:func:`~vllm_tokenswift.draft.acceptance.new_cells`).
        table_arrays: where proposals are added.
        head_arrays: of a :class:`~vllm_tokenswift.draft.proposals.head_proposals.HeadProposals`.
        suffix_arrays: of the text's suffix index; a ``max_match`` of 0 is off.
        ngram_arrays: of its n-gram table; a ``k`` of 0 is off.
        noise_arrays: of the coming positions.
        max_depth: of a path in tokens.
    """
    table, heads = Candidates(*table_arrays), HeadRows(*head_arrays)
    suffixes, ngrams, noise = Suffixes(*suffix_arrays), Ngrams(*ngram_arrays), Noise(*noise_arrays)
    drop_heads(table)
    num_rows, width = heads.tokens.shape
    # No path is deeper than there are rows.
    widths = np.full(min(max_depth, num_rows), width, np.int32)
    propose_rows(cells, table, heads, noise, widths, True)
    if max_depth < 2:
        return

    first_size = 0
    while first_size < width and heads.tokens[0, first_size] >= 0:
        first_size += 1
    is_free = heads.own_depths == 0
    weighs = noise.kind != NO_NOISE and not (is_free and heads.sees_noise)
    chances = heads.probabilities[0, :first_size].copy()
    if weighs:
        key = position_key(noise.kind, noise.keys, 0)
        for place in range(first_size):
            luck = exponential(noise.kind, key, heads.tokens[0, place])
            if is_free:
                chances[place] = weighed(chances[place], luck)
            else:
                chances[place] = chance(chances[place], luck)
    for rank in range(min(FOLLOWED_HEAD_TOKENS, first_size)):
        best = np.argmax(chances) if weighs else rank
        likely, token = chances[best], heads.tokens[0, best]
        chances[best] = -1.0
        if likely < _FOLLOWED_PROBABILITY:
            continue
        # The text as if the token were its last.
        end = suffixes.counts[LENGTH] + 1
        suffixes.text[end] = token
        first_after = table.counts[NUM_PROPOSALS]
        propose_after(cells, table, suffixes, ngrams, end, token, 1, max_depth - 1)
        for proposal in range(first_after, table.counts[NUM_PROPOSALS]):
            put_proposal_below(table, proposal, token, _UNKNOWN)


@inner
def propose_rows(
    cells: Floats,
    table: Candidates,
    heads: HeadRows,
    noise: Noise,
    widths: Ints,
    is_learned: bool,
) -> None:
    """Adds rows of heads as one proposal; its first group is row 0.

    widths: the most tokens that each depth proposes; depths beyond propose nothing. is_learned:
    False takes the probabilities at face value. The noise turns what a draft pass says of its
    token into the chance that it is drawn.
    """
    tokens, probabilities, below = heads.tokens, heads.probabilities, heads.below
    num_rows, width = tokens.shape
    kind, keys = noise.kind, noise.keys
    first = table.counts[NUM_CANDIDATES]
    groups = np.zeros((num_rows, 3), np.int32)  # of each row: depth (0: not reached), first, size
    groups[0, 0] = 1
    end = first
    for row in range(num_rows):
        depth = groups[row, 0]
        if depth == 0:
            continue
        size = 0
        while size < min(widths[depth - 1], width) and tokens[row, size] >= 0:
            if depth < len(widths) and below[row, size] > row and groups[below[row, size], 0] == 0:
                groups[below[row, size], 0] = depth + 1
            size += 1
        groups[row, 1], groups[row, 2] = end, size
        end += size
    for row in range(num_rows):
        depth = groups[row, 0]
        if depth == 0:
            continue
        source = _FREE_HEADS
        if heads.own_depths > 0:
            source = _SELF if depth <= heads.own_depths else _HEADS
        key = position_key(kind, keys, depth - 1)
        for place in range(groups[row, 2]):
            token, probability = tokens[row, place], probabilities[row, place]
            if kind != NO_NOISE and source == _SELF:
                probability = chance(probability, exponential(kind, key, token))
            cell, rate = NO_CELL, probability
            if is_learned:
                cell = head_cell(source, probability, depth)
                rate = cells[cell, RATE]
            candidate = add_candidate(table, token, source, cell, rate)
            if depth < len(widths) and below[row, place] > row:
                group = groups[below[row, place]]
                put_below(table, candidate, group[1], group[2])
    add_proposal(table, first, groups[0, 2])
