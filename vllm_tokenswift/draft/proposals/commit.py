"""What a step's tokens change: what was learned, and both indexes of the text."""

from __future__ import annotations

from vllm_tokenswift.common.compiled import entry
from vllm_tokenswift.draft.acceptance import Floats
from vllm_tokenswift.draft.proposals.ngram_table import count_ngrams
from vllm_tokenswift.draft.proposals.suffix_index import append_to_text
from vllm_tokenswift.draft.proposals.table import Ints, learn


@entry
def commit(
    cells: Floats,
    steps: Ints,
    roots: Ints,
    num_roots: int,
    text: Ints,
    edges: Ints,
    text_counts: Ints,
    max_match: int,
    slots: Ints,
    ngrams: Ints,
    firsts: Ints,
    window: Ints,
    ngram_counts: Ints,
    k: int,
    tokens: Ints,
) -> tuple[int, int]:
    """Learns from what was offered, and extends the indexes as long as they have room.

    max_match, k: 0 where the index is off. Returns how many of the tokens each took.
    """
    learn(cells, steps, roots, num_roots, tokens)
    indexed = counted = len(tokens)
    if max_match > 0:
        indexed = append_to_text(text, edges, text_counts, max_match, tokens)
    if k > 0:
        counted = count_ngrams(slots, ngrams, firsts, window, ngram_counts, k, tokens)
    return indexed, counted
