"""The planner's benchmark compares what it says it compares."""

from __future__ import annotations

import pytest

from benchmarks import planner
from benchmarks.prompts import CODE, RANDOM_NUMBERS, STORIES
from vllm_tokenswift.demo.texts import Written, WrittenBatch
from vllm_tokenswift.options import TokenSwiftOptions


def written(rate: float, per_iteration: float = 1.0) -> WrittenBatch:
    """One text of 101 tokens, the first of them from the prompt's pass."""
    seconds = [1.0, 1.0 + 100 / rate]
    stats = {"num_emitted_tokens": 100, "num_iterations": 100 / per_iteration}
    return WrittenBatch("a", [Written("a", list(range(101)), [1, 101], seconds)], stats)


def summary(auto: list[float]) -> dict[str, object]:
    return planner.summary(
        {
            "plain": [written(10.0), written(20.0)],
            "auto": [written(rate, 2.5) for rate in auto],
            "table": [written(15.0), written(30.0)],
            "suffix": [written(20.0), written(40.0)],
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


@pytest.mark.parametrize("mode", ["auto", *planner.FIXED_MODES])
def test_every_mode_is_a_configuration_that_is_allowed(mode: str) -> None:
    config = planner.engine_of(mode, "heads", 8)["speculative_config"]
    assert config.pop("method") == "tokenswift"
    assert (TokenSwiftOptions.from_dict(config).plan == "auto") == (mode == "auto")


def test_a_mode_of_one_source_has_that_source_alone() -> None:
    sources = {}
    for mode in ("table", "suffix", "heads", "self-draft"):
        config = planner.engine_of(mode, "heads", 8)["speculative_config"]
        options = TokenSwiftOptions.from_dict({k: v for k, v in config.items() if k != "method"})
        sources[mode] = {
            "table": options.ngram_k > 0,
            "suffix": options.suffix_max_match > 0,
            "heads": options.heads is not None,
            "self-draft": options.self_draft == "always",
        }
    alone = {mode: {m: m == mode for m in sources} for mode in sources}
    alone["self-draft"]["heads"] = True  # they start from the pass
    assert sources == alone


def test_modes_with_a_draft_pass_wait_for_texts_longer_than_its_budget() -> None:
    short, long = (planner.modes_for(tokens, "heads") for tokens in (400, 4000))
    assert set(long) - set(short) == {"self-draft", "paper"}
    assert "heads" not in planner.modes_for(400, None)


def test_the_requests_of_a_batch_write_different_texts() -> None:
    for prompts in (STORIES, CODE, RANDOM_NUMBERS):
        assert len(set(prompts)) == 16
    [one, many] = planner.batches(["numbers"], [1, 16], 50)
    assert len(one.texts) == 1
    assert len({text.prompt for text in many.texts}) == 16
    assert len({text.sampling["seed"] for text in many.texts}) == 16
