"""The planner's benchmark compares what it says it compares."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import planner
from benchmarks.prompts import CODE, RANDOM_NUMBERS, STORIES
from vllm_tokenswift.demo.texts import Written, WrittenBatch


def written(rate: float, per_iteration: float | None = None) -> WrittenBatch:
    """One text of 101 tokens, the first of them from the prompt's pass.

    per_iteration: tokens of each of TokenSwift's; None of an engine that is not its own.
    """
    seconds = [1.0, 1.0 + 100 / rate]
    counters = {"num_emitted_tokens": 100, "num_iterations": 100 / (per_iteration or 1.0)}
    stats = counters if per_iteration else {}
    return WrittenBatch("a", [Written("a", list(range(101)), [1, 101], seconds)], stats)


def summary(auto: list[float], **others: list[WrittenBatch]) -> dict[str, Any]:
    return planner.summary(
        {
            "plain": [written(10.0), written(20.0)],
            "auto": [written(rate, 2.5) for rate in auto],
            "table": [written(15.0, 1.5), written(30.0, 1.5)],
            "suffix": [written(20.0, 2.0), written(40.0, 2.0)],
            **others,
        }
    )


def test_auto_is_held_against_the_best_fixed_mode_repeat_by_repeat() -> None:
    result = summary([19.0, 42.0])
    assert result["best_fixed_mode"] == "suffix"
    assert result["auto_to"] == {
        "plain": pytest.approx([1.9, 2.1]),
        "best fixed mode": pytest.approx([0.95, 1.05]),
    }
    assert result["reaches_goal"] == {"plain": True, "best fixed mode": True}
    assert result["tokens_per_iteration"]["auto"] == pytest.approx([2.5, 2.5])


def test_the_table_says_where_the_goal_is_missed() -> None:
    results = [{"text": "a", "batch": 4, **summary(auto)} for auto in ([20.0, 40.0], [19.0, 38.0])]
    good, bad = planner.table(results).splitlines()[2:]
    assert good.endswith("| suffix | 1.00 (1.00 to 1.00) | yes |")
    assert bad.endswith("| suffix | 0.95 (0.95 to 0.95) | **no** |")


def test_the_table_says_how_far_auto_is_from_plain_in_every_repeat() -> None:
    [row] = planner.table([{"text": "a", "batch": 4, **summary([19.0, 42.0])}]).splitlines()[2:]
    assert row.startswith("| a | 1.00 | 4 | 15.0 | 2.00 (1.90 to 2.10) |")


def test_vllms_own_speculation_is_compared_with_plain_and_is_no_fixed_mode() -> None:
    faster_than_all = [written(30.0), written(90.0)]
    result, without = summary([19.0, 42.0], ngram=faster_than_all), summary([19.0, 42.0])
    assert result["times_plain"].pop("ngram") == pytest.approx([3.0, 4.5])
    assert result["tokens_per_second"].pop("ngram") == pytest.approx([30.0, 90.0])
    # It counts nothing, nothing is held against it, and it changes nothing else.
    assert result == without
    assert set(result["stats"]) == {"auto", "table", "suffix"}


def test_the_table_has_a_column_for_vllms_own_speculation_where_it_was_asked_for() -> None:
    result = summary([19.0, 42.0], ngram=[written(30.0), written(90.0)])
    header, _, row = planner.table([{"text": "a", "batch": 4, **result}]).splitlines()
    assert "| suffix, times plain | ngram, times plain | tokens/iteration (auto) |" in header
    assert "| 2.00 (2.00 to 2.00) | 3.75 (3.00 to 4.50) | 2.50 | suffix |" in row
    assert "ngram" not in planner.table([{"text": "a", "batch": 4, **summary([19.0, 42.0])}])


def test_the_record_names_the_texts_that_vllms_own_speculation_samples_otherwise() -> None:
    instead = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1}
    assert planner.sampled_otherwise(list(planner.KINDS)) == {
        "sampled, windowed penalty 1.1": instead
    }
    assert planner.sampled_otherwise(["story", "code"]) == {}


def test_the_engines_together_fit_into_a_gpu() -> None:
    assert planner.gpu_share(["plain", "auto", "table"]) == 0.4
    assert planner.gpu_share(["plain", "auto", "ngram"]) == 0.27


def test_the_requests_of_a_batch_write_different_texts() -> None:
    for prompts in (STORIES, CODE, RANDOM_NUMBERS):
        assert len(set(prompts)) == 16
    [one, many] = planner.batches(["numbers"], {1: 50, 16: 20}, repeat=0)
    assert len(one.texts) == 1
    assert len({text.prompt for text in many.texts}) == 16
    assert [text.sampling["max_tokens"] for text in one.texts + many.texts] == [50] + [20] * 16


def test_every_text_of_every_repeat_has_a_seed_of_its_own() -> None:
    seeds = [
        text.sampling["seed"]
        for repeat in range(3)
        for batch in planner.batches(["sampled"], {16: 20}, repeat)
        for text in batch.texts
    ]
    assert len(set(seeds)) == 3 * 16
