"""Replays token lists against the planner and a cost model: tokens per iteration, speed-up.

    python benchmarks/replay.py [--limit 16] [--tokens 3000] [--text FILE ...] [--regret]
        [--json OUT]

``modelled speed-up`` is plain decoding's time over the planned time under the cost model;
the planner's own host time is shown beside it and is not part of it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import zlib
from dataclasses import asdict
from pathlib import Path

from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import PlanMode, Planner
from vllm_tokenswift.explain.replay import noisy_heads, replay
from vllm_tokenswift.explain.replayed import ReplayRecorder
from vllm_tokenswift.explain.stretches import regret_report, stretches, total

# A 135M model on 2 CPU cores: plain steps, and verify passes of 4, 8 and 16 drafts.
CPU_COST = CostModel(
    verify_points=((1, 18.4), (5, 22.2), (9, 26.7), (17, 34.2)),
    chain_ms=0.3,
    chain_context_ms_per_token=0.0004,
    draft_points=((0, 18.0), (1024, 18.4), (4096, 20.0)),
)
# An 8B model on one GPU: nearly flat up to 32 tokens, then a step per tile.
GPU_COST = CostModel(
    verify_points=((1, 6.7), (32, 6.9), (33, 8.0), (64, 8.2), (65, 9.5), (128, 11.5)),
    context_points=((1, 4.4e-5),),
    draft_points=((0, 6.5), (4096, 6.7)),
)
COSTS = {"cpu": CPU_COST, "gpu": GPU_COST}


def hashed_tokens(text: str) -> list[int]:
    """Words cut into pieces of at most five letters, hashed: about as fine as a BPE."""
    pieces = re.findall(r"\s?[A-Za-z]{1,5}|\d|\s+|[^\w\s]|_", text)
    return [zlib.crc32(piece.encode()) % 49_152 for piece in pieces]


def texts(num_tokens: int, seed: int = 0) -> dict[str, list[int]]:
    """Kinds of text: a loop, one that loops with variations, prose, code, random numbers."""
    rng = random.Random(seed)
    prose = _files(re.compile(r"\.(txt|md|rst)$"), num_tokens)
    loop = prose[200:260]
    varied: list[int] = []
    while len(varied) < num_tokens:
        varied += [rng.choice(prose) if rng.random() < 0.05 else token for token in loop]
    return {
        "loop": (prose[:100] + loop * (num_tokens // len(loop) + 1))[:num_tokens],
        "varied loop": varied[:num_tokens],
        "prose": prose[:num_tokens],
        "code": _files(re.compile(r"^[a-m]\w+\.py$"), num_tokens),
        "numbers": [rng.randrange(10, 20) for _ in range(num_tokens)],
        "never repeats": [rng.randrange(49_152) for _ in range(num_tokens)],
        "loop, then numbers": (loop * num_tokens)[: num_tokens // 2]
        + [rng.randrange(10, 20) for _ in range(num_tokens // 2)],
    }


def _files(name: re.Pattern[str], num_tokens: int) -> list[int]:
    """Tokens of text files that come with the interpreter and its packages."""
    tokens: list[int] = []
    for root in (Path(json.__file__).parent.parent, Path(__file__).parent.parent):
        for path in sorted(root.rglob("*")):
            if name.search(path.name) and path.is_file() and path.stat().st_size > 6_000:
                tokens += hashed_tokens(path.read_text(errors="replace"))
                if len(tokens) >= num_tokens:
                    return tokens[:num_tokens]
    return tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=16, help="most draft nodes a step")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--cost", choices=sorted(COSTS), default="cpu")
    parser.add_argument("--budget", type=int, default=512, help="partial KV, tokens")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a text file")
    parser.add_argument("--self-draft", action="store_true", help="simulate a draft pass too")
    parser.add_argument("--regret", action="store_true", help="time lost against an oracle")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()

    kinds = texts(arguments.tokens)
    for path in arguments.text:
        kinds[path.name] = hashed_tokens(path.read_text())[: arguments.tokens]
    results = []
    print(f"{'text':22} {'plan':6} {'tok/iter':>8} {'drafted':>8} {'speed-up':>8} {'us/iter':>8}")
    for name, tokens in kinds.items():
        modes: tuple[PlanMode, ...] = ("auto", "fixed")
        for mode in modes:
            planner = Planner(COSTS[arguments.cost], arguments.budget, mode)
            self_heads = None
            if arguments.self_draft:
                rates = [[0.9], [0.15, 0.08, 0.05], [0.08, 0.05, 0.03]]
                self_heads = noisy_heads(tokens, rates, free=False)
            recorder = ReplayRecorder(name, tokens, planner, arguments.limit)
            result = replay(
                tokens,
                planner,
                arguments.limit,
                self_heads=self_heads,
                on_iteration=recorder.add if arguments.regret else None,
            )
            print(
                f"{name:22} {mode:6} {result.tokens_per_iteration:8.2f} "
                f"{result.drafted / result.iterations:8.2f} {result.speed_up:8.3f} "
                f"{result.planning_us:8.0f}"
            )
            if arguments.regret:
                print(regret_report(total(stretches(recorder.record(), 1))))
            results.append({"text": name, "plan": mode, **asdict(result)})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
