"""Writes a long text twice, plain and with TokenSwift, and compares: see ``make demo``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from vllm_tokenswift.demo import model as demo_model
from vllm_tokenswift.demo.engine_process import run
from vllm_tokenswift.demo.measures import Comparison, table
from vllm_tokenswift.demo.plot import time_against_tokens
from vllm_tokenswift.demo.texts import PENALISED, WINDOWED_PENALTY, TextRequest
from vllm_tokenswift.options import TokenSwiftOptions

PROMPT = (
    "Write a very long story about a lighthouse keeper who finds a map in a bottle, with many "
    "chapters, places and people."
)


def requests(num_tokens: int, seed: int) -> list[TextRequest]:
    """The greedy text, and the paper's recipe with the penalty that this small model bears.

    Args:
        num_tokens: of each text, whose end-of-text token is not taken.
        seed: of the sampled text.

    Returns:
        Both requests.
    """
    length = {"max_tokens": num_tokens, "min_tokens": num_tokens}
    penalised = {**PENALISED, "seed": seed}
    return [
        TextRequest("greedy", PROMPT, {"temperature": 0.0, **length}),
        TextRequest("sampled, windowed penalty 1.1", PROMPT, {**penalised, **length}),
    ]


def main() -> int:
    """Writes the texts, prints the comparison and draws it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m vllm_tokenswift.demo", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1500, help="length of each text")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled text")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="float32 (default): the tokens are identical. bfloat16: closer to how models are "
        "served; logits are rounded to 8 bits, ties are common, and a verify pass of several "
        "rows can break one differently than a pass of one row",
    )
    parser.add_argument("--model", help="another model than the embedded one")
    parser.add_argument("--heads", help="a checkpoint of draft heads for it (default: its own)")
    parser.add_argument("--out", type=Path, default=Path("demo-output"), help="a folder")
    arguments = parser.parse_args()

    engine: dict[str, Any] = {
        "model": arguments.model or str(demo_model.prepare()),
        "dtype": arguments.dtype,
        "max_model_len": arguments.tokens + 512,
        "seed": arguments.seed,
    }
    options: dict[str, Any] = {"method": "tokenswift"}
    heads = arguments.heads or (None if arguments.model else demo_model.HEADS)
    if heads:
        options["heads"] = heads
    texts = requests(arguments.tokens, arguments.seed)
    print(f"plain vLLM, {arguments.dtype}: starting", flush=True)
    plain = run({**engine, "logits_processors": [WINDOWED_PENALTY]}, texts)
    print(f"TokenSwift, {arguments.dtype}: starting", flush=True)
    ours = run({**engine, "speculative_config": options}, texts)

    levels = len(TokenSwiftOptions().head_tree)
    comparisons = [Comparison(a, b, levels) for a, b in zip(plain, ours, strict=True)]
    arguments.out.mkdir(parents=True, exist_ok=True)
    for comparison in comparisons:
        print("\n" + table(comparison))
        name = comparison.plain.name.split(",")[0]
        (arguments.out / f"{name}.txt").write_text(comparison.tokenswift.text)
    picture = arguments.out / "time-against-tokens.png"
    time_against_tokens(comparisons, f"{Path(engine['model']).name}, {arguments.dtype}", picture)
    print(f"\nThe texts and the picture {picture.name} are in {arguments.out}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
