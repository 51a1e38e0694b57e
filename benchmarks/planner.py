"""Is the planner as fast as the best fixed mode, and never slower than plain vLLM?

    python -m benchmarks.planner [--batches 1 4 16] [--tokens 400] [--repeats 3]
        [--texts story penalty ...] [--modes plain auto fixed ...]

Five kinds of text at three batch sizes, written by plain vLLM, by TokenSwift as it plans for
itself ("auto") and by its fixed modes. Ratios in one run: the engines take turns, one process
each and repeat, so that a slow minute of the machine hits all of them; medians over the
repeats, with their range. bfloat16 and vLLM's default compilation.

The best fixed mode is the one with the best median, chosen for each text and batch after the
fact: no mode that anybody could have set beforehand is as good on all of them. Fixed modes
draft ``--nodes`` nodes every time; "auto" may draft up to the default.

The record also holds how fast the planner follows a text that changes kind half-way
(benchmarks/change.py).
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import change, record
from benchmarks.prompts import CODE, RANDOM_NUMBERS, STORIES
from vllm_tokenswift import demo_model
from vllm_tokenswift.demo.engine_process import run_batches
from vllm_tokenswift.demo.measures import distinct
from vllm_tokenswift.demo.texts import PENALISED, WINDOWED_PENALTY, Batch, TextRequest, WrittenBatch
from vllm_tokenswift.options import TokenSwiftOptions

GOAL = 0.97
PLAIN, AUTO = "plain", "auto"
_PROMPT_TOKENS = 256  # more than a prompt has in its chat template


@dataclass(frozen=True)
class Kind:
    """A kind of text: what it is called, its prompts, one for each request of a batch, and
    how it is sampled."""

    label: str
    prompts: tuple[str, ...]
    sampling: dict[str, Any]


KINDS = {
    "story": Kind("greedy story", STORIES, {"temperature": 0.0}),
    "penalty": Kind("sampled, windowed penalty 1.1", STORIES, PENALISED),
    "sampled": Kind("sampled at temperature 1", STORIES, {"temperature": 1.0}),
    "code": Kind("code, temperature 0.7", CODE, {"temperature": 0.7}),
    "numbers": Kind("random numbers", RANDOM_NUMBERS, {"temperature": 1.0}),
}

_ONE_PASS = {"plan": "fixed", "self_draft": "off"}
_NO_TABLE = {"ngram_k": 0}
_NO_SUFFIX = {"suffix_max_match": 0}
FIXED_MODES: dict[str, dict[str, Any]] = {
    "fixed": {"plan": "fixed"},
    "table": {**_ONE_PASS, **_NO_SUFFIX},
    "suffix": {**_ONE_PASS, **_NO_TABLE},
    "heads": {**_ONE_PASS, **_NO_TABLE, **_NO_SUFFIX},
    "self-draft": {"plan": "fixed", "self_draft": "always", **_NO_TABLE, **_NO_SUFFIX},
    "paper": {"plan": "paper"},
}
"""Options of each; "heads", "fixed", "self-draft" and "paper" get the heads too."""
_WITHOUT_HEADS = ("table", "suffix")
# A draft pass reads less than a plain step only once the text is longer than its budget.
_LONG_MODES = ("self-draft", "paper")


def modes_for(num_tokens: int, heads: str | None) -> list[str]:
    """The modes that mean something for texts of this length."""
    long = num_tokens > TokenSwiftOptions().budget_tokens
    fixed = [
        mode
        for mode in FIXED_MODES
        if (long or mode not in _LONG_MODES) and (heads or mode != "heads")
    ]
    return [PLAIN, AUTO, *fixed]


def engine_of(mode: str, heads: str | None, nodes: int) -> dict[str, Any]:
    """Arguments of ``LLM`` that make it this mode."""
    if mode == PLAIN:
        return {"logits_processors": [WINDOWED_PENALTY]}
    options: dict[str, Any] = {"method": "tokenswift"}
    if heads and mode not in _WITHOUT_HEADS:
        options["heads"] = heads
    if mode != AUTO:
        options |= {"num_speculative_tokens": nodes, **FIXED_MODES[mode]}
    return {"speculative_config": options}


def batches(kinds: Sequence[str], sizes: Sequence[int], num_tokens: int) -> list[Batch]:
    """Every kind of text at every batch size; the seed is the request's place in its batch."""
    found = []
    for size in sizes:
        for name in kinds:
            kind = KINDS[name]
            length = {"max_tokens": num_tokens, "ignore_eos": True}
            requests = [
                TextRequest(
                    f"{name} {i}",
                    kind.prompts[i % len(kind.prompts)],
                    {**kind.sampling, "seed": i, **length},
                )
                for i in range(size)
            ]
            found.append(Batch(f"{name} x {size}", requests))
    return found


def summary(by_mode: dict[str, list[WrittenBatch]]) -> dict[str, Any]:
    """One kind of text at one batch size. by_mode: a written batch for each repeat."""
    rates = {mode: [w.tokens_per_second for w in all_] for mode, all_ in by_mode.items()}
    fixed = [mode for mode in rates if mode in FIXED_MODES]
    best = max(fixed, key=lambda mode: statistics.median(rates[mode])) if fixed else None
    against = {"plain": PLAIN} | ({"best fixed mode": best} if best else {})
    ratios = {
        name: [a / b for a, b in zip(rates[AUTO], rates[other], strict=True)]
        for name, other in against.items()
    }
    plain = rates[PLAIN]
    return {
        "tokens_per_second": rates,
        "times_plain": {
            mode: [a / b for a, b in zip(rate, plain, strict=True)] for mode, rate in rates.items()
        },
        "tokens_per_iteration": {
            mode: [w.stats["num_emitted_tokens"] / w.stats["num_iterations"] for w in by_mode[mode]]
            for mode in rates
            if mode != PLAIN
        },
        "best_fixed_mode": best,
        "auto_to": ratios,
        "reaches_goal": {name: statistics.median(r) >= GOAL for name, r in ratios.items()},
        "distinct_4": statistics.mean(distinct(t.tokens, 4) for t in by_mode[AUTO][0].texts),
        "stats": {mode: all_[0].stats for mode, all_ in by_mode.items() if mode != PLAIN},
    }


def table(results: list[dict[str, Any]]) -> str:
    """A row for each text and batch: rates over plain, and what "auto" reaches of the best."""
    modes = [mode for mode in (AUTO, *FIXED_MODES) if mode in results[0]["times_plain"]]
    header = [
        *("text", "Distinct-4", "batch", "plain tokens/s"),
        *(f"{mode}, times plain" for mode in modes),
        *("tokens/iteration (auto)", "best fixed", "auto / best fixed", f"at least {GOAL}"),
    ]
    rows = []
    for result in results:
        to_best = result["auto_to"].get("best fixed mode")
        rows.append(
            [
                result["text"],
                f"{result['distinct_4']:.2f}",
                str(result["batch"]),
                f"{statistics.median(result['tokens_per_second'][PLAIN]):.1f}",
                *(_with_range(result["times_plain"][mode]) for mode in modes),
                f"{statistics.median(result['tokens_per_iteration'][AUTO]):.2f}",
                result["best_fixed_mode"] or "",
                _with_range(to_best) if to_best else "",
                "yes" if all(result["reaches_goal"].values()) else "**no**",
            ]
        )
    return record.markdown(header, rows)


def _with_range(values: list[float]) -> str:
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16], help="batch sizes")
    parser.add_argument("--texts", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=[PLAIN, AUTO, *FIXED_MODES],
        help="plain and auto are always among them (default: all that mean something for "
        "texts of this length)",
    )
    parser.add_argument("--tokens", type=int, default=400, help="of each text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--nodes",
        type=int,
        default=32 if torch.cuda.is_available() else 8,
        help="draft nodes of the fixed modes (default: 32 on a GPU, 8 without)",
    )
    parser.add_argument("--model", help="another model than the embedded one")
    parser.add_argument("--heads", help="draft heads for it (default: the embedded model's)")
    arguments = parser.parse_args()

    heads = arguments.heads or (None if arguments.model else demo_model.HEADS)
    wanted = arguments.modes or modes_for(arguments.tokens, heads)
    modes = list(dict.fromkeys([PLAIN, AUTO, *wanted]))
    if "heads" in modes and not heads:
        parser.error("--modes heads needs --heads: there are none for this model")
    engine = {
        "model": arguments.model or str(demo_model.prepare()),
        "dtype": "bfloat16",
        "max_model_len": arguments.tokens + _PROMPT_TOKENS,
        "max_num_seqs": max(arguments.batches),
    }
    jobs = batches(arguments.texts, arguments.batches, arguments.tokens)
    runs: dict[str, dict[str, list[WrittenBatch]]] = {job.name: {} for job in jobs}
    for repeat in range(arguments.repeats):
        for mode in modes:
            print(f"repeat {repeat + 1} of {arguments.repeats}: {mode}", flush=True)
            settings = engine_of(mode, heads, arguments.nodes)
            for written in run_batches({**engine, **settings}, jobs):
                runs[written.name].setdefault(mode, []).append(written)
                print(f"  {mode}, {written.name}: {written.tokens_per_second:.1f} tokens/s")
    results = [
        {"text": KINDS[kind].label, "batch": size, **summary(runs[f"{kind} x {size}"])}
        for kind in arguments.texts
        for size in arguments.batches
    ]
    changes = change.measure()
    rendered = f"{table(results)}\n\n{change.table(changes)}"
    print(rendered)
    path = record.write(
        "planner", {**record.surroundings(), "results": results, "changes": changes}, rendered
    )
    print(f"written to {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
