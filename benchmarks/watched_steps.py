"""Notes what steps of an engine were planned to take, and what they take.

A worker extension: its methods run where the planner does. A step goes from the moment when its
predecessor's samples are known to the moment when its own are.
"""

from __future__ import annotations

import time
from typing import Any

Step = dict[str, Any]
"""Of one step: ``requests``, ``planned_ms``, ``took_ms``, ``host_ms`` (from its samples to the
launch of its pass, 0 where that was launched before), ``nodes`` and ``widest`` (drafts of all
requests, and of that with the most), ``asked`` (requests whose heads were), ``what`` it was."""


class StepsOfAWorker:
    """Methods for TokenSwift's workers (vLLM's ``worker_extension_cls``)."""

    model_runner: Any

    def watch_steps(self) -> None:
        """Notes every step from now on, of plan "auto"."""
        runner = self.model_runner
        next_step, planner = runner.next_step, runner.tree_drafter.planner
        begin_drafts, draft = next_step.begin_drafts, next_step.draft
        trees = planner.trees
        self._steps: list[Step] = []

        def begin_noted(groups: Any, accepted: Any, hidden_states: Any) -> None:
            now = time.perf_counter()
            if self._steps:
                self._steps[-1]["took_ms"] = 1e3 * (now - self._steps[-1]["began"])
            num_requests = len(groups)
            self._steps.append(
                {
                    "requests": num_requests,
                    "what": "undrafted",
                    "began": now,
                    "planned_ms": planner.cost.verify_ms(num_requests),
                    "host_ms": 0.0,
                    "nodes": 0,
                    "widest": 0,
                    "asked": 0,
                }
            )
            begin_drafts(groups, accepted, hidden_states)

        def trees_noted(plan: Any) -> Any:
            self._steps[-1].update(
                what="drafted" if any(plan.counts) else "found nothing",
                planned_ms=plan.step_ms,
                nodes=sum(plan.counts),
                widest=max(plan.counts),
                asked=sum(request.heads is not None for request in plan.requests),
            )
            return trees(plan)

        def draft_noted() -> Any:
            drafted = draft()
            step = self._steps[-1]
            if step["what"] != "undrafted":
                step["host_ms"] = 1e3 * (time.perf_counter() - step["began"])
            return drafted

        next_step.begin_drafts, next_step.draft = begin_noted, draft_noted
        planner.trees = trees_noted

    def steps_seen(self) -> list[Step]:
        """Those since the last call that are over."""
        seen = [step for step in self._steps if "took_ms" in step]
        self._steps = []
        return [{name: step[name] for name in step if name != "began"} for step in seen]
