"""Host time of drafting's look-ups and of planning, by length of the text.

One iteration commits the tokens that a step emitted and looks up both structures; neither
may cost more on a long text than on a short one:

    python benchmarks/lookup.py OUT.json [--iterations 300]

Columns, in microseconds of CPU time per iteration (median): ``extend`` of the n-gram table
and the suffix index by ``emitted`` tokens, ``look-up`` in both (longest matches with their
continuations, top-k n-grams), their sum, and ``plan``: a whole planned iteration (learning,
extending, offers, a tree of at most 64 nodes).
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from pathlib import Path

from vllm_tokenswift.draft.cost import CostModel
from vllm_tokenswift.draft.ngrams import NgramTable
from vllm_tokenswift.draft.planner import DraftRequest, Planner
from vllm_tokenswift.draft.state import DraftState
from vllm_tokenswift.draft.suffix import SuffixIndex

LENGTHS = (1_000, 10_000, 100_000)
NODE_BUDGET = 64
# Flat up to the budget, so that the planner takes every node that it can get.
COST = CostModel(verify_points=((1, 7.0), (1 + NODE_BUDGET, 7.1)))


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


def measure(text: list[int], emitted: int, iterations: int) -> dict[str, float]:
    """Median microseconds per iteration at the end of ``text``."""
    history = len(text) - iterations * emitted
    table, suffix, state = NgramTable(), SuffixIndex(), DraftState()
    for part in (table, suffix, state):
        part.extend(text[:history])
    planner = Planner(COST)
    extend_us, lookup_us, plan_us = [], [], []
    for start in range(history, len(text), emitted):
        tokens = text[start : start + emitted]
        began = time.process_time()
        table.extend(tokens)
        suffix.extend(tokens)
        extended = time.process_time()
        for match in suffix.match(3):
            suffix.continuation(match, 16)
        table.lookup(tokens[-1])
        looked_up = time.process_time()
        state.extend(tokens)
        planner.plan([DraftRequest(state, None, start + emitted, NODE_BUDGET)])
        planned = time.process_time()
        extend_us.append((extended - began) * 1e6)
        lookup_us.append((looked_up - extended) * 1e6)
        plan_us.append((planned - looked_up) * 1e6)
    both = [e + lo for e, lo in zip(extend_us, lookup_us, strict=True)]
    return {
        "extend_us": statistics.median(extend_us),
        "lookup_us": statistics.median(lookup_us),
        "extend_and_lookup_us": statistics.median(both),
        "plan_us": statistics.median(plan_us),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path, help="where to write the record")
    parser.add_argument("--iterations", type=int, default=100)
    arguments = parser.parse_args()
    rows = []
    columns = ("tokens", "emitted", "extend", "look-up", "both", "plan")
    print("text    ", *(f"{column:>7}" for column in columns))
    for name, (make, emitted) in TEXTS.items():
        for length in LENGTHS:
            times = measure(make(length), emitted, arguments.iterations)
            rows.append({"text": name, "tokens": length, "emitted": emitted, **times})
            print(f"{name:8} {length:7} {emitted:7}", *(f"{us:7.1f}" for us in times.values()))
    record = {"python": platform.python_version(), "machine": platform.processor(), "rows": rows}
    arguments.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
