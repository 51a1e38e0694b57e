"""Is the planner as fast as the best fixed mode, and never slower than plain vLLM?

    python -m benchmarks.planner [--batches 1 4 16] [--tokens 300 150 60] [--repeats 3]
        [--texts story penalty ...] [--modes plain auto fixed ...]

Five kinds of text at three batch sizes, written by plain vLLM, by TokenSwift as it plans for
itself ("auto") and by its fixed modes. Ratios in one run: engines are kept, of which
TokenSwift's changes its mode between batches (benchmarks/modes.py), and all modes take turns
text by text, in one order and back, so that a slow minute of the machine hits all of them;
medians over the repeats, with their range. Each repeat has seeds of its own, the same for all
modes. bfloat16 and vLLM's default compilation.

The best fixed mode is the one with the best median, chosen for each text and batch after the
fact: no mode that anybody could have set beforehand is as good on all of them. Fixed modes
draft ``--nodes`` nodes every time; "auto" may draft up to the default.

``--modes ... ngram`` adds vLLM's own n-gram speculation, in an engine of its own. It is no fixed
mode, and "auto" is not held against it. It refuses min-p and the windowed penalty, and writes the
text that is sampled with these with top-p 0.9 and vLLM's repetition penalty 1.1 instead
(``modes.ngram_sampling``): another text than the other modes write. The record says so. On a CPU
vLLM's top-p sorts the vocabulary, which counts against it there.

The record is written after every repeat. In the end it also holds how fast the planner follows
a text that changes kind half-way (benchmarks/change.py).

On a GPU the engines share its memory: two get 0.4 of it each, three 0.27. Another model is given
so (benchmarks/geometry.py):

    python -m benchmarks.planner --model MODEL --heads HEADS --tokens 500 300 200 \
        --engine '{"gpu_memory_utilization": 0.4}'
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import change, record
from benchmarks.modes import (
    AUTO,
    FIXED_MODES,
    NGRAM,
    PLAIN,
    batch_for,
    engines,
    engines_for,
    modes_for,
    ngram_sampling,
)
from benchmarks.prompts import CODE, RANDOM_NUMBERS, STORIES
from vllm_tokenswift.demo import model as demo_model
from vllm_tokenswift.demo.measures import distinct
from vllm_tokenswift.demo.texts import PENALISED, Batch, TextRequest, WrittenBatch

GOAL = 0.97
_WARM_UP_TOKENS = 8
_GPU_SHARES = {2: 0.4, 3: 0.27}  # by the number of engines
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


def batches(kinds: Sequence[str], num_tokens: Mapping[int, int], repeat: int) -> list[Batch]:
    """Every kind of text at every batch size.

    num_tokens: of each text, by batch size. The seeds are those of the repeat, one for each
    place in a batch.
    """
    return [
        Batch(
            _name(kind, size),
            [
                TextRequest(
                    f"{kind} {i}",
                    KINDS[kind].prompts[i % len(KINDS[kind].prompts)],
                    {
                        **KINDS[kind].sampling,
                        "seed": 1000 * repeat + i,
                        "max_tokens": length,
                        "ignore_eos": True,
                    },
                )
                for i in range(size)
            ],
        )
        for size, length in num_tokens.items()
        for kind in kinds
    ]


def _name(kind: str, size: int) -> str:
    return f"{kind} x {size}"


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
    # TokenSwift alone counts.
    counted = {mode: [w.stats for w in all_] for mode, all_ in by_mode.items() if all_[0].stats}
    return {
        "tokens_per_second": rates,
        "times_plain": {
            mode: [a / b for a, b in zip(rate, plain, strict=True)] for mode, rate in rates.items()
        },
        "tokens_per_iteration": {
            mode: [stats["num_emitted_tokens"] / stats["num_iterations"] for stats in all_]
            for mode, all_ in counted.items()
        },
        "best_fixed_mode": best,
        "auto_to": ratios,
        "reaches_goal": {name: statistics.median(r) >= GOAL for name, r in ratios.items()},
        "distinct_4": statistics.mean(distinct(t.tokens, 4) for t in by_mode[AUTO][0].texts),
        "stats": {mode: all_[0] for mode, all_ in counted.items()},
    }


def table(results: list[dict[str, Any]]) -> str:
    """A row for each text and batch: rates over plain, and what "auto" reaches of the best."""
    modes = [mode for mode in (AUTO, *FIXED_MODES, NGRAM) if mode in results[0]["times_plain"]]
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


def sampled_otherwise(kinds: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What ngram samples with, by label, in those kinds of text where it is something else."""
    nearest = {kind: ngram_sampling(KINDS[kind].sampling) for kind in kinds}
    return {
        KINDS[kind].label: sampling
        for kind, sampling in nearest.items()
        if sampling != KINDS[kind].sampling
    }


def _with_range(values: list[float]) -> str:
    middle = f"{statistics.median(values):.2f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def main() -> int:
    arguments = _arguments()
    modes = arguments.modes
    num_tokens = dict(zip(arguments.batches, arguments.tokens, strict=True))
    otherwise = sampled_otherwise(arguments.texts) if NGRAM in modes else {}
    engine = {
        **engine_arguments(arguments, max(arguments.tokens)),
        **({"gpu_memory_utilization": gpu_share(modes)} if torch.cuda.is_available() else {}),
        **arguments.engine,
    }
    surroundings = record.surroundings()
    runs: dict[str, dict[str, list[WrittenBatch]]] = {}

    def write(changes: list[dict[str, Any]]) -> None:
        results = [
            {
                "text": KINDS[kind].label,
                "batch": size,
                "tokens": length,
                **summary(runs[_name(kind, size)]),
            }
            for kind in arguments.texts
            for size, length in num_tokens.items()
        ]
        notes = [
            f'ngram writes "{text}" with {json.dumps(sampling)}: it has neither min-p nor the '
            "windowed penalty."
            for text, sampling in otherwise.items()
        ]
        rendered = "\n\n".join(
            [table(results), *notes, *([change.table(changes)] if changes else [])]
        )
        print(rendered, flush=True)
        found = {"results": results, "ngram_samples_with": otherwise, "changes": changes}
        path = record.write("planner", {**surroundings, **found}, rendered)
        print(f"written to {path.name}", flush=True)

    print("starting the engines", flush=True)
    with engines(engine, arguments.heads, modes, arguments.nodes) as in_mode:
        for mode in modes:
            print(f"warming up: {mode}", flush=True)
            first = batches(arguments.texts, num_tokens, repeat=0)
            in_mode(mode).warm_up_batches(
                [batch_for(mode, batch) for batch in first], _WARM_UP_TOKENS
            )
        for repeat in range(arguments.repeats):
            for job in batches(arguments.texts, num_tokens, repeat):
                for mode in modes[:: -1 if repeat % 2 else 1]:
                    [written] = in_mode(mode).write([batch_for(mode, job)])
                    runs.setdefault(job.name, {}).setdefault(mode, []).append(written)
                    print(
                        f"repeat {repeat + 1} of {arguments.repeats}: {job.name}, {mode}: "
                        f"{written.tokens_per_second:.1f} tokens/s",
                        flush=True,
                    )
            write(changes=[])
    write(change.measure())
    return 0


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """What is written, how many at a time, and by which model."""
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16], help="batch sizes")
    parser.add_argument("--texts", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--model", help="another model than the embedded one")
    parser.add_argument("--heads", help="draft heads for it (default: the embedded model's)")


def heads_of(arguments: argparse.Namespace) -> str | None:
    """The draft heads that were asked for."""
    return arguments.heads or (None if arguments.model else demo_model.HEADS)


def engine_arguments(arguments: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    """Arguments of ``LLM`` for what was asked for, in texts of at most ``num_tokens``."""
    return {
        "model": arguments.model or str(demo_model.prepare()),
        "dtype": "bfloat16",
        "max_model_len": num_tokens + _PROMPT_TOKENS,
        "max_num_seqs": max(arguments.batches),
    }


def gpu_share(modes: Sequence[str]) -> float:
    """Of a GPU's memory, for each of the engines that are kept for these modes."""
    return _GPU_SHARES[len(engines_for(modes, heads=None))]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_text_arguments(parser)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[300, 150, 60],
        help="of each text, for each batch size",
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=[PLAIN, AUTO, *FIXED_MODES, NGRAM],
        help="plain and auto are always among them; ngram is vLLM's own, in a third engine "
        "(default: all of TokenSwift's that mean something for texts of this length)",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--nodes",
        type=int,
        default=31 if torch.cuda.is_available() else 8,
        help="draft nodes of the fixed modes (default: 31 on a GPU, 8 without)",
    )
    parser.add_argument(
        "--engine",
        type=json.loads,
        default={},
        help="arguments of all engines, as JSON (on a GPU they get gpu_memory_utilization "
        f"{_GPU_SHARES[2]} each, or {_GPU_SHARES[3]} with ngram, unless it says otherwise)",
    )
    arguments = parser.parse_args()
    if len(arguments.tokens) != len(arguments.batches):
        parser.error(
            f"--tokens has {len(arguments.tokens)} lengths for {len(arguments.batches)} batch "
            "sizes: give one for each"
        )
    arguments.heads = heads_of(arguments)
    wanted = arguments.modes or modes_for(max(arguments.tokens), arguments.heads)
    arguments.modes = list(dict.fromkeys([PLAIN, AUTO, *wanted]))
    if "heads" in arguments.modes and not arguments.heads:
        parser.error("--modes heads needs --heads: there are none for this model")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
