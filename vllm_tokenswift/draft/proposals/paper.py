"""The paper's setting: a fixed Cartesian tree and the ``k`` n-grams after ``argmax p_0``.

Of a draft pass and its heads so many tokens of each depth, and the n-grams that begin with the
pass's likeliest token (paper, sections 3.2 and 3.3), all at face value: probabilities are the
heads' and the n-grams' shares.
"""

from __future__ import annotations

import numpy as np

from vllm_tokenswift.common.arrays import Floats, Ints
from vllm_tokenswift.common.compiled import entry
from vllm_tokenswift.draft.gumbel_noise import UNSEEN_NOISE, Noise, NoiseArrays
from vllm_tokenswift.draft.proposals.head_proposals import HeadArrays, HeadProposals, HeadRows
from vllm_tokenswift.draft.proposals.heads import propose_rows
from vllm_tokenswift.draft.proposals.ngram_table import (
    NgramArrays,
    Ngrams,
    NgramTable,
    ranked_rows,
    times_first,
)
from vllm_tokenswift.draft.proposals.table import (
    NUM_PROPOSALS,
    CandidateArrays,
    Candidates,
    CandidateTable,
    most_candidates,
    put_proposal_below,
)
from vllm_tokenswift.draft.proposals.text import propose_ngrams
from vllm_tokenswift.draft.tree_builder import drafted_nodes
from vllm_tokenswift.tree import DraftTree, Source

# Tokens by depth of the fixed tree.
_WIDTHS = np.array([1, 3, 3, 3], np.int32)
_UNKNOWN = int(Source.UNKNOWN)


def paper_tree(
    ngrams: NgramTable,
    cells: Floats,
    heads: HeadProposals,
    budget: int,
    chain_only: bool = False,
) -> DraftTree:
    """The tree that the paper verifies.

    Args:
        ngrams: of the text.
        cells: of the request; nothing of them is used, all is taken at face value.
        heads: a draft pass and its heads.
        budget: the most nodes. Where that is less than the tree has (the paper's has up to
            101), probabilities say what is kept.
        chain_only: keep only the likeliest child of each node.
    """
    table = CandidateTable()
    table.make_room(most_candidates(0, ngrams.n, ngrams.k, heads.num_tokens))
    _propose_paper(cells, table.arrays, heads.arrays, ngrams.arrays, UNSEEN_NOISE, _WIDTHS)
    nodes = drafted_nodes(table.arrays, budget, chain_only=chain_only)
    return nodes.tree(nodes.count)


@entry
def _propose_paper(
    cells: Floats,
    table_arrays: CandidateArrays,
    head_arrays: HeadArrays,
    ngram_arrays: NgramArrays,
    noise_arrays: NoiseArrays,
    widths: Ints,
) -> None:
    table, heads, ngrams = Candidates(*table_arrays), HeadRows(*head_arrays), Ngrams(*ngram_arrays)
    propose_rows(cells, table, heads, Noise(*noise_arrays), widths, False)
    first = heads.tokens[0, 0]
    rows = ranked_rows(ngrams.ngrams, ngrams.firsts, ngrams.k, first)
    if len(rows) > 0:
        max_depth = len(ngrams.window)
        total = times_first(ngrams.firsts, first)
        propose_ngrams(cells, table, ngrams.ngrams, rows, total, max_depth, False)
        put_proposal_below(table, table.counts[NUM_PROPOSALS] - 1, first, _UNKNOWN)
