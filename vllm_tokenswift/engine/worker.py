"""What TokenSwift's workers for CPU and CUDA share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_tokenswift.draft.warm_up import CompilingAhead

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object


class TokenSwiftWorkerMixin(_Worker):
    """To be placed before one of vLLM's V1 worker classes in the bases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Before the model is loaded, and before this process is bound to cores of its own.
        self._compiling = CompilingAhead() if self.local_rank == 0 else None

    def start_drafting(self) -> None:
        """To be called once, when vLLM has warmed up everything of its own."""
        if self._compiling is not None:
            self._compiling.wait()
        self.model_runner.start_drafting()

    # What changes the model or its cache between steps: a prelaunched pass read the old.

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        self.model_runner.prelauncher.drop()
        super().sleep(*args, **kwargs)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model_runner.prelauncher.drop()
        super().reload_weights(*args, **kwargs)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model_runner.prelauncher.drop()
        super().update_weights(*args, **kwargs)

    def shutdown(self) -> None:
        # An engine within the caller's process is told of the last request's end by no step.
        runner = self.model_runner
        if runner is not None and runner.recorder is not None:
            runner.recorder.finish_all()
        super().shutdown()

    def tokenswift_stats(self) -> dict[str, Any]:
        """Counters of this worker: those of :class:`vllm_tokenswift.metrics.Stats`, and
        ``decisions``, see :class:`vllm_tokenswift.draft.planner.planner.Planner`."""
        runner = self.model_runner
        return {**runner.stats.as_dict(), "decisions": dict(runner.tree_drafter.planner.decisions)}
