"""The cost model: interpolation, extrapolation, agreement through JSON."""

from dataclasses import replace

import pytest

from vllm_tokenswift.draft.planner.cost_model import CostModel

COST = CostModel(
    verify_points=((17, 34.2), (1, 18.4), (5, 22.2), (9, 26.7)),
    context_points=((1, 0.001),),
    chain_ms=0.5,
    chain_context_ms_per_token=0.002,
    draft_points=((512, 17.0), (4096, 20.0)),
)


def test_measured_points_are_returned_and_those_between_are_linear() -> None:
    assert COST.verify_ms(5) == pytest.approx(22.2)
    assert COST.verify_ms(3) == pytest.approx((18.4 + 22.2) / 2)


def test_the_last_slope_goes_on() -> None:
    assert COST.verify_ms(25) == pytest.approx(34.2 + 7.5)


def test_a_pass_over_more_rows_may_take_less_time() -> None:
    """On a CPU the matrix products of one or two rows have a slower kernel than those of four."""
    tiled = CostModel(verify_points=((1, 15.0), (2, 16.0), (4, 13.5), (8, 17.0)))
    assert tiled.verify_ms(3) == pytest.approx(14.75)
    assert tiled.verify_ms(4) == 13.5
    assert tiled.rows_ms(4, 4) == pytest.approx(3.5)
    assert tiled.rows_ms(4, 0.5) == pytest.approx(3.5 / 8)
    assert tiled.rows_ms(2, 2) == 0.0


def test_beyond_the_last_point_a_pass_takes_no_less_time() -> None:
    noisy = CostModel(verify_points=((1, 10.0), (16, 12.0), (17, 11.9)))
    assert noisy.verify_ms(4000) == 11.9
    assert noisy.verify_curve_ms(4000, 4001).tolist() == [11.9, 11.9]


def test_a_draft_pass_that_reads_more_takes_no_less_time() -> None:
    noisy = CostModel(verify_points=((1, 10.0),), draft_points=((32, 10.0), (4096, 9.9)))
    assert noisy.draft_pass_ms(4096) == 10.0


def test_the_curve_equals_single_questions() -> None:
    curve = COST.verify_curve_ms(2, 40)
    assert curve.tolist() == pytest.approx([COST.verify_ms(n) for n in range(2, 41)])


def test_context_and_chains_add_linearly() -> None:
    assert COST.verify_ms(5, 1000, 2) == pytest.approx(22.2 + 1.0 + 1.0)
    assert COST.chain_cost_ms(1000) == pytest.approx(0.5 + 2.0)


def test_a_prefix_costs_more_where_more_rows_read_it() -> None:
    cost = replace(COST, context_points=((9, 0.005), (1, 0.001), (5, 0.003), (17, 0.0049)))
    assert cost.context_ms(1000) == pytest.approx(1.0)
    assert cost.context_ms(1000, 3) == pytest.approx(2.0)
    assert cost.context_ms(1000, 40) == pytest.approx(5.0)  # more rows take no less
    assert cost.verify_ms(5, 1000) == pytest.approx(22.2 + 3.0)
    assert cost.tree_ms(4, 0, 1000) == cost.verify_ms(5, 1000)
    curve = cost.step_curve_ms(1, 30, 0.0, 1000)
    assert curve.tolist() == pytest.approx([cost.verify_ms(n, 1000) for n in range(1, 32)])
    # Of four requests, each has a row more with every fourth node.
    of_four = cost.step_curve_ms(4, 16, 0.0, 4000, 4)
    assert of_four[16] == pytest.approx(cost.verify_ms(20) + 4 * cost.context_ms(1000, 5))
    assert CostModel.from_json(cost.to_json()) == cost


def test_a_draft_pass_costs_by_the_cache_it_reads_and_the_rows_it_adds() -> None:
    assert COST.draft_pass_ms(512) == pytest.approx(17.0)
    assert COST.draft_pass_ms(2 * 512, 2) > COST.draft_pass_ms(512) + COST.verify_ms(2) - 18.5


def test_a_draft_pass_that_nobody_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="draft_points"):
        CostModel(verify_points=((1, 1.0),)).draft_pass_ms(512)


def test_json_brings_back_the_same_model() -> None:
    assert CostModel.from_json(COST.to_json()) == COST


@pytest.mark.parametrize("text", ["{}", '{"verify_points": [[1, 2]], "speed": 3}'])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a cost model"):
        CostModel.from_json(text)


@pytest.mark.parametrize(
    "fields",
    [
        {"verify_points": ()},
        {"verify_points": ((1, 0.0),)},
        {"verify_points": ((1, float("nan")),)},
        {"verify_points": ((1, 1.0),), "chain_ms": -1.0},
        {"verify_points": ((1, 1.0),), "context_points": ((0, 0.1),)},
        {"verify_points": ((1, 1.0),), "context_points": ((1, -0.1),)},
    ],
)
def test_times_that_no_machine_has_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"verify_points|chain_ms|context_points"):
        CostModel(**fields)  # type: ignore[arg-type]


def test_what_drafting_costs_the_host_counts_in_steps_with_drafts_and_in_draft_passes() -> None:
    cost = CostModel(((1, 5.0), (9, 6.0)), draft_points=((0, 4.0),), drafting_ms=1.5)
    assert cost.tree_ms(0, 0, 100) == 5.0
    assert cost.tree_ms(8, 0, 100) == 7.5
    assert cost.step_curve_ms(1, 8, cost.drafting_ms).tolist()[::8] == [5.0, 7.5]
    assert cost.step_curve_ms(1, 8).tolist()[::8] == [5.0, 6.0]
    assert cost.draft_pass_ms(10) == 5.5
    cost = replace(cost, drafting_request_ms=0.5)
    assert cost.host_drafting_ms(1) == 1.5
    assert cost.host_drafting_ms(4) == 3.0
    assert cost.draft_pass_ms(10, 4) == 4.0 + cost.rows_ms(1, 3) + 3.0
    assert CostModel.from_json(cost.to_json()) == cost
    with pytest.raises(ValueError, match="drafting_ms must be at least 0, got -1"):
        CostModel(((1, 5.0),), drafting_ms=-1)
