"""How often is the first token of a self-draft pass accepted, by context and by what it reads?

    python -m benchmarks.self_draft_acceptance MODEL [--contexts 1500 6000] [--tokens 150]
        [--budget 2048] [--dtype bfloat16]

Verification hides a broken drafter: the text is right whatever was drafted. So the passes are
asked for in every iteration, nothing else drafts, and what they bring is counted beside the most
that they can bring:

* ``full``: the pass reads the whole cache. It is the target's own next step, so all of its tokens
  are accepted, but for ties that a verify pass of two rows rounds otherwise than a pass of one;
* ``partial``: it reads ``--budget`` tokens of it (the paper's partial KV cache);
* ``partial, mode changed``: the same in an engine that plans for itself, whose mode was changed
  between requests as the planner's benchmark does it.

The context is Python source of the standard library, which the model goes on writing, greedily.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import record
from benchmarks.modes import ModesOfAWorker, options_of

# Drafts are those of the passes alone, one node each.
ONLY_PASSES: dict[str, Any] = {
    "plan": "fixed",
    "self_draft": "always",
    "heads": None,
    "ngram_k": 0,
    "suffix_max_match": 0,
}
NODES = 31  # of the engine that changes its mode, as in the planner's benchmark
MODE = "self-draft"  # the same options, by the name that benchmarks.modes gives them


def source_code() -> str:
    """Modules of the standard library, one after another: some 70,000 tokens."""
    import argparse
    import ast
    import tarfile
    import typing
    import zipfile

    modules = (argparse, ast, inspect, tarfile, zipfile, typing)
    return "".join(inspect.getsource(module) for module in modules)


def self_draft_counts(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, int]:
    """What the counters of one request say of its passes.

    Args:
        before, after: ``tokenswift_stats`` of a worker, before and after the request.

    Returns:
        Passes, selections of blocks, and drafted and accepted tokens of the passes.
    """

    def grown(name: str) -> int:
        return int(after[name] - before[name])

    def of_passes(name: str) -> int:
        return int(after[name].get("self", 0) - before[name].get("self", 0))

    return {
        "iterations": grown("num_iterations"),
        "passes": grown("num_draft_passes"),
        "selections": grown("num_selections"),
        "drafted": of_passes("drafted_by_source"),
        "accepted": of_passes("accepted_by_source"),
    }


def engines(budget: int) -> list[tuple[str, dict[str, Any]]]:
    """The engines to be measured: what their passes read, and arguments of ``LLM``."""
    partial = {**ONLY_PASSES, "budget_tokens": budget}
    return [
        ("full", {"speculative_config": {**ONLY_PASSES, "partial_kv": "full"}}),
        ("partial", {"speculative_config": partial}),
        (
            "partial, mode changed",
            {
                "speculative_config": {"budget_tokens": budget},
                "worker_extension_cls": f"{ModesOfAWorker.__module__}.{ModesOfAWorker.__name__}",
            },
        ),
    ]


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each engine and context."""
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams, TokensPrompt

    tokens = AutoTokenizer.from_pretrained(arguments.model)(source_code())["input_ids"]
    greedy = SamplingParams(temperature=0, max_tokens=arguments.tokens, ignore_eos=True)
    rows = []
    for reads, own in engines(arguments.budget):
        own["speculative_config"]["method"] = "tokenswift"
        llm = LLM(
            arguments.model,
            dtype=arguments.dtype,
            max_model_len=max(arguments.contexts) + arguments.tokens + 64,
            max_num_seqs=4,
            gpu_memory_utilization=0.5,
            enable_prefix_caching=False,
            seed=0,
            **own,
        )
        if "worker_extension_cls" in own:
            llm.collective_rpc("make_modes", args=({MODE: options_of(MODE, NODES)},))
            llm.collective_rpc("change_mode", args=(MODE,))
        for context in arguments.contexts:
            before = llm.collective_rpc("tokenswift_stats")[0]
            llm.generate([TokensPrompt(prompt_token_ids=tokens[:context])], greedy, use_tqdm=False)
            counts = self_draft_counts(before, llm.collective_rpc("tokenswift_stats")[0])
            rows.append({"reads": reads, "context": context, **counts})
            print(rows[-1], flush=True)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = ["reads", "context", "passes", "selections", "drafted", "accepted", "share"]
    return record.markdown(
        header,
        [
            [
                *(str(row[name]) for name in header[:-1]),
                f"{row['accepted'] / row['drafted']:.3f}" if row["drafted"] else "-",
            ]
            for row in rows
        ],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1500, 6000])
    parser.add_argument("--tokens", type=int, default=150, help="to write after each context")
    parser.add_argument("--budget", type=int, default=2048, help="tokens of the partial cache")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # one engine after another
    surroundings = record.surroundings()
    rows = measure(arguments)
    rendered = table(rows)
    print(rendered)
    print(record.write("self_draft_acceptance", {**surroundings, "rows": rows}, rendered))
    return 0


if __name__ == "__main__":
    sys.exit(main())
