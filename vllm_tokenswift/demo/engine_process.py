"""vLLM engines in processes of their own, writing texts and noting when tokens came.

The demo and the benchmarks compare engines: each gets a process, so that none finds
another's compiled code, threads or memory. An engine that waits for its turn takes no
processor time (its threads sleep), so several can be kept and take turns text by text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self

from vllm_tokenswift.demo.texts import Batch, TextRequest, Written, WrittenBatch

_WARM_UP_TOKENS = 64
_WARM_UP_TOKENS_OF_A_BATCH = 16


class EngineProcess:
    """One engine, from entering the ``with`` statement to leaving it.

    Args:
        engine: keyword arguments of ``LLM``.

    Raises:
        RuntimeError: on entering, and from every method, where the process ended before its
            time; with the end of what it printed.
    """

    def __init__(self, engine: dict[str, Any]) -> None:
        self._engine = engine

    def __enter__(self) -> Self:
        # The progress bar is on standard output; vLLM's log is kept for a failure.
        self._log = tempfile.TemporaryFile("w+")
        answers, replies = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_tokenswift.demo.engine_child", str(replies)],
            stdin=subprocess.PIPE,
            stderr=self._log,
            env=_environment(),
            pass_fds=[replies],
            text=True,
        )
        os.close(replies)
        self._answers = os.fdopen(answers)
        try:
            self._ask(self._engine)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._answers.close()
        self._log.close()

    def warm_up(self, texts: Sequence[TextRequest]) -> None:
        """Writes the first tokens of each text once: code compiled and loaded, caches filled.

        Args:
            texts: one after another.
        """
        self.warm_up_batches([Batch(text.name, [text]) for text in texts], _WARM_UP_TOKENS)

    def warm_up_batches(
        self, batches: Sequence[Batch], num_tokens: int = _WARM_UP_TOKENS_OF_A_BATCH
    ) -> None:
        """Writes the first tokens of each batch once, as :meth:`warm_up` does of texts.

        Args:
            batches: one after another.
            num_tokens: of each text.
        """
        length = {"max_tokens": num_tokens, "min_tokens": num_tokens}
        self.write(
            [
                Batch(
                    "warming up",
                    [replace(text, sampling={**text.sampling, **length}) for text in batch.texts],
                )
                for batch in batches
            ]
        )

    def write(self, batches: Sequence[Batch]) -> list[WrittenBatch]:
        """Writes one batch after another, the texts of each at the same time.

        Args:
            batches: in the order in which they are written.

        Returns:
            What came, in the same order.
        """
        return [
            WrittenBatch(batch["name"], [_read(text) for text in batch["texts"]], batch["stats"])
            for batch in self._ask([asdict(batch) for batch in batches])
        ]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Calls a method of the engine's workers (vLLM's ``collective_rpc``).

        Args:
            method: its name.
            arguments: plain JSON values.

        Returns:
            What each worker returned, a plain JSON value.
        """
        answers: list[Any] = self._ask({"call": method, "arguments": arguments})
        return answers

    def write_texts(self, texts: Sequence[TextRequest]) -> list[Written]:
        """Writes one text after another.

        Args:
            texts: in the order in which they are written.

        Returns:
            What came, in the same order; ``stats`` of each are its own.
        """
        written = self.write([Batch(text.name, [text]) for text in texts])
        return [replace(batch.texts[0], stats=batch.stats) for batch in written]

    def _ask(self, order: object) -> Any:
        assert self._process.stdin is not None
        try:
            print(json.dumps(order), file=self._process.stdin, flush=True)
            answer = self._answers.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            status = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(
                f"the engine process ended with status {status}; it said:\n"
                f"{self._log.read()[-4000:]}"
            )
        return json.loads(answer)


def run(engine: dict[str, Any], texts: Sequence[TextRequest]) -> list[Written]:
    """Writes texts one after another, by an :class:`EngineProcess` for them alone, warmed up.

    Args:
        engine: keyword arguments of ``LLM``.
        texts: in the order in which they are written.

    Returns:
        What came, in the same order.

    Raises:
        RuntimeError: where the process ended before its time.
    """
    with EngineProcess(engine) as process:
        process.warm_up(texts)
        return process.write_texts(texts)


def _read(text: dict[str, Any]) -> Written:
    # JSON's keys are texts.
    logprobs = [{int(t): p for t, p in at.items()} for at in text["logprobs"]]
    return Written(**{**text, "logprobs": logprobs})


def _environment() -> dict[str, str]:
    """The parent's, with Intel's OpenMP preloaded as vLLM's CPU build asks for."""
    environment = dict(os.environ)
    environment.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    environment["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    # One process for all, and little memory (GB): see docs/design-notes.md.
    environment.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    environment.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    if openmp.exists():
        preloaded = environment.get("LD_PRELOAD")
        environment["LD_PRELOAD"] = f"{openmp}:{preloaded}" if preloaded else str(openmp)
    return environment
