"""What drafting remembers about one request."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from vllm_tokenswift.common.arrays import Ints
from vllm_tokenswift.draft.acceptance import new_cells
from vllm_tokenswift.draft.gumbel_noise import NO_NOISE, UNSEEN_NOISE, GumbelNoise, NoiseArrays
from vllm_tokenswift.draft.planner.back_off import BackOff
from vllm_tokenswift.draft.planner.self_draft_acceptance import SelfDraftAcceptance
from vllm_tokenswift.draft.planner.source_benefit import (
    FREE_HEADS_PRIOR,
    FREE_HEADS_PRIOR_WEIGHT,
    SELF_DRAFT_PRIOR,
    SourceBenefit,
)
from vllm_tokenswift.draft.proposals.context_statistics import ContextTable
from vllm_tokenswift.draft.proposals.contexts import LEAST_OPENED, propose_text_and_contexts
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.draft.proposals.heads import propose_heads
from vllm_tokenswift.draft.proposals.learned import learn_tokens
from vllm_tokenswift.draft.proposals.ngram_table import NgramTable
from vllm_tokenswift.draft.proposals.suffix_index import SuffixIndex
from vllm_tokenswift.draft.proposals.table import CandidateTable, most_candidates
from vllm_tokenswift.draft.proposals.text import propose_text
from vllm_tokenswift.draft.top_tokens import VerifyTopK
from vllm_tokenswift.draft.tree_builder import (
    NOTHING_DRAFTED,
    DraftedNodes,
    drafted_nodes,
    num_followed,
)

# Share of the newest in the average number of passes of the heads.
_PASSES_FORGOTTEN = 0.1


class DraftState:
    """The text so far, its indexes, and what was learned about its drafts.

    The last token committed is the *bonus token*: sampled, not yet verified, node 0 of the
    next tree.

    Args:
        n: tokens of an n-gram (:class:`NgramTable`).
        k: n-grams of each first token that are proposed, 0 for none.
        max_match: tokens that are matched exactly (:class:`SuffixIndex`), 0 for no matching.
        sampled: the request's tokens are drawn, not its likeliest ones.
        sees_noise: drafts may look at the noise of the coming samples.

    Attributes:
        ngrams: n-gram table of the text; what it does not hold yet, :meth:`index_text` enters.
        suffix: its suffix index, likewise.
        contexts: its statistics, likewise; None where nothing would be proposed from them.
        cells: learned acceptance (:func:`new_cells`).
        num_tokens: of the text.
        self_draft_benefit, free_heads_benefit: what sources that cost time brought.
        self_draft_acceptance: how often tokens of self-draft passes come.
        back_off: whether draft attempts pay.
        head_passes: passes that free heads took lately, on average.
    """

    def __init__(
        self,
        n: int = 4,
        k: int = 20,
        max_match: int = 16,
        sampled: bool = False,
        sees_noise: bool = True,
    ) -> None:
        self.ngrams = NgramTable(n, k)
        self.suffix = SuffixIndex(max_match) if max_match else SuffixIndex.off()
        # Without noise to choose among followers these find little that the others do not.
        self.contexts = ContextTable() if sampled and sees_noise and k > 0 else None
        self.cells = new_cells(sampled)
        self.self_draft_benefit = SourceBenefit(SELF_DRAFT_PRIOR)
        self.self_draft_acceptance = SelfDraftAcceptance()
        self.free_heads_benefit = SourceBenefit(FREE_HEADS_PRIOR, FREE_HEADS_PRIOR_WEIGHT)
        self.back_off = BackOff()
        self.head_passes = 1.0
        self.num_tokens = 0
        self._last_token = -1
        self._unindexed = array("i")  # the newest tokens of the text, not in the indexes yet
        # The top-k known of some of them: the first such token, how many, and their top-k.
        self._verified: list[tuple[int, int, VerifyTopK]] = []
        self._table = CandidateTable()
        # What the text's proposals in the table were made with, None where there are none.
        self._text_key: tuple[float | bytes, ...] | None = None
        self._has_heads = False
        self._room_for = (0, 0)  # the deepest paths and the most tokens of heads

    def append_tokens(self, tokens: Sequence[int], verified: VerifyTopK | None = None) -> None:
        """Takes in committed tokens: the prompt, or what a step emitted, bonus token included.

        What was proposed since the last call is compared with them, and learned from. Where
        nothing was, the indexes take them in when something is.

        Args:
            tokens: that follow the text so far.
            verified: what the step's verify pass found likeliest, where that was asked.
        """
        if not tokens:
            return
        num_further = self.self_draft_acceptance.observe_tokens(tokens)
        if verified is not None:
            self._verified.append((len(self._unindexed), len(tokens), verified))
        self._unindexed.extend(tokens)
        if self._text_key is not None:  # something was proposed
            self.self_draft_benefit.observe_emitted(len(tokens) - num_further)
            heads, num_without = self.free_heads_benefit, None
            if heads.asked_last:
                num_without = 1 + num_followed(heads.nodes_without, np.array(tokens, np.int32))
            heads.observe_emitted(len(tokens), num_without)
            self.back_off.observe_emitted(len(tokens))
            self.index_text()
        self.num_tokens += len(tokens)
        self._last_token = tokens[-1]

    def index_text(self) -> None:
        """The indexes take in the tokens that are not in them, which what was proposed before
        them learns from."""
        if not self._unindexed:
            return
        new = np.frombuffer(self._unindexed, np.int32)
        self._unindexed = array("i")
        num_indexed, num_counted = learn_tokens(
            self.cells, self._table.arrays, self.suffix.arrays, self.ngrams.arrays, new
        )
        if num_indexed < len(new):
            self.suffix.append_tokens(new[num_indexed:])
        if num_counted < len(new):
            self.ngrams.append_tokens(new[num_counted:])
        if self.contexts is not None:
            self._count_contexts(self.contexts, new)
        self._text_key = None

    def _count_contexts(self, contexts: ContextTable, new: Ints) -> None:
        num_done = 0
        for first, number, verified in self._verified:
            contexts.append_tokens(new[num_done:first])
            num_done = first + number
            contexts.append_verified(new[first:num_done], verified)
        del self._verified[:]
        contexts.append_tokens(new[num_done:])

    def draft(
        self,
        heads: HeadProposals | None,
        limit: int,
        min_probability: float = 0.0,
        chain_only: bool = False,
        noise: GumbelNoise | None = None,
    ) -> DraftedNodes:
        """The likeliest nodes of what all sources propose to follow the bonus token.

        Args:
            heads: what a draft pass or heads propose.
            limit: the most nodes.
            min_probability: paths at or below it are not taken.
            chain_only: take only the likeliest child of a node.
            noise: that will decide the samples, None where there is none to see.
        """
        noise_arrays = UNSEEN_NOISE if noise is None else noise.arrays(limit)
        if not self._propose(heads, limit, noise_arrays, min_probability):
            return NOTHING_DRAFTED
        sees_noise = heads is not None and heads.sees_noise
        return drafted_nodes(
            self._table.arrays, limit, min_probability, chain_only, sees_noise, noise_arrays
        )

    def longest_proposal(self, coming: Sequence[int]) -> int:
        """How many tokens the text proposes, from the first without a gap.

        Args:
            coming: the tokens that will follow the text.
        """
        if not self._propose(None, len(coming), UNSEEN_NOISE):
            return 0
        return self._table.longest_path(np.array(coming, np.int32))

    def _propose(
        self,
        heads: HeadProposals | None,
        max_depth: int,
        noise_arrays: NoiseArrays,
        least_chance: float = 0.0,
    ) -> bool:
        """Makes every source's proposals to follow the bonus token; False where there are none.

        least_chance: of paths that are worth looking below.
        """
        if heads is not None and heads.free:
            self.head_passes += (heads.num_passes - self.head_passes) * _PASSES_FORGOTTEN
        if self.num_tokens == 0 or max_depth <= 0:
            return False
        self.index_text()
        self._propose_text(max_depth, noise_arrays, least_chance)
        if heads is not None:
            self._make_room(max_depth, heads.num_tokens)
            propose_heads(
                self.cells,
                self._table.arrays,
                heads.arrays,
                self.suffix.arrays,
                self.ngrams.arrays,
                noise_arrays,
                max_depth,
            )
            self._has_heads = True
        elif self._has_heads:
            self._table.drop_heads()
            self._has_heads = False
        return True

    def _propose_text(self, max_depth: int, noise_arrays: NoiseArrays, least_chance: float) -> None:
        """What the text proposes, unless that stands in the table from before."""
        kind, keys = noise_arrays
        key: tuple[float | bytes, ...] = (max_depth,)
        with_contexts = self.contexts is not None and kind != NO_NOISE
        if with_contexts:
            least_chance = max(least_chance, LEAST_OPENED)
            key = max_depth, least_chance, kind, keys.tobytes()
        if key == self._text_key:
            return
        self._text_key, self._has_heads = key, False
        self._make_room(max_depth)
        if self.contexts is not None and with_contexts:
            propose_text_and_contexts(
                self.cells,
                self._table.arrays,
                self.suffix.arrays,
                self.ngrams.arrays,
                self.contexts.arrays,
                noise_arrays,
                self._last_token,
                max_depth,
                least_chance,
            )
        else:
            propose_text(
                self.cells,
                self._table.arrays,
                self.suffix.arrays,
                self.ngrams.arrays,
                self._last_token,
                max_depth,
            )

    def _make_room(self, max_depth: int, num_head_tokens: int = 0) -> None:
        if max_depth <= self._room_for[0] and num_head_tokens <= self._room_for[1]:
            return
        ngrams = self.ngrams
        most = most_candidates(max_depth, ngrams.n, ngrams.k, num_head_tokens)
        self._table.make_room(most)
        self._room_for = max_depth, num_head_tokens
