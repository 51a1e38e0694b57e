"""Host time of drafting's look-ups and of planning, by length of the text.

One iteration commits the tokens that a step emitted and looks up both structures; neither
may cost more on a long text than on a short one:

    python benchmarks/lookup.py OUT.json [--iterations 300] [--touch-mb 64]

Columns, in microseconds of CPU time per iteration (median): ``extend`` of the n-gram table
and the suffix index by ``emitted`` tokens, ``look-up`` in both (longest matches with their
continuations, top-k n-grams), their sum, ``plan``: a whole planned iteration (learning,
extending, proposals, a tree), and ``heads``: one of sampled text with heads.
There planning runs twice, before it is known what heads say and after, looks at the noise of
the coming positions, heads propose 8 tokens below each of 5 paths, and what the verify pass found
likeliest is learned, 4 tokens at each node of the tree before. ``nodes``: of a tree at most; 63 are
what an engine drafts by default.

--touch-mb: memory written to before every iteration, as a model's pass on the same CPU would,
so that nothing is found in the caches.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.draft.gumbel_noise import MURMUR, GumbelNoise
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlannedRequest, Planner
from vllm_tokenswift.draft.proposals.head_proposals import NO_ROW, HeadProposals
from vllm_tokenswift.draft.proposals.ngram_table import NgramTable
from vllm_tokenswift.draft.proposals.suffix_index import SuffixIndex
from vllm_tokenswift.draft.top_tokens import NO_TOKEN, TOP_K, TOP_K_COLUMNS, VerifyTopK
from vllm_tokenswift.draft.warm_up import warm_up
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree

LENGTHS = (1_000, 10_000, 100_000)
NODES = (32, 64)
# Flat up to there, so that the planner takes every node that it can get.
COST = CostModel(verify_points=((1, 7.0), (1 + NODES[-1], 7.1)), heads_ms=0.05)


def looping_text(num_tokens: int) -> list[int]:
    """A loop of 200 tokens in which one token in 50 is something else."""
    rng = random.Random(1)
    loop = [rng.randrange(49_152) for _ in range(200)]
    return [
        rng.randrange(49_152) if rng.random() < 0.02 else loop[i % len(loop)]
        for i in range(num_tokens)
    ]


def varied_text(num_tokens: int) -> list[int]:
    """Tokens of Zipfian frequency, each likely to be followed by one of a few."""
    rng = random.Random(2)
    token, text = 0, []
    for _ in range(num_tokens):
        if rng.random() < 0.5:
            token = int(49_152 ** rng.random()) - 1
        else:
            token = (token * 31 + rng.randrange(3)) % 49_152
        text.append(token)
    return text


TEXTS = {"looping": (looping_text, 8), "varied": (varied_text, 2)}


# Chances of the tokens that heads propose below a path, and the paths they go on with.
HEAD_CHANCES = (0.5, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01)
PATHS_BELOW = ((1, 2), (3, 4), (), (), ())


def heads_at(text: list[int], position: int) -> HeadProposals:
    """Heads that know the next two tokens of the text, among others."""
    rng = random.Random(position)
    rows = [[rng.randrange(49_152) for _ in HEAD_CHANCES] for _ in PATHS_BELOW]
    for row, token in zip(rows[:2], text[position : position + 2], strict=False):
        row[0] = token
    below = [[*rows_below, *[NO_ROW] * (8 - len(rows_below))] for rows_below in PATHS_BELOW]
    chances = [list(HEAD_CHANCES) for _ in PATHS_BELOW]
    return HeadProposals(rows, chances, free=True, below=below, sees_noise=True)


def verified_at(tree: DraftTree, tokens: list[int]) -> VerifyTopK:
    """At each node the target's likeliest is the draft after next, and three others follow."""
    rng = random.Random(tokens[0])
    top_k = np.full((len(tree) + 1, TOP_K_COLUMNS), NO_TOKEN, np.int32)
    top_k[:, :4] = [[rng.randrange(49_152) for _ in range(4)] for _ in top_k]
    top_k[: len(tree), 0] = tree.tokens
    top_k[:, TOP_K : TOP_K + 4] = np.array([0.7, 0.1, 0.1, 0.1], "f4").view("i4")
    return VerifyTopK(tree, top_k)


def noise_at(position: int) -> GumbelNoise:
    return GumbelNoise(MURMUR, lambda _: np.array([7, position], np.uint64))


class Iterations:
    """Planned iterations of one request at the end of a text."""

    def __init__(self, history: list[int], nodes: int, sampled: bool) -> None:
        self.nodes = nodes
        self.state = DraftState(sampled=sampled)
        self.state.append_tokens(history)
        self.planner = Planner(COST)
        self.tree = EMPTY_TREE

    def plan(self, tokens: list[int]) -> None:
        self.state.append_tokens(tokens)
        self.planner.plan([PlannedRequest(self.state, None, self.state.num_tokens, self.nodes)])

    def plan_with_heads(
        self, tokens: list[int], heads: HeadProposals, verified: VerifyTopK
    ) -> None:
        self.state.append_tokens(tokens, verified)
        position = self.state.num_tokens
        request = PlannedRequest(self.state, None, position, self.nodes, noise=noise_at(position))
        self.planner.wants_free_heads(self.planner.plan_step([request]))
        [self.tree] = self.planner.plan([replace(request, heads=heads)])


def measure(
    text: list[int], emitted: int, nodes: int, iterations: int, touched: npt.NDArray[np.uint8]
) -> dict[str, float]:
    """Median microseconds per iteration at the end of ``text``."""
    history = len(text) - iterations * emitted
    table, suffix = NgramTable(), SuffixIndex()
    for index in (table, suffix):
        index.append_tokens(np.array(text[:history], np.int32))
    plain, with_heads = (Iterations(text[:history], nodes, sampled) for sampled in (False, True))
    times: dict[str, list[float]] = {"extend": [], "lookup": [], "plan": [], "heads": []}

    def timed(column: str, work: Callable[[], object]) -> None:
        touched[:] += 1
        began = time.process_time_ns()
        work()
        times[column].append((time.process_time_ns() - began) / 1e3)

    def extend(tokens: list[int]) -> None:
        new = np.array(tokens, np.int32)
        table.append_tokens(new)
        suffix.append_tokens(new)

    def look_up(token: int) -> None:
        for match in suffix.match(3):
            suffix.continuation(match, 16)
        table.lookup(token)

    for start in range(history, len(text), emitted):
        tokens = text[start : start + emitted]
        heads = heads_at(text, start + emitted)
        timed("extend", partial(extend, tokens))
        timed("lookup", partial(look_up, tokens[-1]))
        timed("plan", partial(plain.plan, tokens))
        verified = verified_at(with_heads.tree, tokens)
        timed("heads", partial(with_heads.plan_with_heads, tokens, heads, verified))
    both = [e + lo for e, lo in zip(times["extend"], times["lookup"], strict=True)]
    return {
        "extend_us": statistics.median(times["extend"]),
        "lookup_us": statistics.median(times["lookup"]),
        "extend_and_lookup_us": statistics.median(both),
        "plan_us": statistics.median(times["plan"]),
        "plan_with_heads_us": statistics.median(times["heads"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="where to write the record")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--touch-mb", type=int, default=0)
    arguments = parser.parse_args()
    warm_up("auto")
    touched = np.zeros(arguments.touch_mb << 20, np.uint8)
    rows = []
    columns = ("tokens", "emitted", "nodes", "extend", "look-up", "both", "plan", "heads")
    print("text    ", *(f"{column:>7}" for column in columns))
    for nodes in NODES:
        for name, (make, emitted) in TEXTS.items():
            for length in LENGTHS:
                times = measure(make(length), emitted, nodes, arguments.iterations, touched)
                row = {"text": name, "tokens": length, "emitted": emitted, "nodes": nodes}
                rows.append(row | times)
                print(
                    f"{name:8} {length:7} {emitted:7} {nodes:7}",
                    *(f"{us:7.1f}" for us in times.values()),
                )
    record = {
        "python": platform.python_version(),
        "machine": platform.processor(),
        "touched_mb": arguments.touch_mb,
        "rows": rows,
    }
    arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
