"""Do steps take what the planner counted on?

    python -m benchmarks.step_costs [--batches 1 4 16] [--tokens 150] [--texts story penalty ...]
        [--model MODEL --heads HEADS]

Writes the planner benchmark's five kinds of text with TokenSwift as it plans for itself, and
compares each step with its plan: from the moment when a step's samples are known to the moment
when the next ones are. That is drafting, launching, the verify pass and its sampling: what
``StepPlan.step_ms`` foretells. What vLLM does for every step besides is in what steps take and
in no plan; steps that nobody planned show how much that is. Such a step counts as planned with
what a pass without drafts costs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks import record
from benchmarks.planner import add_text_arguments, batches, engine_arguments, heads_of
from benchmarks.watched_steps import Step, StepsOfAWorker
from vllm_tokenswift.demo.engine_process import EngineProcess

_WARM_UP_TOKENS = 30
_WIDTHS = (1, 4, 8, 16, 32, 64, 129)


def summary(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Steps of a kind together: how many, and the middle of what was planned and taken."""
    kinds: dict[tuple[Any, ...], list[Step]] = {}
    for step in steps:
        width = next(width for width in _WIDTHS if 1 + step["widest"] <= width)
        kinds.setdefault((step["requests"], step["what"], step["asked"], width), []).append(step)
    return [
        {
            **dict(zip(("requests", "what", "asked", "width"), kind, strict=True)),
            "steps": len(of_kind),
            **{
                name: median(step[name] for step in of_kind)
                for name in ("planned_ms", "took_ms", "host_ms", "nodes")
            },
        }
        for kind, of_kind in sorted(kinds.items())
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["requests", "step", "heads asked", "rows up to", "steps", "planned ms", "took ms"]
    return record.markdown(
        [*header, "took / planned", "samples to launch, ms", "nodes"],
        [
            [
                *(str(row[name]) for name in ("requests", "what", "asked", "width", "steps")),
                f"{row['planned_ms']:.2f}",
                f"{row['took_ms']:.2f}",
                f"{row['took_ms'] / row['planned_ms']:.2f}",
                f"{row['host_ms']:.2f}",
                f"{row['nodes']:g}",
            ]
            for row in rows
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_text_arguments(parser)
    parser.add_argument("--tokens", type=int, default=150, help="of each text")
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="arguments of the engine, as JSON"
    )
    arguments = parser.parse_args()
    engine = {**engine_arguments(arguments, arguments.tokens), **arguments.engine}
    surroundings = record.surroundings()
    heads = heads_of(arguments)
    rows = measured(engine, heads, arguments.texts, arguments.batches, arguments.tokens)
    rendered = table(rows)
    print(rendered)
    record.write("step_costs", {**surroundings, "steps": rows}, rendered)
    return 0


def measured(
    engine: Mapping[str, Any],
    heads: str | None,
    kinds: Sequence[str],
    sizes: Sequence[int],
    num_tokens: int,
) -> list[dict[str, Any]]:
    """The summary over all texts. Steps count whose batch is whole, and the next one's too."""
    own = {
        "speculative_config": {"method": "tokenswift", "heads": heads},
        "worker_extension_cls": f"{StepsOfAWorker.__module__}.{StepsOfAWorker.__name__}",
    }
    found: list[Step] = []
    with EngineProcess({**engine, **own}) as process:
        jobs = batches(kinds, dict.fromkeys(sizes, num_tokens), repeat=0)
        process.warm_up_batches(jobs, _WARM_UP_TOKENS)
        process.call("watch_steps")
        for job in jobs:
            process.write([job])
            [steps, *_] = process.call("steps_seen")
            whole = [step["requests"] == len(job.texts) for step in steps]
            found += [
                step
                for step, before, now in zip(steps[1:], whole, whole[1:], strict=False)
                if before and now
            ]
    return summary(found)


if __name__ == "__main__":
    sys.exit(main())
