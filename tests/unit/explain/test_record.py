"""Records survive their file; what is no record is refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import Planner
from vllm_tokenswift.explain.record import Record, read_record
from vllm_tokenswift.explain.replay import replay
from vllm_tokenswift.explain.replayed import ReplayRecorder

COST = CostModel(verify_points=((1, 10.0), (17, 12.0)), chain_ms=0.1)


def made() -> Record:
    tokens, planner = [1, 2, 3, 4] * 20, Planner(COST)
    recorder = ReplayRecorder("a/1", tokens, planner, 8, prompt_len=10)
    replay(tokens, planner, 8, 10, on_iteration=recorder.add)
    return recorder.record()


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record = made()
    path = tmp_path / "r.json"
    path.write_text(record.to_json())
    assert read_record(path) == record
    assert any(iteration.num_accepted for iteration in record.iterations)


def _without(name: str) -> str:
    raw = json.loads(made().to_json())
    del raw[name]
    return json.dumps(raw)


def _with(**values: Any) -> str:
    return json.dumps({**json.loads(made().to_json()), **values})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[1]", "not a record"),
        ("{}", "not a record"),
        (_with(format=99), "format 99"),
        (_with(sources=["self"]), "sources"),
        (_without("token_ids"), "'token_ids' is missing"),
        (
            _with(cost={"verify_points": [], "draft_points": [], "context_points": []}),
            "verify_points is empty",
        ),
        (_with(options={"plan": "no"}), "plan is 'no'"),
        (_with(token_ids=[1, 2]), "come to 80 tokens, and token_ids holds 2"),
        (_with(prompt_len=9), "iteration 0 stands at position 10, and 9 tokens"),
        (_with(iterations=3), "another kind"),
        (_with(iterations={"position": [1]}), "missing"),
    ],
)
def test_what_is_no_record_is_refused_with_the_file_and_the_reason(
    text: str, named: str, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=named) as refusal:
        read_record(path)
    assert str(path) in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none.json cannot be read: No such file"):
        read_record(tmp_path / "none.json")
