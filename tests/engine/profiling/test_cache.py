"""Measured costs are kept for the same machine and configuration, and for no other."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_kit import engine, runner_of, tokenswift
from vllm.engine.arg_utils import EngineArgs

from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.engine.profiling import pass_times
from vllm_tokenswift.engine.profiling.cache import (
    cost_folder,
    cost_key,
    cost_path,
    read_cost,
    write_cost,
)
from vllm_tokenswift.engine.profiling.pass_times import Contexts, PassTimes, single_request_shapes
from vllm_tokenswift.heads.model import DraftHeads

pytestmark = pytest.mark.measured_costs
KEY = {"machine": "a test's"}
COST = CostModel(
    ((1, 18.4), (5, 22.2)),
    context_points=((1, 0.001),),
    chain_ms=0.5,
    chain_context_ms_per_token=0.002,
    draft_points=((512, 17.0),),
    heads_ms=1.5,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TOKENSWIFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_a_kept_curve_is_read_for_its_key_alone(home: Path) -> None:
    assert read_cost(KEY) is None
    write_cost(KEY, COST)
    assert read_cost(KEY) == COST
    assert read_cost({**KEY, "machine": "another"}) is None
    assert [path.parent for path in home.rglob("*.json")] == [cost_folder()]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "\x00" * 100,
        json.dumps({"key": KEY}),
        json.dumps({"key": KEY, "cost": {"verify_points": [[1, -3.0]]}}),
        json.dumps({"key": {**KEY, "machine": "another"}, "cost": json.loads(COST.to_json())}),
    ],
)
def test_a_broken_or_foreign_file_is_not_believed_and_is_replaced(home: Path, text: str) -> None:
    cost_folder().mkdir(parents=True)
    cost_path(KEY).write_text(text)
    assert read_cost(KEY) is None
    write_cost(KEY, COST)
    assert read_cost(KEY) == COST


def test_a_home_that_cannot_be_written_stops_nobody(home: Path) -> None:
    home.write_text("a file where the folder should be")
    write_cost(KEY, COST)
    assert read_cost(KEY) is None


def test_nothing_is_left_beside_the_file(home: Path) -> None:
    write_cost(KEY, COST)
    write_cost(KEY, COST)
    assert list(cost_folder().iterdir()) == [cost_path(KEY)]


def key_of(model: Path, **changes: Any) -> dict[str, Any]:
    given = {
        "dtype": "float32",
        "max_nodes": 8,
        "contexts": Contexts(32, 512, 512),
        "heads": None,
        **changes,
    }
    config = EngineArgs(
        str(model), dtype=given["dtype"], skip_tokenizer_init=True, enforce_eager=True
    ).create_engine_config()
    attention: Any = SimpleNamespace(block_size=given.get("block_size", 32), max_side_chains=8)
    curve = PassTimes(attention, None, None, None, None, torch.device("cpu"))  # type: ignore[arg-type]
    shapes = single_request_shapes(given["max_nodes"])
    return dict(cost_key(config, curve, given["heads"], shapes, given["contexts"]))


def test_every_part_of_the_configuration_has_a_file_of_its_own(
    home: Path, tiny_model: Path, tmp_path: Path
) -> None:
    other = tmp_path / "deeper"
    other.mkdir()
    config = json.loads((tiny_model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    keys = [
        key_of(tiny_model),
        key_of(tiny_model, dtype="bfloat16"),
        key_of(tiny_model, max_nodes=9),
        key_of(tiny_model, contexts=Contexts(32, 256, 256)),
        key_of(tiny_model, contexts=Contexts(32, 512, 1024)),
        key_of(tiny_model, block_size=64),
        key_of(tiny_model, heads=DraftHeads("linear", 3, 128, 1e-6)),
        key_of(tiny_model, heads=DraftHeads("released", 3, 128, 1e-6)),
        key_of(other),
    ]
    assert len({cost_path(key) for key in keys}) == len(keys)
    assert cost_path(key_of(tiny_model)) == cost_path(keys[0])
    write_cost(keys[0], COST)
    assert read_cost(key_of(tiny_model)) == COST


def test_a_copy_of_a_model_costs_what_the_model_costs(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    assert key_of(tmp_path) == key_of(tiny_model)


def test_two_ranks_plan_with_what_the_first_one_measured_or_had_kept(
    home: Path, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    outs = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    homes = [home, tmp_path / "home of rank 1"]
    script = Path(__file__).parent / "cost_cache_rank.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), port, json.dumps(KEY), outs[rank]],
            env={**os.environ, "TOKENSWIFT_HOME": str(homes[rank])},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    planned_with = [
        CostModel.from_json(line) for out in outs for line in out.read_text().splitlines()
    ]
    of_a_rank = [CostModel(((1, ms),)) for ms in (10.0, 10.0, 30.0)]
    assert planned_with == of_a_rank * 2
    assert read_cost(KEY) == of_a_rank[-1]
    assert not homes[1].exists()


class Clock:
    """Stands still but for what passes take by ``pass_ms``, and can be asked as ``time`` is."""

    def __init__(self, pass_ms: Callable[[Sequence[int], int], float]) -> None:
        self.pass_ms = pass_ms
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds

    def make_pass(self, query_lens: Sequence[int], context: int, _: object) -> Callable[[], None]:
        ms = self.pass_ms(query_lens, context)

        def run() -> None:
            self.seconds += ms / 1000

        return run


def timed_by(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> PassTimes:
    monkeypatch.setattr(pass_times, "time", clock)
    attention: Any = SimpleNamespace(block_size=16, chains_cost=False)
    return PassTimes(attention, clock.make_pass, lambda _: None, None, None, torch.device("cpu"))


def test_a_machine_that_does_something_else_half_of_the_time_is_measured_as_if_it_did_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass takes a millisecond a row, and three of every six ten besides."""
    number = itertools.count()

    def pass_ms(query_lens: Sequence[int], _: int) -> float:
        return sum(query_lens) + 10.0 * (next(number) // 3 % 2)

    curve = timed_by(Clock(pass_ms), monkeypatch)
    shapes = single_request_shapes(3)
    cost = curve.measure(shapes, Contexts(32, 32, 32))
    assert [cost.verify_ms(n) for n in (1, 2, 3, 4)] == pytest.approx([1, 2, 3, 4])
    assert curve.plain_ms(shapes, 32) == pytest.approx(1)


def test_what_prefixes_cost_is_measured_for_a_row_and_for_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A row takes a millisecond and one more for each 100 tokens of prefix, as on a CPU."""

    def pass_ms(query_lens: Sequence[int], context: int) -> float:
        return sum(query_lens) * (1 + context / 100)

    curve = timed_by(Clock(pass_ms), monkeypatch)
    cost = curve.measure(single_request_shapes(3), Contexts(10, 210, 410))
    assert [rows for rows, _ in cost.context_points] == [1, 2, 4]
    for rows in (1, 2, 3, 4):
        # The shortest prefix that is timed, of ten tokens, counts as none.
        assert cost.verify_ms(rows, 1000) == pytest.approx(rows * (1.1 + 10))
    assert cost.draft_pass_ms(210) == pytest.approx(3.1)


def test_prefixes_are_timed_far_from_the_beginning_on_a_gpu_where_there_is_room() -> None:
    attention: Any = SimpleNamespace(block_size=16, chains_cost=False)
    shapes = single_request_shapes(7)

    def contexts(device: str, num_blocks: int, max_model_len: int) -> Contexts:
        curve = PassTimes(attention, None, None, None, None, torch.device(device))  # type: ignore[arg-type]
        return curve.contexts(shapes, num_blocks, max_model_len)

    assert contexts("cuda", 10_000, 100_000) == Contexts(32, 4096, 32_768)
    assert contexts("cuda", 1001, 100_000) == Contexts(32, 4096, 16_000 - 8)
    assert contexts("cuda", 10_000, 3000) == Contexts(32, 3000 - 8, 3000 - 8)
    assert contexts("cpu", 10_000, 100_000) == Contexts(32, 4096, 4096)
    assert not contexts("cpu", 10_000, 72).differ


def test_an_engine_that_starts_again_plans_with_the_kept_curve_unless_it_was_a_busy_machine_s(
    home: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on a millisecond whenever it is asked: so much does a pass take."""
    ticks = itertools.count()
    monkeypatch.setattr(
        pass_times, "time", SimpleNamespace(perf_counter=lambda: next(ticks) / 1000)
    )
    with engine(tiny_model, **tokenswift()) as llm:
        measured = runner_of(llm).tree_drafter.planner.cost
    [path] = cost_folder().iterdir()
    kept = json.loads(path.read_text())
    assert CostModel.from_json(json.dumps(kept["cost"])) == measured
    assert measured.context_points[0][0] == 1
    assert len(measured.context_points) > 1
    assert measured.verify_ms(1) == pytest.approx(1.0)
    of_a_quiet_machine = replace(COST, verify_points=((1, 0.1),))
    of_a_busy_one = replace(COST, verify_points=((1, 10.0),))
    for written in (of_a_quiet_machine, of_a_busy_one):
        write_cost(kept["key"], written)
        with engine(tiny_model, **tokenswift()) as llm:
            planned_with = runner_of(llm).tree_drafter.planner.cost
        assert (planned_with == written) is (written == of_a_quiet_machine)
    assert read_cost(kept["key"]) == planned_with
