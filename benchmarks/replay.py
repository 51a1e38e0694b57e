"""Replays token lists against the planner and a cost model: tokens per iteration, speed-up.

The text is fixed, as if the target wrote it whatever was drafted (which is what lossless
means), so plans can be compared in seconds and without a model:

    python benchmarks/replay.py [--limit 16] [--tokens 3000] [--text FILE ...] [--json OUT]

``modelled speed-up`` is plain decoding's time over the planned time under the cost model;
the planner's own host time is shown beside it and is not part of it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_tokenswift.draft.candidates import HeadCandidates
from vllm_tokenswift.draft.cost import CostModel
from vllm_tokenswift.draft.planner import DraftRequest, PlanMode, Planner
from vllm_tokenswift.draft.state import DraftState

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
    context_ms_per_token=4.4e-5,
    draft_points=((0, 6.5), (4096, 6.7)),
)
COSTS = {"cpu": CPU_COST, "gpu": GPU_COST}

Heads = Callable[[int], HeadCandidates | None]


@dataclass(frozen=True)
class Replay:
    """What replaying one text came to. Times in ms; planning_us is host time per iteration."""

    iterations: int
    tokens: int
    drafted: int
    accepted: int
    self_drafts: int
    step_ms: float
    plain_ms: float
    planning_us: float

    @property
    def tokens_per_iteration(self) -> float:
        return self.tokens / self.iterations

    @property
    def speed_up(self) -> float:
        return self.plain_ms / self.step_ms


def replay(
    tokens: Sequence[int],
    planner: Planner,
    limit: int,
    prompt_len: int = 1,
    self_heads: Heads | None = None,
    free_heads: Heads | None = None,
    state: DraftState | None = None,
) -> Replay:
    """Decode ``tokens[prompt_len:]`` with the planner.

    self_heads, free_heads: for a number of committed tokens, what the heads would offer.
    """
    cost = planner.cost
    state = state or DraftState()
    state.extend(tokens[: prompt_len + 1])
    done = prompt_len + 1
    iterations = drafted = accepted_total = self_drafts = 0
    step_ms = plain_ms = planning_s = 0.0
    while done < len(tokens):
        heads = free_heads(done) if free_heads else None
        began = time.process_time()
        if self_heads is not None:
            request = DraftRequest(state, None, done, limit)
            if planner.wants_self_draft([request])[0]:
                heads = self_heads(done)
                self_drafts += 1
                step_ms += cost.draft_pass_ms(min(planner.budget, done))
        tree = planner.plan([DraftRequest(state, heads, done, limit)])[0]
        planning_s += time.process_time() - began

        accepted: list[int] = []
        node = 0
        children = tree.children
        while done + len(accepted) < len(tokens):
            child = children[node].get(tokens[done + len(accepted)])
            if child is None:
                break
            accepted.append(child)
            node = child
        emitted = tokens[done : done + len(accepted) + 1]
        chains = len(tree.chains) - 1
        step_ms += cost.verify_ms(1 + len(tree), done) + chains * cost.chain_cost_ms(done)
        plain_ms += sum(cost.verify_ms(1, done + i) for i in range(len(emitted)))
        began = time.process_time()
        state.observe(tree, accepted)
        state.extend(emitted)
        planning_s += time.process_time() - began
        done += len(emitted)
        iterations += 1
        drafted += len(tree)
        accepted_total += len(accepted)
    return Replay(
        iterations,
        done - prompt_len - 1,
        drafted,
        accepted_total,
        self_drafts,
        step_ms,
        plain_ms,
        planning_s / iterations * 1e6,
    )


def noisy_heads(
    tokens: Sequence[int], hit_rates: Sequence[Sequence[float]], free: bool, seed: int = 0
) -> Heads:
    """Heads that know the text: rank r of depth d holds the true token at ``hit_rates[d][r]``.

    Depth d is the d-th token after the committed ones.
    """

    def heads(done: int) -> HeadCandidates | None:
        rng = random.Random(seed * 1_000_003 + done)
        rows: list[list[int]] = []
        for depth, rates in enumerate(hit_rates):
            row = [rng.randrange(1_000_000, 2_000_000) for _ in rates]
            draw = rng.random()
            for rank, rate in enumerate(rates):
                if draw < rate:
                    if done + depth < len(tokens):
                        row[rank] = tokens[done + depth]
                    break
                draw -= rate
            rows.append(row)
        return HeadCandidates(rows, hit_rates, free)

    return heads


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
            result = replay(tokens, planner, arguments.limit, self_heads=self_heads)
            print(
                f"{name:22} {mode:6} {result.tokens_per_iteration:8.2f} "
                f"{result.drafted / result.iterations:8.2f} {result.speed_up:8.3f} "
                f"{result.planning_us:8.0f}"
            )
            results.append({"text": name, "plan": mode, **asdict(result)})
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
