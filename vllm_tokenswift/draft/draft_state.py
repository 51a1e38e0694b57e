"""What drafting remembers about one request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from vllm_tokenswift.draft.acceptance import new_cells
from vllm_tokenswift.draft.exponential_noise import NO_NOISE, Keys
from vllm_tokenswift.draft.gumbel_noise import NO_KEYS, GumbelNoise
from vllm_tokenswift.draft.planner.back_off import BackOff
from vllm_tokenswift.draft.planner.self_draft_acceptance import SelfDraftAcceptance
from vllm_tokenswift.draft.planner.source_benefit import (
    FREE_HEADS_PRIOR,
    FREE_HEADS_PRIOR_WEIGHT,
    SELF_DRAFT_PRIOR,
    SourceBenefit,
)
from vllm_tokenswift.draft.proposals import table as offers
from vllm_tokenswift.draft.proposals.commit import commit
from vllm_tokenswift.draft.proposals.context_statistics import (
    NO_CONTEXTS,
    ContextArrays,
    ContextTable,
    Ints,
)
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.proposals.ngram_table import NgramTable
from vllm_tokenswift.draft.proposals.suffix_index import SuffixIndex
from vllm_tokenswift.draft.top_tokens import VerifyTopK
from vllm_tokenswift.draft.tree_builder import TAKEN_COLUMNS, num_followed, take_best_first, tree_of
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

# Share of the newest in the average number of passes of the heads.
_PASSES_FORGOTTEN = 0.1
# Tokens by depth of the paper's fixed tree.
_PAPER_WIDTHS = np.array([1, 3, 3, 3], np.int32)


class DraftState:
    """The text so far, its indexes, and what was learned about its drafts.

    The last token committed is the *bonus token*: sampled, not yet verified, node 0 of the
    next tree.

    n, k: see :class:`NgramTable`. max_match: see :class:`SuffixIndex`; 0 switches suffix
    matching off. sampled: see :func:`new_cells`.

    ``last_heads``: what heads were among the candidates last asked for, which are those
    that the current drafts were taken from. ``head_passes``: passes that free heads took
    lately, on average. ``taken``, ``probabilities``: the nodes taken last
    (:func:`take_best_first`).
    """

    def __init__(self, n: int = 4, k: int = 20, max_match: int = 16, sampled: bool = False) -> None:
        self.table = NgramTable(n, k)
        self.suffix = SuffixIndex(max(max_match, 1))
        # Without noise to choose among followers these find little that the others do not.
        self.contexts = ContextTable() if sampled and k > 0 else None
        self.cells = new_cells(sampled)
        self.self_draft = SourceBenefit(SELF_DRAFT_PRIOR)
        self.own_tokens = SelfDraftAcceptance()
        self.free_heads = SourceBenefit(FREE_HEADS_PRIOR, FREE_HEADS_PRIOR_WEIGHT)
        self.rest = BackOff()
        self.head_passes = 1.0
        self.last_heads: HeadProposals | None = None
        self.num_tokens = 0
        self._unindexed = array("i")  # the newest tokens of the text, not in the indexes yet
        # What was heard with some of them: the first, how many, and that.
        self._heard: list[tuple[int, int, VerifyTopK]] = []
        self._max_match = max_match
        self._last_token = -1
        self._steps = np.empty((0, offers.STEP_COLUMNS), np.int32)
        self._rates = np.empty(0)
        self._roots = np.empty((offers.MOST_ROOTS, 2), np.int32)
        self._num_roots = 0
        self._text_offers: tuple[int, int] | None = None  # their steps and roots
        self._text_depth = 0
        self.taken = np.empty((0, TAKEN_COLUMNS), np.int32)
        self.probabilities = np.empty(0)

    def extend(self, tokens: Sequence[int], heard: VerifyTopK | None = None) -> None:
        """Append committed tokens (the prompt, or what one step emitted, bonus token included).

        heard: what the step's verify pass said, where that was asked.

        What was offered since the last call is compared with them, and learned from. Where
        nothing was, the indexes take them in when something is.
        """
        if not tokens:
            return
        further = self.own_tokens.observe(tokens)
        if heard is not None:
            self._heard.append((len(self._unindexed), len(tokens), heard))
        self._unindexed.extend(tokens)
        if self._text_offers is not None:
            self.self_draft.observe(len(tokens) - further)
            heads = self.free_heads
            without = None
            if heads.asked_last:
                without = 1 + num_followed(heads.planned, np.array(tokens, np.int32))
            heads.observe(len(tokens), without)
            self.rest.observe(len(tokens))
            self._index_newest()
        self.num_tokens += len(tokens)
        self._last_token = tokens[-1]

    def _index_newest(self) -> None:
        """The indexes take in the tokens that are not in them, which what was offered before
        them learns from."""
        if not self._unindexed:
            return
        suffix, table = self.suffix, self.table
        new = np.array(self._unindexed, np.int32)
        del self._unindexed[:]
        indexed, counted = commit(
            self.cells,
            self._steps,
            self._roots,
            self._num_roots,
            suffix.text,
            suffix.edges,
            suffix.counts,
            self._max_match,
            table.slots,
            table.ngrams,
            table.firsts,
            table.window,
            table.counts,
            table.k,
            new,
        )
        if indexed < len(new):
            suffix.extend(new[indexed:])
        if counted < len(new):
            table.extend(new[counted:])
        if self.contexts is not None:
            self._count_contexts(self.contexts, new)
        self._num_roots = 0
        self._text_offers = None

    def _count_contexts(self, contexts: ContextTable, new: Ints) -> None:
        done = 0
        for first, number, heard in self._heard:
            contexts.extend(new[done:first])
            done = first + number
            contexts.hear(new[first:done], heard)
        del self._heard[:]
        contexts.extend(new[done:])

    def draft(
        self,
        heads: HeadProposals | None,
        limit: int,
        min_probability: float = 0.0,
        chain_only: bool = False,
        noise: GumbelNoise | None = None,
    ) -> int:
        """Takes the ``limit`` likeliest nodes of what all sources offer; returns their number.

        See :func:`take_best_first`; noise: the noise that will decide the samples.
        """
        kind, keys = NO_NOISE, NO_KEYS
        if noise is not None:
            kind, keys = noise.kind, noise.keys(limit)
        if not self._offer(heads, limit, kind, keys, min_probability):
            return 0
        if len(self.taken) < limit:
            self.taken = np.empty((limit, TAKEN_COLUMNS), np.int32)
            self.probabilities = np.empty(limit)
        return take_best_first(
            self._steps,
            self._rates,
            self._roots,
            self._num_roots,
            limit,
            min_probability,
            chain_only,
            heads is not None and heads.sees_noise,
            kind,
            keys,
            self.taken,
            self.probabilities,
        )

    def tree(self, count: int) -> DraftTree:
        """The first ``count`` nodes taken last."""
        return tree_of(self.taken, self.probabilities, count) if count else EMPTY_TREE

    def longest_offer(self, coming: Sequence[int]) -> int:
        """How many of the ``coming`` tokens the text offers, from the first without a gap."""
        if not self._offer(None, len(coming), NO_NOISE, NO_KEYS):
            return 0
        return offers.longest_path(
            self._steps, self._roots, self._num_roots, np.array(coming, np.int32)
        )

    def _offer(
        self,
        heads: HeadProposals | None,
        max_depth: int,
        noise_kind: int,
        keys: Keys,
        least_chance: float = 0.0,
    ) -> bool:
        """Makes every source's offers to follow the bonus token, at most ``max_depth`` deep.

        least_chance: of paths that are worth looking below.

        False where there are none.
        """
        self.last_heads = heads
        if heads is not None and heads.free:
            self.head_passes += (heads.num_passes - self.head_passes) * _PASSES_FORGOTTEN
        if self.num_tokens == 0 or max_depth <= 0:
            return False
        self._index_newest()
        suffix, table = self.suffix, self.table
        if self._text_offers is None or self._text_depth != max_depth:
            self._make_room(offers.most_steps(max_depth, table.n, table.k, 0))
            self._text_offers = offers.offer_text(
                suffix.text,
                suffix.edges,
                self._num_indexed,
                self._max_match,
                table.ngrams,
                table.firsts,
                table.k,
                self.cells,
                self._steps,
                self._rates,
                self._roots,
                self._last_token,
                max_depth,
                *self._context_arrays,
                least_chance,
                noise_kind,
                keys,
            )
            self._text_depth = max_depth
        num_steps, self._num_roots = self._text_offers
        if heads is not None:
            tokens, probabilities, below = heads.arrays
            self._make_room(offers.most_steps(max_depth, table.n, table.k, tokens.size))
            self._num_roots = offers.offer_heads(
                suffix.text,
                suffix.edges,
                self._num_indexed,
                self._max_match,
                table.ngrams,
                table.firsts,
                table.k,
                self.cells,
                self._steps,
                self._rates,
                self._roots,
                num_steps,
                self._num_roots,
                tokens,
                probabilities,
                below,
                0 if heads.free else heads.own_depths,
                heads.sees_noise,
                max_depth,
                noise_kind,
                keys,
            )
        return True

    @property
    def _context_arrays(self) -> ContextArrays:
        contexts = self.contexts
        return NO_CONTEXTS if contexts is None else contexts.arrays

    @property
    def _num_indexed(self) -> int:
        """Tokens of the text in the suffix index."""
        return self.num_tokens if self._max_match else 0

    def _make_room(self, num_steps: int) -> None:
        """For that many steps in all; those there are stay."""
        missing = num_steps - len(self._steps)
        if missing > 0:
            more = np.empty((missing, offers.STEP_COLUMNS), np.int32)
            self._steps = np.concatenate((self._steps, more))
            self._rates = np.concatenate((self._rates, np.empty(missing)))

    def paper_tree(self, heads: HeadProposals, budget: int, chain_only: bool = False) -> DraftTree:
        """The paper's setting: a fixed Cartesian tree and the ``k`` n-grams after ``argmax p_0``.

        Probabilities are the heads' and the n-grams' shares at face value; where the budget is
        smaller than the tree (the paper's has up to 101 nodes), they say what is kept.
        """
        self._index_newest()
        table = self.table
        tokens, probabilities, below = heads.arrays
        num_steps = offers.most_steps(0, table.n, table.k, tokens.size)
        steps = np.empty((num_steps, offers.STEP_COLUMNS), np.int32)
        rates = np.empty(num_steps)
        roots = np.empty((offers.MOST_ROOTS, 2), np.int32)
        num_roots = offers.offer_paper(
            table.ngrams,
            table.firsts,
            table.k,
            self.cells,
            steps,
            rates,
            roots,
            tokens,
            probabilities,
            below,
            _PAPER_WIDTHS,
            NO_KEYS,
        )
        taken = np.empty((budget, TAKEN_COLUMNS), np.int32)
        paths = np.empty(budget)
        count = take_best_first(
            steps,
            rates,
            roots,
            num_roots,
            budget,
            0.0,
            chain_only,
            False,
            NO_NOISE,
            NO_KEYS,
            taken,
            paths,
        )
        return tree_of(taken, paths, count)
