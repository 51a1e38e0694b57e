"""Long generations: plain vLLM, TokenSwift and vLLM's own ``ngram`` on one GPU, one after another.

    # TokenSwift writes 20,000 tokens after a prefix of 4,096, then 20,000 more
    python -m benchmarks.long_generation generate MODEL --method tokenswift \
        --prompt-file story.txt --prefix 4096 --tokens 20000 --out ts.json
    python -m benchmarks.long_generation generate MODEL --method tokenswift \
        --continue ts.json --tokens 20000 --out ts.json
    # what a token of plain decoding costs at twelve lengths of the same text
    python -m benchmarks.long_generation cost MODEL --text ts.json --out plain.json
    # table and plots
    python -m benchmarks.long_generation report --tokenswift ts.json --plain plain.json \
        --ngram ngram.json --out results/long_generation_h100
    # several generate and cost commands, one after another, in one engine
    python -m benchmarks.long_generation several --max-model-len 30000 \
        "generate MODEL --method tokenswift --prompt-file story.txt --tokens 20000 --out a.json" \
        "generate MODEL --method tokenswift --prompt-file other.txt --tokens 4000 --out b.json"

A ``generate`` or ``cost`` is a process with one engine, and may be cut into parts so that none
takes longer than a machine can be held. An engine for a large model takes minutes to start, which
``several`` spends once; what shapes the engine has to be the same in all its commands. Plain
decoding's cost per token depends on the length alone, so its total is integrated from ``cost``;
``generate --method plain`` checks that.

Sampling: ``--temperature 1 --min-p 0.1 --theta 1.1 --window 1024`` by default, ``--temperature 0``
for greedy. Plain vLLM and ``ngram`` do without the penalty's logits processor unless
``--penalise-plain`` says otherwise: it would cost them time, so without it the comparison is in
their favour. ``ngram`` refuses min-p, and gets top-p 0.9 and vLLM's repetition penalty instead.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.record import without_folder

POINT_EVERY_TOKENS = 250
COST_POINTS = 12
COST_TOKENS = 48
WARM_UP_TOKENS = 64
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 8,
    "prompt_lookup_max": 4,
    "prompt_lookup_min": 2,
}
NGRAM_TOP_P = 0.9  # in place of min-p, which vLLM's own speculation refuses
# Arguments that commands which share an engine have in common.
SHAPES_ENGINE = ("model", "method", "batch", "dtype", "options", "engine", "penalise_plain")


# -- the engine -------------------------------------------------------------------


def make_engine(arguments: argparse.Namespace, max_model_len: int) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {}
    if arguments.method == "tokenswift":
        options["speculative_config"] = {"method": "tokenswift", **arguments.options}
    elif arguments.method == "ngram":
        options["speculative_config"] = NGRAM | arguments.options
    if arguments.method == "plain" and arguments.penalise_plain:
        options["logits_processors"] = ["vllm_tokenswift.sampling.processors:WindowedPenalty"]
    return LLM(
        arguments.model,
        max_model_len=max_model_len,
        max_num_seqs=max(arguments.batch, 1),
        dtype=arguments.dtype,
        gpu_memory_utilization=0.85,
        enable_prefix_caching=True,
        seed=0,
        **options,
        **arguments.engine,
    )


def sampling_params(arguments: argparse.Namespace, max_tokens: int, seed: int) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    values: dict[str, Any] = {"temperature": arguments.temperature}
    if arguments.temperature > 0:
        values["seed"] = seed
    penalised = arguments.method == "tokenswift" or arguments.penalise_plain
    if arguments.method == "ngram":
        values |= {"top_p": NGRAM_TOP_P} if arguments.temperature > 0 else {}
        values |= {"repetition_penalty": arguments.theta} if arguments.theta > 1 else {}
    else:
        values |= {"min_p": arguments.min_p} if arguments.temperature > 0 else {}
        if penalised and arguments.theta > 1:
            values["extra_args"] = {
                "penalty_theta": arguments.theta,
                "penalty_window": arguments.window,
            }
    return SamplingParams(
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        **values,
    )


def decode(
    llm: Any,
    prompts: list[list[int]],
    params: list[Any],
    at_point: Any = None,
    seconds: float | None = None,
) -> tuple[list[list[int]], list[tuple[int, float]]]:
    """Runs the requests to their end, or for so many seconds.

    Returns their new tokens, and ``(tokens per request so far, seconds)`` at every output,
    counted from the moment at which each request had its first token.
    """
    engine = llm.llm_engine
    for i, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, param)
    produced: list[list[int]] = [[] for _ in prompts]
    timeline: list[tuple[int, float]] = []
    begin: float | None = None
    before = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            produced[int(output.request_id)] += output.outputs[0].token_ids
        total = sum(map(len, produced))
        if begin is None:
            if all(produced):
                begin, before = time.perf_counter(), total
            continue
        timeline.append(((total - before) // len(prompts), time.perf_counter() - begin))
        if at_point is not None:
            at_point(timeline[-1])
        if seconds is not None and timeline[-1][1] > seconds:
            engine.abort_request([str(i) for i in range(len(prompts))])
            break
    return produced, timeline


# -- generate -----------------------------------------------------------------------


def generate(arguments: argparse.Namespace, llm: Any, description: dict[str, Any]) -> None:
    """Writes on, and records the text and its points; description: see :func:`describe`."""
    if arguments.resume:
        record = json.loads(arguments.resume.read_text())
        arguments.prefix = record["arguments"]["prefix"]
    else:
        texts = [read_prefix(llm, arguments)] * arguments.batch
        record = {**of_record(arguments, description), "texts": texts, "points": [], "seconds": 0.0}
    done = len(record["texts"][0]) - arguments.prefix
    warm_up(llm, arguments, record["texts"][0][: arguments.prefix])

    offset = record["seconds"]
    counters: list[dict[str, Any]] = []
    next_point = POINT_EVERY_TOKENS

    def at_point(at: tuple[int, float]) -> None:
        nonlocal next_point
        if at[0] >= next_point:
            next_point = at[0] + POINT_EVERY_TOKENS
            point: dict[str, Any] = {"tokens": done + at[0], "seconds": offset + at[1]}
            if arguments.method == "tokenswift":
                point["stats"] = stats_of(llm)
            record["points"].append(point)
            counters.append(point)
            if len(counters) % 20 == 0:
                print(f"{point['tokens']} tokens in {point['seconds']:.1f} s", flush=True)

    params = [
        sampling_params(arguments, arguments.tokens, 1000 * done + i)
        for i in range(arguments.batch)
    ]
    if arguments.method == "tokenswift":
        record["points"].append({"tokens": done, "seconds": offset, "stats": stats_of(llm)})
    produced, timeline = decode(llm, record["texts"], params, at_point, arguments.seconds)
    record["texts"] = [text + new for text, new in zip(record["texts"], produced, strict=True)]
    record["seconds"] = offset + timeline[-1][1]
    last: dict[str, Any] = {"tokens": done + timeline[-1][0], "seconds": record["seconds"]}
    if arguments.method == "tokenswift":
        last["stats"] = stats_of(llm)
    record["points"].append(last)
    record["parts"] = [*record.get("parts", []), of_record(arguments, description)]
    record["distinct"] = [distinct(record["texts"][0][arguments.prefix :], n) for n in range(1, 5)]
    write(arguments.out, record)
    tokens = timeline[-1][0]
    print(
        f"{arguments.method}: {tokens} tokens a request, batch {arguments.batch}, "
        f"{timeline[-1][1]:.1f} s, {1e3 * timeline[-1][1] / tokens:.2f} ms/token, "
        f"Distinct-4 {record['distinct'][3]:.3f}"
    )


def read_prefix(llm: Any, arguments: argparse.Namespace) -> list[int]:
    """The first tokens of the prompt file; the model goes on where the file is too short."""
    tokens: list[int] = llm.get_tokenizer().encode(arguments.prompt_file.read_text())
    missing = arguments.prefix - len(tokens)
    if missing > 0:
        (more,), _ = decode(llm, [tokens], [sampling_params(arguments, missing, seed=7)])
        tokens += more
    return tokens[: arguments.prefix]


def warm_up(llm: Any, arguments: argparse.Namespace, prompt: list[int]) -> None:
    params = sampling_params(arguments, WARM_UP_TOKENS, 3)
    decode(llm, [prompt] * arguments.batch, [params] * arguments.batch)


def stats_of(llm: Any) -> dict[str, Any]:
    stats: dict[str, Any] = llm.collective_rpc("tokenswift_stats")[0]
    return stats


def distinct(tokens: list[int], n: int) -> float:
    """Distinct-n: different n-grams over all n-grams (paper, "Diversity")."""
    grams = list(zip(*(tokens[i:] for i in range(n)), strict=False))
    return len(set(grams)) / max(1, len(grams))


# -- cost of plain decoding by length ---------------------------------------------------


def cost(arguments: argparse.Namespace, llm: Any, description: dict[str, Any]) -> None:
    """Records milliseconds per token at some lengths; description: see :func:`describe`."""
    source = json.loads(arguments.text.read_text())
    prefix = source["arguments"]["prefix"]
    texts = source["texts"][: arguments.batch]
    longest = min(map(len, texts))
    record = {**of_record(arguments, description), "prefix": prefix, "points": []}
    warm_up(llm, arguments, texts[0][:prefix])
    # Rising lengths: the prefix cache leaves only the new part of each to be computed.
    for length in np.linspace(prefix, longest, COST_POINTS).astype(int).tolist():
        params = [sampling_params(arguments, COST_TOKENS, 5)] * len(texts)
        _, timeline = decode(llm, [text[:length] for text in texts], params)
        tokens, seconds = (np.array(column) for column in zip(*timeline, strict=True))
        # By the slope between single steps, so that one slow step does not count.
        steps = np.diff(seconds) / np.maximum(np.diff(tokens), 1)
        point = {"length": length, "ms_per_token": 1e3 * median(steps[4:].tolist())}
        record["points"].append(point)
        print(f"{length} tokens: {point['ms_per_token']:.2f} ms/token", flush=True)
    write(arguments.out, record)


def integrated_seconds(points: list[dict[str, float]], prefix: int, tokens: int) -> float:
    """Plain decoding's time for ``tokens`` after ``prefix``, from its cost by length."""
    lengths = np.array([point["length"] for point in points], float)
    costs = np.array([point["ms_per_token"] for point in points])
    positions = np.arange(prefix, prefix + tokens)
    return float(np.interp(positions, lengths, costs).sum() / 1e3)


# -- commands and their engine ------------------------------------------------------------


def alone(arguments: argparse.Namespace) -> None:
    """One command in an engine of its own."""
    llm = make_engine(arguments, room(arguments, {}))
    arguments.measure(arguments, llm, describe(llm, sys.argv[1:], num_others=0))


def several(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Commands one after another, in one engine; each writes its record as soon as it is done."""
    commands = commands_of_one_engine(parser, arguments.lines, arguments.max_model_len)
    llm = make_engine(commands[0], arguments.max_model_len)
    for words, command in zip(arguments.lines, commands, strict=True):
        print(f"-- {shlex.join(words)}", flush=True)
        command.measure(command, llm, describe(llm, words, len(commands) - 1))


def commands_of_one_engine(
    parser: argparse.ArgumentParser, lines: Sequence[list[str]], max_model_len: int
) -> list[argparse.Namespace]:
    """The command lines parsed. One engine is enough for them, or the parser ends the process."""
    commands = [parser.parse_args(words) for words in lines]
    planned: dict[Path, int] = {}
    for words, command in zip(lines, commands, strict=True):
        if "measure" not in command:
            parser.error(f"several runs generate and cost, not {words[0]}")
        for name in SHAPES_ENGINE:
            first, value = getattr(commands[0], name), getattr(command, name)
            if value != first:
                option = name if name == "model" else "--" + name.replace("_", "-")
                parser.error(
                    f"one engine has one {option}: it is {first!r} in the first command, and "
                    f"{value!r} in: {shlex.join(words)}"
                )
        needed = room(command, planned)
        if needed > max_model_len:
            parser.error(
                f"--max-model-len {max_model_len} is too short, {needed} are needed for: "
                f"{shlex.join(words)}"
            )
        planned[command.out] = needed - WARM_UP_TOKENS
    return commands


def room(arguments: argparse.Namespace, planned: Mapping[Path, int]) -> int:
    """Tokens of the longest sequence that a command can come to, with some for its warm-up.

    planned: tokens of the longest text in records that are not written yet.
    """
    is_cost = arguments.measure is cost
    source = arguments.text if is_cost else arguments.resume
    if source is None:
        length = arguments.prefix
    elif source in planned:
        length = planned[source]
    else:
        length = max(map(len, json.loads(source.read_text())["texts"]))
    return int(length + (COST_TOKENS if is_cost else arguments.tokens) + WARM_UP_TOKENS)


# -- report ------------------------------------------------------------------------------


def report(arguments: argparse.Namespace) -> None:
    swift = json.loads(arguments.tokenswift.read_text())
    plain = json.loads(arguments.plain.read_text())
    ngram = json.loads(arguments.ngram.read_text()) if arguments.ngram else None
    prefix = swift["arguments"]["prefix"]
    rows = []
    reached = swift["points"][-1]["tokens"]
    marks = [n for n in (20_000, 40_000, 60_000, 80_000, 100_000) if n <= reached + 1] or [reached]
    for tokens in marks:
        row = {
            "tokens": tokens,
            "plain_s": integrated_seconds(plain["points"], prefix, tokens),
            "tokenswift_s": seconds_at(swift, tokens),
            **acceptance(swift, tokens),
        }
        row["speedup"] = row["plain_s"] / row["tokenswift_s"]
        if ngram is not None and ngram["points"][-1]["tokens"] >= tokens:
            row["ngram_s"] = seconds_at(ngram, tokens)
            row["speedup_over_ngram"] = row["ngram_s"] / row["tokenswift_s"]
        rows.append(row)
    summary = {
        "rows": rows,
        "distinct": swift["distinct"],
        "parts": [*swift["parts"], plain["description"]],
        "ms_per_token_plain": plain["points"],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write(arguments.out.with_suffix(".json"), summary)
    keys = [key for key in rows[0] if any(row.get(key) is not None for row in rows)]
    print(" | ".join(keys))
    for row in rows:
        print(" | ".join(f"{row.get(key, float('nan')):.3g}" for key in keys))
    plot(arguments.out.with_suffix(".png"), swift, plain, ngram, prefix)


def seconds_at(record: dict[str, Any], tokens: int) -> float:
    """Seconds at a number of tokens; the points lie close enough for straight lines."""
    points = record["points"]
    return float(np.interp(tokens, [p["tokens"] for p in points], [p["seconds"] for p in points]))


def acceptance(record: dict[str, Any], tokens: int, since: int = 0) -> dict[str, float]:
    """Tokens per iteration, and the paper's alpha and beta, over a stretch of the text.

    What an engine counted before a part or between two is not this text's, so differences are
    summed within parts.
    """
    sums = {"iterations": 0.0, "emitted": 0.0, "accepted": 0.0, "ngram": 0.0}
    names = {
        "iterations": "num_iterations",
        "emitted": "num_emitted_tokens",
        "accepted": "num_accepted_tokens",
        "ngram": "num_ngram_tokens",
    }
    points = [p for p in record["points"] if "stats" in p and since <= p["tokens"] <= tokens]
    for earlier, later in itertools.pairwise(points):
        if later["seconds"] == earlier["seconds"]:
            continue  # a part begins at the second at which the one before it ended
        for name, key in names.items():
            sums[name] += later["stats"][key] - earlier["stats"][key]
    iterations = max(1.0, sums["iterations"])
    gamma = 3  # the paper's three heads; rates are per gamma + 1 tokens of an iteration
    return {
        "tokens_per_iteration": sums["emitted"] / iterations,
        "alpha": sums["accepted"] / iterations / (gamma + 1),
        "beta": sums["ngram"] / iterations / (gamma + 1),
    }


def plot(
    path: Path,
    swift: dict[str, Any],
    plain: dict[str, Any],
    ngram: dict[str, Any] | None,
    prefix: int,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tokens = np.array([p["tokens"] for p in swift["points"]])
    seconds = np.array([p["seconds"] for p in swift["points"]])
    plain_seconds = np.array([integrated_seconds(plain["points"], prefix, int(n)) for n in tokens])
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4))
    left.plot(tokens, plain_seconds, label="plain")
    left.plot(tokens, seconds, label="TokenSwift")
    if ngram is not None:
        points = ngram["points"]
        left.plot([p["tokens"] for p in points], [p["seconds"] for p in points], label="ngram")
    left.set(xlabel="tokens generated", ylabel="seconds", title="time")
    left.legend()
    edges = np.linspace(0, tokens[-1], 21)
    rates = [acceptance(swift, int(stop), int(start)) for start, stop in itertools.pairwise(edges)]
    for name in ("alpha", "beta"):
        middle.plot(edges[1:], [rate[name] for rate in rates], label=name)
    middle.set(xlabel="tokens generated", title="acceptance (gamma = 3)")
    middle.legend()
    later = seconds > 0
    right.plot(tokens[later], plain_seconds[later] / seconds[later])
    right.set(xlabel="tokens generated", title="speed-up over plain vLLM")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


# -- records -----------------------------------------------------------------------------


def of_record(arguments: argparse.Namespace, description: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a command beside what :func:`describe` says of it."""
    values = {name: without_folder(value) for name, value in vars(arguments).items()}
    for function in ("run", "measure"):
        values.pop(function)
    return {"arguments": values, "description": description}


def describe(llm: Any, words: Sequence[str], num_others: int) -> dict[str, Any]:
    """What produced a record: command, engine, versions, commit, hardware and date.

    words: the command line, without the program. num_others: commands that share its engine.
    """
    import torch
    import triton
    import vllm
    from vllm.platforms import current_platform

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "command": shlex.join(str(without_folder(word)) for word in (sys.argv[0], *words)),
        "max_model_len": llm.model_config.max_model_len,
        "engine_shared_with": num_others,
        "commit": commit.stdout.strip() or "not in a repository",
        "hardware": current_platform.get_device_name(),
        "versions": {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "date": datetime.date.today().isoformat(),
    }


def write(path: Path, record: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    engine = argparse.ArgumentParser(add_help=False)
    engine.add_argument("model")
    engine.add_argument("--out", type=Path, required=True)
    engine.add_argument("--batch", type=int, default=1)
    engine.add_argument("--dtype", default="auto")
    engine.add_argument("--temperature", type=float, default=1.0)
    engine.add_argument("--min-p", type=float, default=0.1)
    engine.add_argument("--theta", type=float, default=1.1)
    engine.add_argument("--window", type=int, default=1024)
    engine.add_argument("--penalise-plain", action="store_true")
    engine.add_argument("--options", type=json.loads, default={}, help="of the method, as JSON")
    engine.add_argument("--engine", type=json.loads, default={}, help="engine arguments, as JSON")

    command = commands.add_parser("generate", parents=[engine])
    command.add_argument("--method", choices=("plain", "tokenswift", "ngram"), required=True)
    command.add_argument("--prompt-file", type=Path)
    command.add_argument("--prefix", type=int, default=4096)
    command.add_argument("--tokens", type=int, default=20_000)
    command.add_argument("--continue", dest="resume", type=Path)
    command.add_argument("--seconds", type=float, help="end this part after so many, if not before")
    command.set_defaults(run=alone, measure=generate)

    command = commands.add_parser("cost", parents=[engine])
    command.add_argument("--text", type=Path, required=True)
    command.set_defaults(run=alone, measure=cost, method="plain")

    command = commands.add_parser("several")
    command.add_argument("--max-model-len", type=int, required=True, help="of the engine")
    command.add_argument(
        "lines", nargs="+", type=shlex.split, metavar="COMMAND", help="generate or cost, quoted"
    )
    command.set_defaults(run=partial(several, parser))

    command = commands.add_parser("report")
    command.add_argument("--tokenswift", type=Path, required=True)
    command.add_argument("--plain", type=Path, required=True)
    command.add_argument("--ngram", type=Path)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=report)
    return parser


def main() -> None:
    arguments = make_parser().parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
