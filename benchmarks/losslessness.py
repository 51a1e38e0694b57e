"""Is TokenSwift's text plain vLLM's? 20 prompts, 300 tokens each, three kinds of sampling.

    python -m benchmarks.losslessness [--tokens 300] [--prompts 20] [--dtypes float32 bfloat16]

float32: every text must be identical; the exit status says so. On a GPU Triton's kernels (vLLM's
attention in float32 is one) multiply in TF32 unless they are told otherwise, and then plain vLLM
differs from itself in other batches: here they are told to multiply in float32.

bfloat16: logits have 8 bits, so that two tokens often tie within rounding, and a pass over several
rows rounds otherwise than a pass over one. The record holds the rate of prompts that differ,
beside the rate at which plain vLLM differs from itself in batches of another size, and, for greedy
texts, how far apart the two tokens' logits were at the first difference. TokenSwift drafts with
the demo model's heads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from typing import Any

from benchmarks import record
from benchmarks.prompts import TWENTY
from vllm_tokenswift.demo import model as demo_model
from vllm_tokenswift.demo.engine_process import EngineProcess, run
from vllm_tokenswift.demo.measures import first_difference
from vllm_tokenswift.demo.texts import PENALISED, WINDOWED_PENALTY, Batch, TextRequest, Written

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded, min-p 0.1": {"temperature": 1.0, "min_p": 0.1},
    "seeded, min-p 0.1, windowed penalty 1.1": PENALISED,
}
_LOGPROBS = 20
# A pass of 3 rows may run the same kernels as one of 1 row. On an H200 one of 20 does too, and one
# of 60 does not.
_OTHER_BATCHES = (3, 20, 60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=len(TWENTY))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--model", help="another model than the embedded one")
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="arguments of all engines, as JSON"
    )
    arguments = parser.parse_args()
    model = arguments.model or str(demo_model.prepare())
    results: list[dict[str, Any]] = []
    # For all engines, which are processes of their own; it says nothing to bfloat16.
    os.environ["TRITON_F32_DEFAULT"] = "ieee"
    for dtype in arguments.dtypes:
        engine = {
            "model": model,
            "dtype": dtype,
            "max_model_len": arguments.tokens + 512,
            **arguments.engine,
        }
        texts = _texts(arguments, with_logprobs=False)
        with EngineProcess({**engine, "logits_processors": [WINDOWED_PENALTY]}) as process:
            process.warm_up(texts)
            plain = process.write_texts(_texts(arguments, with_logprobs=True))
            again = {size: _in_batches(process, texts, size) for size in _OTHER_BATCHES}
        ours = run(
            {**engine, "speculative_config": {"method": "tokenswift", "heads": demo_model.HEADS}},
            texts,
        )
        results += _compare(dtype, plain, ours, again)
    rows = [
        [
            *(r["dtype"], r["sampling"], f"{r['different']} of {r['prompts']}"),
            *(f"{different} of {r['prompts']}" for different in r["plain_different"].values()),
            _gap(r["logit_gaps"]),
        ]
        for r in results
    ]
    header = [
        *("dtype", "sampling", "prompts that differ"),
        *(f"of plain vLLM's own in batches of {size}" for size in _OTHER_BATCHES),
        "logit gap at the first difference",
    ]
    table = record.markdown(header, rows)
    print(table)
    path = record.write("losslessness", {**record.surroundings(), "results": results}, table)
    print(f"written to {path.name}")
    return int(any(r["different"] for r in results if r["dtype"] == "float32"))


def _texts(arguments: argparse.Namespace, with_logprobs: bool) -> list[TextRequest]:
    texts = []
    for kind, sampling in KINDS.items():
        for i, prompt in enumerate(TWENTY[: arguments.prompts]):
            more = {"logprobs": _LOGPROBS} if with_logprobs and kind == "greedy" else {}
            length = {"max_tokens": arguments.tokens, "ignore_eos": True}
            texts.append(
                TextRequest(f"{kind} {i + 1}", prompt, {**sampling, "seed": i, **length, **more})
            )
    return texts


def _in_batches(process: EngineProcess, texts: list[TextRequest], size: int) -> list[Written]:
    """The texts, ``size`` at the same time."""
    batches = [
        Batch(f"{size} at a time, from {texts[i].name}", texts[i : i + size])
        for i in range(0, len(texts), size)
    ]
    return [text for written in process.write(batches) for text in written.texts]


def _compare(
    dtype: str, plain: list[Written], ours: list[Written], again: dict[int, list[Written]]
) -> list[dict[str, Any]]:
    """again: plain vLLM's in batches of other sizes, by size."""
    results = []
    per_kind = len(plain) // len(KINDS)
    for k, kind in enumerate(KINDS):
        gaps, different = [], 0
        of_kind = range(k * per_kind, (k + 1) * per_kind)
        for i in of_kind:
            at = first_difference(plain[i].tokens, ours[i].tokens)
            if at is None:
                continue
            different += 1
            if plain[i].logprobs:
                logprobs = plain[i].logprobs[at]
                # Log probabilities of one softmax differ as the logits do. A token outside
                # the top 20 is at least as far away as the last of them.
                theirs = logprobs.get(ours[i].tokens[at], min(logprobs.values()))
                gaps.append(logprobs[plain[i].tokens[at]] - theirs)
        results.append(
            {
                "dtype": dtype,
                "sampling": kind,
                "prompts": per_kind,
                "different": different,
                "plain_different": {
                    size: sum(
                        first_difference(plain[i].tokens, written[i].tokens) is not None
                        for i in of_kind
                    )
                    for size, written in again.items()
                },
                "logit_gaps": gaps,
            }
        )
    return results


def _gap(gaps: list[float]) -> str:
    if not gaps:
        return ""
    return f"median {statistics.median(gaps):.4f}, largest {max(gaps):.4f}"


if __name__ == "__main__":
    sys.exit(main())
