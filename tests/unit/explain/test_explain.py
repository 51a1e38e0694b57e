"""``vllm-tokenswift explain``: the table, the report and the picture of a record."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tokenswift.cli import main
from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import Planner
from vllm_tokenswift.explain.record import PROMPT, Iteration, Record
from vllm_tokenswift.explain.replay import noisy_heads, replay
from vllm_tokenswift.explain.replayed import ReplayRecorder
from vllm_tokenswift.explain.stretches import regret_report, stretches, table, total
from vllm_tokenswift.explain.times import times_of
from vllm_tokenswift.options import TokenSwiftOptions

COST = CostModel(
    verify_points=((1, 10.0), (17, 12.0)), chain_ms=0.1, draft_points=((0, 3.0),), heads_ms=1.0
)
TEXT = [*range(100), *([1, 2, 3, 4, 5] * 40)]  # nothing repeats, then everything does


@pytest.fixture(scope="module")
def record() -> Record:
    heads = noisy_heads(TEXT, [[0.5]], free=False)
    planner = Planner(COST, 32)
    recorder = ReplayRecorder("a", TEXT, planner, 8, prompt_len=10)
    replay(TEXT, planner, 8, 10, self_heads=heads, on_iteration=recorder.add)
    return recorder.record()


def test_stretches_add_up_to_the_record(record: Record) -> None:
    parts = stretches(record, 12)
    assert 8 <= len(parts) <= 12
    whole = total(parts)
    decodes = [iteration for iteration in record.iterations if iteration.is_decode]
    assert whole.tokens == len(TEXT) - 10 - 1  # the prompt's iteration brought one
    assert whole.iterations == len(decodes)
    assert whole.drafted.total() == sum(iteration.num_drafted for iteration in decodes)
    assert whole.accepted.total() == sum(iteration.num_accepted for iteration in decodes)
    assert whole.times.total_ms == pytest.approx(
        sum(times_of(iteration, record).total_ms for iteration in decodes)
    )
    assert [part.last for part in parts[:-1]] == [part.first for part in parts[1:]]


def test_the_table_shows_where_the_text_began_to_repeat(record: Record) -> None:
    parts = stretches(record, 10)
    assert parts[0].tokens / parts[0].iterations < 3 < parts[-1].tokens / parts[-1].iterations
    header, *rows = table(parts).splitlines()
    assert {"suffix", "self", "drafted", "passes"} <= set(header.split())
    assert len(rows) == len(parts) + 1
    assert rows[-1].split()[:2] == ["all", str(len(TEXT) - 11)]


def test_the_report_names_every_cause_and_the_oracle_s_time(record: Record) -> None:
    whole = total(stretches(record, 10))
    head, *causes = regret_report(whole).splitlines()
    assert f"{whole.times.total_ms - whole.regret.total_ms:.0f} ms" in head
    assert len(causes) == 5
    milliseconds = [float(line.split(" ms ")[0].split()[-1]) for line in causes]
    assert sum(milliseconds) == pytest.approx(whole.regret.total_ms, abs=3)


def test_a_pass_costs_a_plain_row_where_none_could_be_measured() -> None:
    cost = CostModel(verify_points=((1, 10.0),), context_points=((1, 0.1),))
    options = TokenSwiftOptions(budget_tokens=32)
    decode = Iteration(100, 1, passes=2)
    record = Record("r", 100, [0] * 101, cost, options, [decode])
    assert times_of(decode, record).passes_ms == pytest.approx(2 * (10 + 3.2))


def test_explain_prints_and_draws(
    record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    path.write_text(record.to_json())
    assert main(["explain", str(path), "--rows", "10"]) == 0
    printed = capsys.readouterr().out
    assert "10 prompt tokens, 290 written; plan auto" in printed
    assert "An oracle takes" in printed
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_explain_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    assert main(["explain", str(path)]) == 1
    assert "cannot be read" in capsys.readouterr().err
    only_prompt = Record(
        "r", 1, [1, 2], COST, TokenSwiftOptions(), [Iteration(1, 1, decisions=(PROMPT,))]
    )
    path.write_text(only_prompt.to_json())
    assert main(["explain", str(path)]) == 1
    assert "no decode iteration" in capsys.readouterr().err
    assert main(["explain", str(path), "--rows", "0"]) == 1
    assert "--rows is 0" in capsys.readouterr().err
