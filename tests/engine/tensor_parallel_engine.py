"""An engine of some tensor-parallel ranks: ``MODEL HEADS SIZE OUT`` (see test_tensor_parallel.py).

A program of its own: vLLM forks its workers, and a test run that has used vLLM before would
give them locks that nobody lets go.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from engine_kit import engine, generate, prompt_of, tokenswift
from vllm import SamplingParams

PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=2, min_p=0.05, max_tokens=60, ignore_eos=True),
]


def write(model: str, heads: str, size: int) -> dict[str, Any]:
    """What it writes, alone and beside each other, and the counters of every rank."""
    arguments = tokenswift(plan="auto", heads=heads, head_source="free")
    if size > 1:
        arguments |= {"tensor_parallel_size": size, "distributed_executor_backend": "mp"}
    prompts = [prompt_of(20, 0), prompt_of(45, 1)]
    with engine(model, **arguments) as llm:
        texts = [generate(llm, [p], s)[0] for p, s in zip(prompts, PARAMS, strict=True)]
        texts += generate(llm, prompts, PARAMS)
        return {"texts": texts, "stats": llm.collective_rpc("tokenswift_stats")}


if __name__ == "__main__":
    model, heads, size, out = sys.argv[1:]
    Path(out).write_text(json.dumps(write(model, heads, int(size))))
