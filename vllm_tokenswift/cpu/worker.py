"""The CPU worker that ``parallel_config.worker_cls`` leads to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from vllm.v1.worker import cpu_worker

from vllm_tokenswift.engine.worker import TokenSwiftWorkerMixin


@contextmanager
def _substituted(module: ModuleType, name: str, replacement: type) -> Iterator[None]:
    """vLLM's workers name their runner class; while a worker builds it, the name is ours."""
    stock = getattr(module, name)
    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, stock)


class TokenSwiftCPUWorker(TokenSwiftWorkerMixin, cpu_worker.CPUWorker):
    def init_device(self) -> None:
        from vllm_tokenswift.cpu.runner import TokenSwiftCPUModelRunner

        with _substituted(cpu_worker, "CPUModelRunner", TokenSwiftCPUModelRunner):
            super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.start_drafting()
        return times
