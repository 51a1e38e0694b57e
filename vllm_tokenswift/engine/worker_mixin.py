"""What TokenSwift's workers for CPU and CUDA share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object


class TokenSwiftWorkerMixin(_Worker):
    """To be placed before one of vLLM's V1 worker classes in the bases."""

    def compile_or_warm_up_model(self) -> Any:
        times = super().compile_or_warm_up_model()
        self.model_runner.start_drafting()
        return times

    # What changes the model or its cache between steps: a pass ahead was made with the old.

    def sleep(self, *args: Any, **kwargs: Any) -> None:
        self.model_runner.ahead.drop()
        super().sleep(*args, **kwargs)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model_runner.ahead.drop()
        super().reload_weights(*args, **kwargs)

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model_runner.ahead.drop()
        super().update_weights(*args, **kwargs)

    def shutdown(self) -> None:
        # An engine within the caller's process is told of the last request's end by no step.
        runner = self.model_runner
        if runner is not None and runner.recorder is not None:
            runner.recorder.finish_all()
        super().shutdown()

    def tokenswift_stats(self) -> dict[str, Any]:
        """Counters of this worker: those of :class:`vllm_tokenswift.metrics.Stats`, and
        ``decisions``, see :class:`vllm_tokenswift.draft.planner.Planner`."""
        runner = self.model_runner
        return {**runner.stats.as_dict(), "decisions": dict(runner.drafting.planner.decisions)}
