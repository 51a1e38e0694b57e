"""What is noted of steps, by an engine that serves them."""

from __future__ import annotations

from pathlib import Path

from benchmarks import step_costs
from vllm_tokenswift.demo import model as embedded

TOKENS = 40


def test_every_step_is_compared_with_its_plan(demo_model: Path) -> None:
    engine = {
        "model": str(demo_model),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 2,
        "enforce_eager": True,
    }
    rows = step_costs.measured(engine, embedded.HEADS, ["story"], [1, 2], TOKENS)
    assert {row["requests"] for row in rows} == {1, 2}
    assert all(row["took_ms"] > 0 for row in rows)
    alone = [row for row in rows if row["requests"] == 1]
    # A text of so many tokens takes fewer steps where drafts are accepted.
    assert 5 < sum(row["steps"] for row in alone) < TOKENS
    drafted = [row for row in alone if row["what"] == "drafted"]
    assert drafted, "nothing was drafted for a story that repeats itself"
    for row in drafted:
        assert 1 <= row["nodes"] < row["width"]
        assert row["host_ms"] > 0
    assert step_costs.table(rows).count("\n") == len(rows) + 1


def test_steps_of_a_kind_are_counted_together() -> None:
    drafted = {"requests": 1, "what": "drafted", "asked": 0, "widest": 3, "nodes": 3}
    steps = [
        {**drafted, "planned_ms": 2.0, "took_ms": took, "host_ms": 0.5} for took in (3.0, 9.0, 4.0)
    ]
    wider = {**steps[0], "widest": 4, "nodes": 4}
    assert [
        (row["width"], row["steps"], row["took_ms"]) for row in step_costs.summary([*steps, wider])
    ] == [
        (4, 3, 4.0),
        (8, 1, 3.0),
    ]
