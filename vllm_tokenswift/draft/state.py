"""What drafting remembers about one request."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from vllm_tokenswift.draft.candidates import (
    NO_CELL,
    AfterOffer,
    HeadCandidates,
    HeadOffer,
    NgramOffer,
    Offer,
    PathOffer,
)
from vllm_tokenswift.draft.foresight import Foresight
from vllm_tokenswift.draft.gain import GainModel
from vllm_tokenswift.draft.ngrams import NgramTable
from vllm_tokenswift.draft.own_tokens import OwnTokens
from vllm_tokenswift.draft.source_gain import (
    FREE_HEADS_PRIOR,
    FREE_HEADS_PRIOR_WEIGHT,
    SELF_DRAFT_PRIOR,
    SourceGain,
)
from vllm_tokenswift.draft.suffix import Match, SuffixIndex

# Occurrences of the text's end that are offered besides the longest one.
_MAX_MATCHES = 3
# First tokens of the heads that are followed up in the text (by suffix and n-grams), and
# how probable they have to be.
_FOLLOWED_HEAD_TOKENS = 2
_FOLLOWED_HEAD_PROBABILITY = 0.1
# Share of the newest in the average number of passes of the heads.
_PASSES_FORGOTTEN = 0.1


class DraftState:
    """The text so far, its indexes, and what was learned about its drafts.

    The last token committed is the *bonus token*: sampled, not yet verified, node 0 of the
    next tree.

    n, k: see :class:`NgramTable`. max_match: see :class:`SuffixIndex`; 0 switches suffix
    matching off. sampled: see :class:`GainModel`.

    ``last_heads``: what heads were among the candidates last asked for, which are those
    that the current drafts were taken from. ``head_passes``: passes that free heads took
    lately, on average.
    """

    def __init__(self, n: int = 4, k: int = 20, max_match: int = 16, sampled: bool = False) -> None:
        self.table = NgramTable(n, k)
        self.suffix = SuffixIndex(max_match) if max_match else None
        self.gains = GainModel(sampled=sampled)
        self.self_draft = SourceGain(SELF_DRAFT_PRIOR)
        self.own_tokens = OwnTokens()
        self.free_heads = SourceGain(FREE_HEADS_PRIOR, FREE_HEADS_PRIOR_WEIGHT)
        self.head_passes = 1.0
        self.last_heads: HeadCandidates | None = None
        self.num_tokens = 0
        self._last_token = -1
        self._offers: list[Offer] = []
        self._plain_offers: list[Offer] | None = None
        self._plain_depth = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """Append committed tokens (the prompt, or what one step emitted, bonus token included).

        What was offered since the last call is compared with them, and learned from.
        """
        if not tokens:
            return
        for offer in self._offers:
            self._learn(offer, tokens)
        further = self.own_tokens.observe(tokens)
        if self._offers or self._plain_offers is not None:
            self.self_draft.observe(len(tokens) - further)
            self.free_heads.observe(len(tokens))
        self._offers = []
        self._plain_offers = None
        self.table.extend(tokens)
        if self.suffix is not None:
            self.suffix.extend(tokens)
        self.num_tokens += len(tokens)
        self._last_token = tokens[-1]

    def _learn(self, offer: Offer, tokens: Sequence[int]) -> None:
        """Follow the tokens that came through an offer; each step on the way had its chance."""
        gains = self.gains
        handle = offer.root
        for token in tokens:
            below = None
            for candidate, _, _, cell, next_handle in offer.steps(handle):
                accepted = candidate == token
                if cell != NO_CELL:
                    gains.observe(cell, accepted)
                if accepted:
                    below = next_handle
            if below is None:
                return
            handle = below

    def candidates(
        self, heads: HeadCandidates | None, max_depth: int, foresight: Foresight | None = None
    ) -> list[Offer]:
        """What every source offers to follow the bonus token, at most ``max_depth`` deep.

        foresight: says which of the heads' first tokens are followed up in the text.
        """
        self.last_heads = heads
        if heads is not None and heads.free:
            self.head_passes += (heads.num_passes - self.head_passes) * _PASSES_FORGOTTEN
        if self.num_tokens == 0 or max_depth <= 0:
            return []
        if self._plain_offers is None or self._plain_depth != max_depth:
            self._plain_offers = self._text_offers(max_depth)
            self._plain_depth = max_depth
        self._offers = list(self._plain_offers)
        if heads is not None:
            self._offers += self._head_offers(heads, max_depth, foresight)
        return self._offers

    def _text_offers(self, max_depth: int) -> list[Offer]:
        matches = self.suffix.match(_MAX_MATCHES) if self.suffix is not None else []
        return self._offers_after(self._last_token, matches, max_depth)

    def _offers_after(
        self, token: int, matches: Sequence[Match], max_depth: int, after: Sequence[int] = ()
    ) -> list[Offer]:
        """What the text says may follow ``token``: continuations of matches, and n-grams."""
        offers: list[Offer] = []
        ngrams, total = self.table.lookup(token), self.table.total(token)
        for rank, match in enumerate(matches):
            assert self.suffix is not None
            path = self.suffix.continuation(match, max_depth, after)
            seen = sum(frequency for tokens, frequency in ngrams if tokens[0] == path[0])
            support = seen / total if total else 0.0
            offers.append(PathOffer(self.gains, path, match.length, support, rank > 0))
        if ngrams:
            offers.append(NgramOffer(self.gains, ngrams, total, max_depth))
        return offers

    def _head_offers(
        self, heads: HeadCandidates, max_depth: int, foresight: Foresight | None
    ) -> list[Offer]:
        """The heads, and what the text says may follow their first tokens."""
        # No path is deeper than there are rows.
        widths = [max(map(len, heads.tokens))] * min(max_depth, len(heads.tokens))
        offers: list[Offer] = [HeadOffer(self.gains, heads, widths, foresight)]
        if max_depth < 2:
            return offers
        firsts = list(zip(heads.probabilities[0], heads.tokens[0], strict=True))
        if foresight is not None and not (heads.free and heads.foreseen):
            sure = foresight.weighed if heads.free else foresight.chance
            firsts = [(sure(p, 0, token), token) for p, token in firsts]
            firsts.sort(key=itemgetter(0), reverse=True)
        for probability, token in firsts[:_FOLLOWED_HEAD_TOKENS]:
            if probability < _FOLLOWED_HEAD_PROBABILITY:
                continue
            matches = self.suffix.match_after(token) if self.suffix is not None else []
            for offer in self._offers_after(token, matches, max_depth - 1, after=(token,)):
                offers.append(AfterOffer(token, offer))
        return offers
