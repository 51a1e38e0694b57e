"""What is noted of steps, by a clock that is set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import watched_steps
from vllm_tokenswift.draft.planner.cost_model import CostModel


def test_a_step_goes_from_its_samples_to_the_next_ones_and_the_host_s_part_to_its_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(ms=0.0)
    clock.perf_counter = lambda: clock.ms / 1000
    monkeypatch.setattr(watched_steps, "time", clock)

    def passing(ms: float) -> Any:
        def run(*_: object) -> None:
            clock.ms += ms

        return run

    planner = SimpleNamespace(cost=CostModel(((1, 10.0), (3, 14.0))), trees=passing(1.0))
    next_step = SimpleNamespace(begin_drafts=passing(0.5), draft=passing(2.0))
    drafter = SimpleNamespace(planner=planner)
    worker = watched_steps.StepsOfAWorker()
    worker.model_runner = SimpleNamespace(next_step=next_step, tree_drafter=drafter)
    worker.watch_steps()

    requests = [SimpleNamespace(heads=None), SimpleNamespace(heads="heads")]
    next_step.begin_drafts(requests, None, None)  # planned for
    planner.trees(SimpleNamespace(requests=requests, counts=[0, 3], step_ms=12.0))
    next_step.draft()
    clock.ms += 20.0
    next_step.begin_drafts(requests, None, None)  # not planned for
    next_step.draft()
    clock.ms += 10.0
    next_step.begin_drafts(requests, None, None)  # not over

    noted = {"requests": 2, "took_ms": 0.5 + 1.0 + 2.0 + 20.0, "host_ms": 0.5 + 1.0 + 2.0}
    planned = {"what": "drafted", "planned_ms": 12.0, "nodes": 3, "widest": 3, "asked": 1}
    unplanned = {"what": "undrafted", "planned_ms": 12.0, "nodes": 0, "widest": 0, "asked": 0}
    first, second = worker.steps_seen()
    assert first == pytest.approx({**noted, **planned})
    assert second == pytest.approx({**noted, "took_ms": 12.5, "host_ms": 0.0, **unplanned})
    assert worker.steps_seen() == []
