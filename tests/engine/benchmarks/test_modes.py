"""One engine in many modes: each is what an engine of its own is, and none is left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_kit import engine as inner_engine
from engine_kit import generate, prompt_of, runner_of, tokenswift
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from benchmarks import modes, planner
from benchmarks.prompts import STORY
from vllm_tokenswift.demo import engine_child
from vllm_tokenswift.demo import model as embedded
from vllm_tokenswift.demo.texts import PENALISED, Batch, TextRequest, WrittenBatch
from vllm_tokenswift.options import TokenSwiftOptions

NODES = 5
SOURCES = {
    "fixed": {"ngram", "suffix", "free_heads"},
    "table": {"ngram"},
    "suffix": {"suffix"},
    "heads": {"free_heads"},
    "self-draft": {"self", "heads"},
}
LENGTH = {"max_tokens": 60, "ignore_eos": True}
BATCH = Batch(
    "story",
    [
        TextRequest("greedy", STORY, {"temperature": 0.0, **LENGTH}),
        TextRequest("sampled", STORY, {"temperature": 1.0, "seed": 3, **LENGTH}),
    ],
)


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> dict[str, Any]:
    return {
        "model": str(demo_model),
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 2,
        "enforce_eager": True,
        "enable_prefix_caching": False,  # the first turn reads what the others read
    }


@pytest.fixture(scope="module")
def written(engine: dict[str, Any]) -> dict[str, WrittenBatch]:
    """The batch in every mode, by one engine; "auto again" is its last turn."""
    turns = ["plain", "auto", *SOURCES, "auto"]
    found: dict[str, WrittenBatch] = {}
    with modes.engines(engine, embedded.HEADS, turns, NODES) as in_mode:
        for mode in turns:
            [found["auto again" if mode in found else mode]] = in_mode(mode).write([BATCH])
    return found


def counted(batch: WrittenBatch) -> dict[str, Any]:
    """What the counters grew by, those left out that did not."""

    def grown(counters: dict[str, Any]) -> dict[str, Any]:
        found = {k: grown(v) if isinstance(v, dict) else v for k, v in counters.items()}
        return {name: value for name, value in found.items() if value}

    return grown(batch.stats)


def tokens_of(batch: WrittenBatch) -> list[list[int]]:
    return [text.tokens for text in batch.texts]


@pytest.mark.parametrize("mode", SOURCES)
def test_a_mode_drafts_from_its_sources_alone_and_up_to_its_limit(
    written: dict[str, WrittenBatch], mode: str
) -> None:
    stats = counted(written[mode])
    assert set(stats["drafted_by_source"]) == SOURCES[mode]
    assert 0 < stats["num_draft_tokens"] <= NODES * stats["num_drafting_iterations"]
    assert ("num_draft_passes" in stats) == (mode == "self-draft")
    assert set(stats["decisions"]) <= {"drafted", "plain", "none"}  # no source was weighed


def test_the_engine_plans_again_as_if_it_had_never_been_in_another_mode(
    written: dict[str, WrittenBatch],
) -> None:
    auto = counted(written["auto"])
    assert counted(written["auto again"]) == auto
    assert auto["decisions"]["free_heads"] > 0


def test_all_modes_write_the_tokens_of_plain_vllm(written: dict[str, WrittenBatch]) -> None:
    assert written["plain"].stats == {}
    for mode, batch in written.items():
        assert tokens_of(batch) == tokens_of(written["plain"]), mode


def test_every_mode_runs_the_draft_pass_of_the_engine(tiny_model: Path) -> None:
    """There the graphs of a GPU are captured over its buffers; another pass would not be."""
    fixed = {"always": {"plan": "fixed", "self_draft": "always"}}
    arguments = {
        **tokenswift(plan="auto"),
        "worker_extension_cls": f"{modes.__name__}.ModesOfAWorker",
    }
    with inner_engine(tiny_model, **arguments) as llm:
        runner = runner_of(llm)
        llm.collective_rpc("make_modes", args=(fixed,))
        llm.collective_rpc("change_mode", args=("always",))
        run, passes = runner.draft_pass.run, []

        def counted_run(rows: Any) -> Any:
            passes.append(rows)
            return run(rows)

        runner.draft_pass.run = counted_run
        generate(llm, [prompt_of(20, seed=0)], SamplingParams(temperature=0, max_tokens=9))
        assert len(passes) == runner.stats.num_draft_passes > 0


@pytest.mark.parametrize("mode", ["fixed", "table"])  # with heads and without
def test_a_mode_is_what_an_engine_of_its_own_is(
    written: dict[str, WrittenBatch], engine: dict[str, Any], mode: str
) -> None:
    options = {"heads": embedded.HEADS, **modes.options_of(mode, NODES)}
    own = {**engine, "speculative_config": {"method": "tokenswift", **options}}
    as_in_its_process = {"block_size": None, "kv_cache_memory_bytes": 1 << 27}
    with inner_engine(**own, **as_in_its_process) as alone:
        batch = engine_child.write(alone, BATCH, speculates=True)
    assert counted(batch) == counted(written[mode])


def test_an_engine_has_no_room_for_more_nodes_than_it_started_with(engine: dict[str, Any]) -> None:
    with (
        pytest.raises(ValueError, match="fixed modes of 64 nodes: the engine drafts up to 63"),
        modes.engines(engine, None, ["table"], 64),
    ):
        raise AssertionError("they were started")


@pytest.mark.parametrize("mode", modes.FIXED_MODES)
def test_every_mode_is_a_configuration_that_is_allowed(mode: str) -> None:
    options = TokenSwiftOptions(**{"heads": "heads", **modes.options_of(mode, NODES)})
    assert options.plan != "auto"
    assert options.num_speculative_tokens == NODES


def test_modes_with_a_draft_pass_wait_for_texts_longer_than_its_budget() -> None:
    short, long = (modes.modes_for(tokens, "heads") for tokens in (400, 4000))
    assert set(long) - set(short) == {"self-draft", "paper"}
    assert "heads" not in modes.modes_for(400, None)


def test_an_engine_for_vllms_own_speculation_is_kept_where_it_is_asked_for() -> None:
    for asked in ([modes.PLAIN, modes.AUTO], modes.modes_for(4000, "heads")):
        assert set(modes.engines_for(asked, "heads")) == {modes.PLAIN, modes.AUTO}
    kept = modes.engines_for([modes.AUTO, modes.NGRAM], "heads")
    assert set(kept) == {modes.PLAIN, modes.AUTO, modes.NGRAM}


def test_vllms_own_speculation_can_write_every_kind_of_text(
    engine: dict[str, Any], tiny_model: Path
) -> None:
    config = EngineArgs(
        **{**engine, **modes.ngram_engine(), "model": str(tiny_model)}, skip_tokenizer_init=True
    ).create_engine_config()
    assert config.speculative_config.method == "ngram"

    def verify(sampling: dict[str, Any]) -> None:
        params = SamplingParams(**sampling)
        params.verify(config.model_config, config.speculative_config, None, None)

    for batch in planner.batches(list(planner.KINDS), {2: 50}, repeat=0):
        for text in modes.batch_for(modes.NGRAM, batch).texts:
            verify(text.sampling)
    with pytest.raises(VLLMValidationError, match="min_p"):
        verify(PENALISED)


def test_vllms_own_speculation_is_asked_for_the_same_texts_with_what_it_has_for_them() -> None:
    penalised = {**PENALISED, **LENGTH, "seed": 3}
    batch = Batch("story", [*BATCH.texts, TextRequest("penalised", STORY, penalised)])
    for mode in (modes.PLAIN, modes.AUTO, *modes.FIXED_MODES):
        assert modes.batch_for(mode, batch) == batch
    nearest = {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1, **LENGTH, "seed": 3}
    assert modes.batch_for(modes.NGRAM, batch) == Batch(
        "story", [*BATCH.texts, TextRequest("penalised", STORY, nearest)]
    )
