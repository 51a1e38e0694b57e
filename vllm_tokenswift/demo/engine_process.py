"""One vLLM engine in a process of its own, writing some texts and noting when tokens came.

Texts come one after another, or several at once in batches.

The demo and the benchmarks compare engines: each gets a process, so that none finds
another's compiled code, threads or memory. ``run(job)`` is called by the parent; the
child is this module run with a job file and a result file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

WINDOWED_PENALTY = "vllm_tokenswift.sampling.processors:WindowedPenalty"
# The paper's recipe, with the penalty that the embedded model bears.
PENALISED = {
    "temperature": 1.0,
    "min_p": 0.1,
    "extra_args": {"penalty_theta": 1.1, "penalty_window": 1024},
}
_WARM_UP_TOKENS = 64
_WARM_UP_TOKENS_OF_A_BATCH = 16


@dataclass(frozen=True)
class TextRequest:
    """One text to write. name: for the progress bar; prompt: a user's message;
    sampling: keyword arguments of vLLM's SamplingParams."""

    name: str
    prompt: str
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Batch:
    """Texts to write at the same time (vLLM batches what is there at every step)."""

    name: str
    texts: list[TextRequest]


@dataclass(frozen=True)
class Job:
    """What one engine does: keyword arguments of ``LLM``, then texts one after another."""

    engine: dict[str, Any]
    texts: list[TextRequest]


@dataclass(frozen=True)
class BatchJob:
    """The same for batches of texts, one batch after another."""

    engine: dict[str, Any]
    batches: list[Batch]


@dataclass
class Written:
    """A text as it came. ``seconds[i]``: since the request was given, when ``counts[i]``
    tokens were there; stats: what TokenSwift's counters grew by, empty on other engines;
    logprobs: per position, token -> log probability, where the request asked for them."""

    name: str
    tokens: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stats: dict[str, Any] = field(default_factory=dict)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    text: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Of the decoding: the first token, which is the prompt's pass, is not counted."""
        return (self.counts[-1] - self.counts[0]) / (self.seconds[-1] - self.seconds[0])


@dataclass
class WrittenBatch:
    """A batch as it came: its texts, ``seconds`` of each since the batch was given.

    stats: of the whole batch, see :class:`Written`; those of its texts are empty.
    """

    name: str
    texts: list[Written]
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        """Of the decoding: from when every text had its first token until all had their last."""
        begin = max(text.seconds[0] for text in self.texts)
        end = max(text.seconds[-1] for text in self.texts)
        before = sum(
            max(n for n, at in zip(text.counts, text.seconds, strict=True) if at <= begin)
            for text in self.texts
        )
        return (sum(len(text.tokens) for text in self.texts) - before) / (end - begin)


def run(job: Job) -> list[Written]:
    """Runs ``job`` in a new process. Raises RuntimeError with the end of what it printed."""
    batches = [Batch(text.name, [text]) for text in job.texts]
    written = _run(BatchJob(job.engine, batches), _WARM_UP_TOKENS)
    return [replace(batch.texts[0], stats=batch.stats) for batch in written]


def run_batches(job: BatchJob) -> list[WrittenBatch]:
    """The same for batches."""
    return _run(job, _WARM_UP_TOKENS_OF_A_BATCH)


def _run(job: BatchJob, warm_up_tokens: int) -> list[WrittenBatch]:
    with tempfile.TemporaryDirectory() as folder:
        given, result, log = (Path(folder) / name for name in ("job.json", "result.json", "log"))
        given.write_text(json.dumps({**asdict(job), "warm_up_tokens": warm_up_tokens}))
        with log.open("w") as errors:
            # The progress bar is on standard output; vLLM's log is kept for a failure.
            process = subprocess.run(
                [sys.executable, "-m", __name__, str(given), str(result)],
                stderr=errors,
                env=_environment(),
            )
        if process.returncode != 0:
            raise RuntimeError(
                f"the engine process ended with status {process.returncode}; it said:\n"
                f"{log.read_text()[-4000:]}"
            )
        return [
            WrittenBatch(batch["name"], [_read(text) for text in batch["texts"]], batch["stats"])
            for batch in json.loads(result.read_text())
        ]


def _read(text: dict[str, Any]) -> Written:
    # JSON's keys are texts.
    logprobs = [{int(t): p for t, p in at.items()} for at in text["logprobs"]]
    return Written(**{**text, "logprobs": logprobs})


def _environment() -> dict[str, str]:
    """The parent's, with Intel's OpenMP preloaded as vLLM's CPU build asks for."""
    environment = dict(os.environ)
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    # One process for all: on few cores the engine's polling processes and the worker's threads
    # would take each other's time.
    environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # GB. vLLM's CPU build would take most of the machine's memory and touch all of it; on a
    # machine that is short of it every engine then runs at the pace of the swapping.
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        preloaded = environment.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = f"{openmp}:{preloaded}" if preloaded else str(openmp)
    return environment


def _write_all(job: BatchJob, warm_up_tokens: int) -> list[WrittenBatch]:
    from vllm import LLM

    llm = LLM(**job.engine)
    speculates = (job.engine.get("speculative_config") or {}).get("method") == "tokenswift"
    length = {"max_tokens": warm_up_tokens, "min_tokens": warm_up_tokens}
    for batch in job.batches:
        short = [replace(text, sampling={**text.sampling, **length}) for text in batch.texts]
        _write(llm, Batch("warming up", short), speculates)
    return [_write(llm, batch, speculates) for batch in job.batches]


def _write(llm: Any, batch: Batch, speculates: bool) -> WrittenBatch:
    from tqdm import tqdm
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    tokenizer = llm.get_tokenizer()
    engine = llm.llm_engine
    requests = []
    for asked in batch.texts:
        message = [{"role": "user", "content": asked.prompt}]
        prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        params = SamplingParams(
            **asked.sampling, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        requests.append((prompt, params))
    texts = [Written(asked.name) for asked in batch.texts]
    before = _stats(llm) if speculates else {}
    bar = tqdm(
        total=sum(params.max_tokens for _, params in requests),
        desc=batch.name,
        unit=" tokens",
        file=sys.stdout,
        ncols=88,
        # A log file gets a line now and then, a terminal a bar that moves.
        mininterval=0.2 if sys.stdout.isatty() else 10,
    )
    start = time.perf_counter()
    for index, (prompt, params) in enumerate(requests):
        engine.add_request(str(index), prompt, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            completion = output.outputs[0]
            if not completion.token_ids:
                continue
            text = texts[int(output.request_id)]
            text.tokens.extend(completion.token_ids)
            text.counts.append(len(text.tokens))
            text.seconds.append(now)
            for at in completion.logprobs or ():
                text.logprobs.append({token: entry.logprob for token, entry in at.items()})
            bar.update(len(completion.token_ids))
    bar.close()
    for text in texts:
        text.text = tokenizer.decode(text.tokens)
    return WrittenBatch(batch.name, texts, _grown(before, _stats(llm)) if speculates else {})


def _stats(llm: Any) -> dict[str, Any]:
    # Every rank of a tensor-parallel group counts the same.
    stats: dict[str, Any] = llm.collective_rpc("tokenswift_stats")[0]
    return stats


def _grown(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What counters, and counters by name, have grown by."""
    grown: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, dict):
            grown[name] = _grown(before.get(name, {}), value)
        else:
            grown[name] = value - before.get(name, 0)
    return grown


if __name__ == "__main__":
    raw = json.loads(Path(sys.argv[1]).read_text())
    batches = [
        Batch(batch["name"], [TextRequest(**text) for text in batch["texts"]])
        for batch in raw["batches"]
    ]
    all_written = _write_all(BatchJob(raw["engine"], batches), raw["warm_up_tokens"])
    Path(sys.argv[2]).write_text(json.dumps([asdict(written) for written in all_written]))
