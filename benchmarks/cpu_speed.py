"""Speed on this machine: plain vLLM, vLLM's own n-gram drafting and TokenSwift.

TokenSwift takes two turns, with the demo model's heads and without them, from the same seeds.

    python -m benchmarks.cpu_speed [--repeats 5] [--tokens 1500]
        [--engines plain tokenswift ...] [--texts greedy penalty ...]

Ratios in one run: all engines are kept, and take turns text by text, in one order and back,
so that a slow minute of the machine hits all of them; a ratio is of two turns of one round,
and the median over the rounds is reported, with its spread. Each round has a seed of its own:
texts differ in what can be foretold of them, and in bfloat16 also between engines. vLLM's
default compilation.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from typing import Any

from benchmarks import record
from benchmarks.long_generation import NGRAM
from benchmarks.prompts import NUMBERS, STORY
from vllm_tokenswift.demo import model as demo_model
from vllm_tokenswift.demo.engine_process import EngineProcess
from vllm_tokenswift.demo.measures import distinct
from vllm_tokenswift.demo.texts import PENALISED, WINDOWED_PENALTY, TextRequest, Written

ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"logits_processors": [WINDOWED_PENALTY]},
    "ngram": {"speculative_config": NGRAM},
    "no heads": {"speculative_config": {"method": "tokenswift"}},
    "tokenswift": {"speculative_config": {"method": "tokenswift", "heads": demo_model.HEADS}},
}


def texts(num_tokens: int, seed: int) -> list[TextRequest]:
    length = {"max_tokens": num_tokens, "ignore_eos": True}
    short = {"max_tokens": num_tokens // 2, "ignore_eos": True}
    return [
        TextRequest("greedy story", STORY, {"temperature": 0.0, **length}),
        TextRequest("sampled, windowed penalty 1.1", STORY, {**PENALISED, "seed": seed, **length}),
        TextRequest("sampled at temperature 1", STORY, {"temperature": 1.0, "seed": seed, **short}),
        TextRequest("random numbers", NUMBERS, {"temperature": 1.0, "seed": seed, **short}),
    ]


def writes(engine: str, text: TextRequest) -> bool:
    # vLLM's ngram method has neither min-p nor the windowed penalty.
    return engine != "ngram" or "extra_args" not in text.sampling


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--texts", nargs="+", default=[""], help="parts of their names")
    parser.add_argument("--model", help="a copy of the embedded model")
    arguments = parser.parse_args()
    engine = {
        "model": arguments.model or str(demo_model.prepare()),
        "dtype": "bfloat16",
        "max_model_len": arguments.tokens + 512,
    }
    if "plain" not in arguments.engines:
        parser.error("--engines needs plain: every ratio is of its speed")

    def asked(seed: int) -> list[TextRequest]:
        every = texts(arguments.tokens, seed)
        return [text for text in every if any(part in text.name for part in arguments.texts)]

    runs: dict[str, dict[str, list[Written]]] = {}
    with contextlib.ExitStack() as engines:
        kept = {}
        for name in arguments.engines:
            print(f"starting {name}", flush=True)
            kept[name] = engines.enter_context(EngineProcess({**engine, **ENGINES[name]}))
            kept[name].warm_up([text for text in asked(0) if writes(name, text)])
        for repeat in range(arguments.repeats):
            for text in asked(seed=1 + repeat):
                for name in sorted(kept, reverse=bool(repeat % 2)):
                    if not writes(name, text):
                        continue
                    print(f"repeat {repeat + 1} of {arguments.repeats}: {name}", flush=True)
                    [written] = kept[name].write_texts([text])
                    runs.setdefault(text.name, {}).setdefault(name, []).append(written)
    results = [_result(text, by_engine) for text, by_engine in runs.items()]
    table = _table(results)
    print(table)
    path = record.write("cpu_speed", {**record.surroundings(), "results": results}, table)
    print(f"written to {path.name}")
    return 0


def _result(text: str, by_engine: dict[str, list[Written]]) -> dict[str, Any]:
    rates = {name: [w.tokens_per_second for w in all_] for name, all_ in by_engine.items()}
    ratios = {
        name: [rate / plain for rate, plain in zip(rates[name], rates["plain"], strict=True)]
        for name in rates
    }
    drafting = {name: all_ for name, all_ in by_engine.items() if all_[0].stats}
    return {
        "text": text,
        "tokens_per_second": rates,
        "speed_up": ratios,
        "distinct_4": {
            name: [distinct(written.tokens, 4) for written in all_]
            for name, all_ in drafting.items()
        },
        "tokens_per_iteration": {
            name: [
                written.stats["num_emitted_tokens"] / written.stats["num_iterations"]
                for written in all_
            ]
            for name, all_ in drafting.items()
        },
        "stats": {name: [written.stats for written in all_] for name, all_ in drafting.items()},
    }


def _table(results: list[dict[str, Any]]) -> str:
    rows = []
    for result in results:
        for engine, ratios in result["speed_up"].items():
            rates = result["tokens_per_second"][engine]
            rows.append(
                [
                    result["text"],
                    engine,
                    f"{statistics.median(rates):.1f}",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    *(
                        f"{statistics.median(result[key][engine]):.{digits}f}"
                        if engine in result[key]
                        else ""
                        for key, digits in (("tokens_per_iteration", 2), ("distinct_4", 3))
                    ),
                ]
            )
    header = ["text", "engine", "tokens/s", "times plain (range)", "tokens/iteration", "Distinct-4"]
    return record.markdown(header, rows)


if __name__ == "__main__":
    sys.exit(main())
