"""What each source offers to follow the bonus token, in one form.

An *offer* is a small tree of *steps*: candidate tokens, each with the chance that it is
accepted if its parent is, and the gain cell that this chance comes from. The steps that may
follow each other directly stand together, as a *group*: (first step, number of steps). Every
offer begins with one group, its *root*. The trie merges offers while it looks for the
likeliest paths; learning follows the tokens that really came through them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.common.compiled import entry, inner
from vllm_tokenswift.draft.acceptance import (
    RATE,
    Floats,
    context_cell,
    continued_match_cell,
    head_cell,
    match_cell,
    ngram_cell,
    observe,
)
from vllm_tokenswift.draft.exponential_noise import NO_NOISE, Keys, exponential, position_key
from vllm_tokenswift.draft.gumbel_noise import chance, weighed
from vllm_tokenswift.draft.proposals.context_statistics import (
    MOST_FOLLOWERS,
    Weights,
    likeliest_followers,
    mix_followers,
)
from vllm_tokenswift.draft.proposals.ngram_table import COUNT, TOTAL, first_row, ranked
from vllm_tokenswift.draft.proposals.suffix_index import continuation, find_matches
from vllm_tokenswift.tree import Source

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

# Columns of the steps. A step's chance is its entry in ``rates``; its source a Source; its cell
# where that chance is learned. The group below it is empty where the offer ends.
TOKEN, SOURCE, CELL, BELOW, NUM_BELOW = 0, 1, 2, 3, 4
STEP_COLUMNS = 5
NO_CELL = -1  # a step whose rate is taken at face value

# Occurrences of the text's end that are offered besides the longest one.
MAX_MATCHES = 3
# First tokens of the heads that are followed up in the text (by suffix and n-grams), and
# how probable they have to be.
FOLLOWED_HEAD_TOKENS = 2
_FOLLOWED_HEAD_PROBABILITY = 0.1
# Contexts that are opened, each the path to a token that is likely enough, and the followers of
# each that are offered.
_MOST_CONTEXTS = 24
_LEAST_OPENED = 0.03
_OFFERED_FOLLOWERS = 8

_UNKNOWN, _SELF, _HEADS = int(Source.UNKNOWN), int(Source.SELF), int(Source.HEADS)
_FREE_HEADS, _NGRAM, _SUFFIX = int(Source.FREE_HEADS), int(Source.NGRAM), int(Source.SUFFIX)
_CONTEXT = int(Source.CONTEXT)


def most_steps(max_depth: int, n: int, k: int, num_head_tokens: int) -> int:
    """Steps that all offers come to at most."""
    lookups = 1 + FOLLOWED_HEAD_TOKENS
    paths = (MAX_MATCHES + FOLLOWED_HEAD_TOKENS) * max_depth
    contexts = _MOST_CONTEXTS * _OFFERED_FOLLOWERS
    return paths + contexts + lookups * k * (n - 1) + num_head_tokens + 2 * FOLLOWED_HEAD_TOKENS


MOST_ROOTS = MAX_MATCHES + 1 + 1 + 1 + 2 * FOLLOWED_HEAD_TOKENS


@inner
def _add(
    steps: Ints, rates: Floats, step: int, token: int, source: int, cell: int, rate: float
) -> None:
    """A step that nothing follows so far."""
    steps[step, TOKEN], steps[step, SOURCE], steps[step, CELL] = token, source, cell
    steps[step, BELOW], steps[step, NUM_BELOW] = 0, 0
    rates[step] = rate


@inner
def _add_path(
    steps: Ints,
    rates: Floats,
    at: int,
    cells: Floats,
    path: Ints,
    match_length: int,
    support: float,
    alternative: bool,
) -> int:
    """What followed an earlier occurrence of the text's end.

    match_length: how many tokens before it matched. support: share of the path's first token
    among what followed the bonus token so far. alternative: a longer match is followed by
    another token. Returns the number of steps.
    """
    for index in range(len(path)):
        if index == 0:
            cell = match_cell(match_length, support, alternative)
        else:
            cell = continued_match_cell(match_length + index)
            steps[at + index - 1, BELOW], steps[at + index - 1, NUM_BELOW] = at + index, 1
        _add(steps, rates, at + index, path[index], _SUFFIX, cell, cells[cell, RATE])
    return at + len(path)


@inner
def _add_ngrams(
    steps: Ints,
    rates: Floats,
    at: int,
    cells: Floats,
    ngrams: Ints,
    rows: Ints,
    total: int,
    max_depth: int,
    learned: bool,
) -> int:
    """N-grams that begin with one token, grouped by shared prefixes, into one offer.

    rows: the n-grams, ranked. total: how often that token began an n-gram, the unlisted ones
    included. learned: False takes a token's share at face value. Groups stand in the order of
    their depth, the first at ``at``. Returns the number of steps.
    """
    last_depth = min(ngrams.shape[1] + COUNT - 1, max_depth)
    number = len(rows)
    # Groups to be opened: n-grams from, to, their depth, how often all, the step above.
    opened = np.empty((number * last_depth + 1, 5), np.int32)
    opened[0, 0], opened[0, 1], opened[0, 2], opened[0, 3], opened[0, 4] = 0, number, 0, total, -1
    num_opened, index = 1, 0
    rows = rows.copy()
    while index < num_opened:
        low, high, depth = opened[index, 0], opened[index, 1], opened[index, 2]
        group, above = at, opened[index, 4]
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
            if learned:
                cell = ngram_cell(frequency, rate, depth + 1)
                rate = cells[cell, RATE]
            _add(steps, rates, at, token, _NGRAM, cell, rate)
            if depth + 1 < last_depth:
                opened[num_opened, 0], opened[num_opened, 1] = low, shared
                opened[num_opened, 2], opened[num_opened, 3] = depth + 1, frequency
                opened[num_opened, 4] = at
                num_opened += 1
            at += 1
            low = shared
        if above >= 0:
            steps[above, BELOW], steps[above, NUM_BELOW] = group, at - group
        index += 1
    return at


@inner
def _offer_after(
    steps: Ints,
    rates: Floats,
    at: int,
    roots: Ints,
    num_roots: int,
    cells: Floats,
    text: Ints,
    end: int,
    matches: Ints,
    ngrams: Ints,
    rows: Ints,
    total: int,
    max_depth: int,
) -> tuple[int, int]:
    """What the text says may follow a token: continuations of matches, and n-grams."""
    for rank in range(len(matches)):
        path = continuation(text, end, matches[rank, 1], max_depth)
        seen = 0
        for place in range(len(rows)):
            if ngrams[rows[place], 1] == path[0]:
                seen += ngrams[rows[place], COUNT]
        support = seen / total if total > 0 else 0.0
        roots[num_roots, 0], roots[num_roots, 1] = at, 1
        num_roots += 1
        at = _add_path(steps, rates, at, cells, path, matches[rank, 0], support, rank > 0)
    if len(rows) > 0:
        root = at
        at = _add_ngrams(steps, rates, at, cells, ngrams, rows, total, max_depth, True)
        size = steps[root, BELOW] - root if steps[root, NUM_BELOW] > 0 else at - root
        roots[num_roots, 0], roots[num_roots, 1] = root, size
        num_roots += 1
    return at, num_roots


@entry
def offer_text(
    text: Ints,
    edges: Ints,
    num_tokens: int,
    max_match: int,
    ngrams: Ints,
    firsts: Ints,
    k: int,
    cells: Floats,
    steps: Ints,
    rates: Floats,
    roots: Ints,
    token: int,
    max_depth: int,
    context_keys: Longs,
    contexts: Ints,
    followers: Weights,
    context_counts: Ints,
    recent: Ints,
    least_chance: float,
    noise_kind: int,
    keys: Keys,
) -> tuple[int, int]:
    """What the text offers behind ``token``, its last; (steps, roots).

    num_tokens: of the indexed text. max_match, k: 0 for no continuations, no n-grams.
    context_keys, contexts, followers, context_counts, recent: the arrays of a
    :class:`ContextTable`, which offers nothing where it is empty or there is no noise.
    least_chance: of paths that contexts are looked up for.
    """
    matches = find_matches(text, edges, num_tokens, max_match, MAX_MATCHES)
    rows = ranked(ngrams, firsts, k, token)
    total = firsts[first_row(firsts, token), TOTAL]
    at, num_roots = _offer_after(
        steps,
        rates,
        0,
        roots,
        0,
        cells,
        text,
        num_tokens,
        matches,
        ngrams,
        rows,
        total,
        max_depth,
    )
    if noise_kind != NO_NOISE and len(context_keys) > 0:
        end, size = _add_contexts(
            steps,
            rates,
            at,
            cells,
            context_keys,
            contexts,
            followers,
            context_counts,
            recent,
            max_depth,
            max(least_chance, _LEAST_OPENED),
            noise_kind,
            keys,
        )
        if size > 0:
            roots[num_roots, 0], roots[num_roots, 1] = at, size
            at, num_roots = end, num_roots + 1
    return at, num_roots


@inner
def _add_contexts(
    steps: Ints,
    rates: Floats,
    at: int,
    cells: Floats,
    context_keys: Longs,
    contexts: Ints,
    followers: Weights,
    context_counts: Ints,
    recent: Ints,
    max_depth: int,
    least_chance: float,
    noise_kind: int,
    keys: Keys,
) -> tuple[int, int]:
    """What followed the newest tokens before, the likeliest paths opened first, as one offer.

    Returns the number of steps, and the size of the first group, which stands at ``at``.
    """
    # Of every step: the step above (-1: none), its depth, its path's chance until it is opened.
    first, most = at, _MOST_CONTEXTS * _OFFERED_FOLLOWERS
    above, depths = np.empty(most, np.int32), np.empty(most, np.int32)
    paths = np.empty(most)
    found, shares = np.empty(MOST_FOLLOWERS, np.int32), np.empty(MOST_FOLLOWERS)
    newest = recent.copy()
    opened, depth, path, root_size = -1, 0, 1.0, 0
    for context in range(_MOST_CONTEXTS):
        number = mix_followers(
            context_keys, contexts, followers, context_counts, newest, found, shares
        )
        key = position_key(noise_kind, keys, depth)
        number = likeliest_followers(found, shares, number, noise_kind, key, _OFFERED_FOLLOWERS)
        if context == 0:
            root_size = number
        elif number > 0:
            steps[opened, BELOW], steps[opened, NUM_BELOW] = at, number
        for place in range(number):
            cell = context_cell(shares[place], depth + 1)
            rate = cells[cell, RATE]
            _add(steps, rates, at, found[place], _CONTEXT, cell, rate)
            above[at - first], depths[at - first] = opened, depth + 1
            paths[at - first] = path * rate
            at += 1
        best, path = -1, least_chance
        for step in range(at - first):
            if paths[step] > path and depths[step] < max_depth:
                best, path = step, paths[step]
        if best < 0:
            break
        paths[best] = 0.0
        opened, depth = first + best, depths[best]
        order, step = 0, opened
        while order < len(newest) and step >= 0:
            newest[order] = steps[step, TOKEN]
            order, step = order + 1, above[step - first]
        for older in range(len(newest) - order):
            newest[order + older] = recent[older]
    return at, root_size


@inner
def _add_heads(
    steps: Ints,
    rates: Floats,
    at: int,
    cells: Floats,
    tokens: Ints,
    probabilities: Floats,
    below: Ints,
    own_depths: int,
    widths: Ints,
    learned: bool,
    noise_kind: int,
    keys: Keys,
) -> int:
    """What heads propose (:class:`HeadProposals`) as one offer; its first group is row 0.

    own_depths: that draft passes speak for, 0 for free heads. widths: the most tokens that each
    depth offers; depths beyond offer nothing. learned: False takes the probabilities at face
    value. The noise turns what a draft pass says of its token
    into the chance that it is drawn. Returns the number of steps.
    """
    num_rows, width = tokens.shape
    groups = np.zeros((num_rows, 3), np.int32)  # of each row: depth (0: not reached), first, size
    groups[0, 0] = 1
    end = at
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
        if own_depths > 0:
            source = _SELF if depth <= own_depths else _HEADS
        key = position_key(noise_kind, keys, depth - 1)
        for place in range(groups[row, 2]):
            token, probability = tokens[row, place], probabilities[row, place]
            if noise_kind != NO_NOISE and source == _SELF:
                probability = chance(probability, exponential(noise_kind, key, token))
            cell, rate = NO_CELL, probability
            if learned:
                cell = head_cell(source, probability, depth)
                rate = cells[cell, RATE]
            _add(steps, rates, at, token, source, cell, rate)
            if depth < len(widths) and below[row, place] > row:
                steps[at, BELOW] = groups[below[row, place], 1]
                steps[at, NUM_BELOW] = groups[below[row, place], 2]
            at += 1
    return at


@entry
def offer_heads(
    text: Ints,
    edges: Ints,
    num_tokens: int,
    max_match: int,
    ngrams: Ints,
    firsts: Ints,
    k: int,
    cells: Floats,
    steps: Ints,
    rates: Floats,
    roots: Ints,
    num_steps: int,
    num_roots: int,
    tokens: Ints,
    probabilities: Floats,
    below: Ints,
    own_depths: int,
    sees_noise: bool,
    max_depth: int,
    noise_kind: int,
    keys: Keys,
) -> int:
    """Adds to what the text offers the heads, and what the text says may follow their first
    tokens; returns the number of roots.

    tokens, probabilities, below: the arrays of :class:`HeadProposals`. own_depths: that draft
    passes speak for, 0 for free heads.
    """
    free = own_depths == 0
    num_rows, width = tokens.shape
    # No path is deeper than there are rows.
    widths = np.full(min(max_depth, num_rows), width, np.int32)
    root, at = num_steps, num_steps
    at = _add_heads(
        steps,
        rates,
        at,
        cells,
        tokens,
        probabilities,
        below,
        own_depths,
        widths,
        True,
        noise_kind,
        keys,
    )
    first_size = 0
    while first_size < width and tokens[0, first_size] >= 0:
        first_size += 1
    roots[num_roots, 0], roots[num_roots, 1] = root, first_size
    num_roots += 1
    if max_depth < 2:
        return num_roots

    weighs = noise_kind != NO_NOISE and not (free and sees_noise)
    chances = probabilities[0, :first_size].copy()
    if weighs:
        key = position_key(noise_kind, keys, 0)
        for place in range(first_size):
            noise = exponential(noise_kind, key, tokens[0, place])
            if free:
                chances[place] = weighed(chances[place], noise)
            else:
                chances[place] = chance(chances[place], noise)
    for rank in range(min(FOLLOWED_HEAD_TOKENS, first_size)):
        best = np.argmax(chances) if weighs else rank
        likely, token = chances[best], tokens[0, best]
        chances[best] = -1.0
        if likely < _FOLLOWED_HEAD_PROBABILITY:
            continue
        # The text as if the token were its last.
        end = num_tokens + 1
        text[end] = token
        matches = find_matches(text, edges, end, max_match, 1)
        rows = ranked(ngrams, firsts, k, token)
        total = firsts[first_row(firsts, token), TOTAL]
        first_after = num_roots
        at, num_roots = _offer_after(
            steps,
            rates,
            at,
            roots,
            num_roots,
            cells,
            text,
            end,
            matches,
            ngrams,
            rows,
            total,
            max_depth - 1,
        )
        for offer in range(first_after, num_roots):
            # The token claims nothing of its own: whoever offers it is continued by this.
            at = _put_below(steps, rates, at, roots[offer], token)
    return num_roots


@inner
def _put_below(steps: Ints, rates: Floats, at: int, root: Ints, token: int) -> int:
    """Puts an offer below a token that it does not offer itself."""
    _add(steps, rates, at, token, _UNKNOWN, NO_CELL, 0.0)
    steps[at, BELOW], steps[at, NUM_BELOW] = root[0], root[1]
    root[0], root[1] = at, 1
    return at + 1


@entry
def offer_paper(
    ngrams: Ints,
    firsts: Ints,
    k: int,
    cells: Floats,
    steps: Ints,
    rates: Floats,
    roots: Ints,
    tokens: Ints,
    probabilities: Floats,
    below: Ints,
    widths: Ints,
    keys: Keys,
) -> int:
    """What the paper drafts: the first tokens of a draft pass and its heads, ``widths`` of each
    depth, and the n-grams that begin with ``argmax p_0``; all at face value. Returns the roots.
    """
    at = _add_heads(
        steps,
        rates,
        0,
        cells,
        tokens,
        probabilities,
        below,
        1,
        widths,
        False,
        NO_NOISE,
        keys,
    )
    roots[0, 0], roots[0, 1] = 0, min(widths[0], tokens.shape[1])
    first = tokens[0, 0]
    rows = ranked(ngrams, firsts, k, first)
    if len(rows) == 0:
        return 1
    total = firsts[first_row(firsts, first), TOTAL]
    root = at
    at = _add_ngrams(
        steps,
        rates,
        at,
        cells,
        ngrams,
        rows,
        total,
        ngrams.shape[1] + COUNT - 1,
        False,
    )
    roots[1, 0] = root
    roots[1, 1] = steps[root, BELOW] - root if steps[root, NUM_BELOW] > 0 else at - root
    _put_below(steps, rates, at, roots[1], first)
    return 2


@inner
def learn(cells: Floats, steps: Ints, roots: Ints, num_roots: int, tokens: Ints) -> None:
    """Follows the tokens that came through every offer; each step on the way had its chance."""
    for offer in range(num_roots):
        first, size = roots[offer, 0], roots[offer, 1]
        for token in tokens:
            below, num_below = 0, 0
            for step in range(first, first + size):
                accepted = steps[step, TOKEN] == token
                if steps[step, CELL] != NO_CELL:
                    observe(cells, steps[step, CELL], accepted)
                if accepted:
                    below, num_below = steps[step, BELOW], steps[step, NUM_BELOW]
            if num_below == 0:
                break
            first, size = below, num_below


@entry
def longest_path(steps: Ints, roots: Ints, num_roots: int, tokens: Ints) -> int:
    """How many of the ``tokens`` some offers hold, from the first without a gap."""
    groups = roots[:num_roots].copy()
    for depth in range(len(tokens)):
        found = False
        for offer in range(num_roots):
            below, num_below = 0, 0
            for step in range(groups[offer, 0], groups[offer, 0] + groups[offer, 1]):
                if steps[step, TOKEN] == tokens[depth]:
                    found = True
                    below, num_below = steps[step, BELOW], steps[step, NUM_BELOW]
            groups[offer, 0], groups[offer, 1] = below, num_below
        if not found:
            return depth
    return len(tokens)
