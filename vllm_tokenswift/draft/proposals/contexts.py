"""What the text's statistics propose: followers of the newest tokens, chosen by the noise."""

from __future__ import annotations

from math import exp

import numpy as np

from vllm_tokenswift.common.arrays import Floats, Ints
from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.draft.acceptance import RATE, context_cell
from vllm_tokenswift.draft.gumbel_noise import Noise, NoiseArrays, exponential, position_key
from vllm_tokenswift.draft.proposals.context_statistics import (
    MOST_FOLLOWERS,
    ContextArrays,
    Contexts,
    mix_followers,
)
from vllm_tokenswift.draft.proposals.ngram_table import NgramArrays, Ngrams
from vllm_tokenswift.draft.proposals.suffix_index import SuffixArrays, Suffixes
from vllm_tokenswift.draft.proposals.table import (
    MAX_CONTEXTS,
    MAX_FOLLOWERS,
    NUM_CANDIDATES,
    TOKEN,
    CandidateArrays,
    Candidates,
    add_candidate,
    add_proposal,
    clear_table,
    note_end_of_text,
    put_below,
)
from vllm_tokenswift.draft.proposals.text import propose_at_end
from vllm_tokenswift.tree import Source

# Paths less likely than this are not looked below.
LEAST_OPENED = 0.03
_LEAST_NOISE = 1e-9

_CONTEXT = int(Source.CONTEXT)


@entry
def propose_text_and_contexts(
    cells: Floats,
    table_arrays: CandidateArrays,
    suffix_arrays: SuffixArrays,
    ngram_arrays: NgramArrays,
    context_arrays: ContextArrays,
    noise_arrays: NoiseArrays,
    token: int,
    max_depth: int,
    least_chance: float,
) -> None:
    """Fills the table with what the text says may follow its last token, its statistics included.

    Args:
        cells: of the request (:func:`~vllm_tokenswift.draft.acceptance.new_cells`).
        table_arrays: whose other candidates are dropped.
        suffix_arrays: of the text's suffix index; a ``max_match`` of 0 is off.
        ngram_arrays: of its n-gram table; a ``k`` of 0 is off.
        context_arrays: of its statistics.
        noise_arrays: of the coming positions, which chooses among followers.
        token: the text's last.
        max_depth: of a path in tokens.
        least_chance: of paths that statistics are looked up below.
    """
    table, noise = Candidates(*table_arrays), Noise(*noise_arrays)
    clear_table(table)
    propose_at_end(cells, table, Suffixes(*suffix_arrays), Ngrams(*ngram_arrays), token, max_depth)
    _propose_contexts(cells, table, Contexts(*context_arrays), noise, max_depth, least_chance)
    note_end_of_text(table)


@inner
def _propose_contexts(
    cells: Floats,
    table: Candidates,
    contexts: Contexts,
    noise: Noise,
    max_depth: int,
    least_chance: float,
) -> None:
    """Adds what followed the newest tokens before, the likeliest paths opened first, as one
    proposal; none where nothing followed."""
    # Of every candidate: the one above (-1: none), its depth, its path's chance until it is opened.
    first, most = table.counts[NUM_CANDIDATES], MAX_CONTEXTS * MAX_FOLLOWERS
    above, depths = np.empty(most, np.int32), np.empty(most, np.int32)
    paths = np.empty(most)
    found, shares = np.empty(MOST_FOLLOWERS, np.int32), np.empty(MOST_FOLLOWERS)
    rows, recent, kind, keys = table.rows, contexts.recent, noise.kind, noise.keys
    newest = recent.copy()
    opened, depth, path, root_size, number = -1, 0, 1.0, 0, 0
    for context in range(MAX_CONTEXTS):
        num_found = mix_followers(contexts, newest, found, shares)
        key = position_key(kind, keys, depth)
        num_found = likeliest_followers(found, shares, num_found, kind, key, MAX_FOLLOWERS)
        if context == 0:
            root_size = num_found
        elif num_found > 0:
            put_below(table, opened, first + number, num_found)
        for place in range(num_found):
            cell = context_cell(shares[place], depth + 1)
            rate = cells[cell, RATE]
            add_candidate(table, found[place], _CONTEXT, cell, rate)
            above[number], depths[number] = opened, depth + 1
            paths[number] = path * rate
            number += 1
        best, path = -1, least_chance
        for candidate in range(number):
            if paths[candidate] > path and depths[candidate] < max_depth:
                best, path = candidate, paths[candidate]
        if best < 0:
            break
        paths[best] = 0.0
        opened, depth = first + best, depths[best]
        order, candidate = 0, opened
        while order < len(newest) and candidate >= 0:
            newest[order] = rows[candidate, TOKEN]
            order, candidate = order + 1, above[candidate - first]
        for older in range(len(newest) - order):
            newest[order + older] = recent[older]
    if root_size > 0:
        add_proposal(table, first, root_size)


@inner
def likeliest_followers(
    found: Ints, shares: Floats, number: int, noise_kind: int, key: np.uint64, most: int
) -> int:
    """Turns shares into the chances that the noise leaves them, and moves the likeliest to the
    front, likeliest first; returns how many these are.

    A token x would be drawn at the time ``E_x / q_x``, the earliest of all is. Of those found a
    token's chance is its share of ``q / E``. What was never seen here, of mass u together, comes
    before it unless its noise, which nobody looks at, is larger: ``exp(-u E_x / q_x)``.

    Args:
        found: int32 ``[number or more]``, the tokens, which are moved.
        shares: float64, their shares, which become chances.
        number: tokens found.
        noise_kind: see :class:`~vllm_tokenswift.draft.gumbel_noise.Noise`.
        key: of the position's noise.
        most: how many are moved to the front at most.
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
