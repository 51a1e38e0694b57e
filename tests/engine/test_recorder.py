"""The option ``record``: a file for every request that ends, that adds up to its text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_kit import engine, generate, prompt_of, runner_of, tokenswift
from vllm import SamplingParams

from vllm_tokenswift.draft.planner.cost_model import CostModel
from vllm_tokenswift.draft.planner.planner import Planner
from vllm_tokenswift.draft.proposals.head_proposals import HeadProposals
from vllm_tokenswift.engine.draft_request import NO_DRAFTS, Drafts
from vllm_tokenswift.engine.recorder import Recorder, file_stem
from vllm_tokenswift.explain.record import Record, read_record
from vllm_tokenswift.explain.stretches import stretches, total
from vllm_tokenswift.options import TokenSwiftOptions
from vllm_tokenswift.tree import EMPTY_TREE, DraftTree, Source

GREEDY = {"temperature": 0, "ignore_eos": True}


def test_records_of_finished_requests_add_up_to_what_was_written(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "records"
    prompts = [prompt_of(20, 0), prompt_of(30, 1)]
    params = [SamplingParams(max_tokens=n, **GREEDY) for n in (100, 60)]
    options = {"record": str(folder), "self_draft": "always"}
    with engine(tiny_model, **tokenswift(**options)) as llm:
        written = generate(llm, prompts, params)
        [stats] = llm.collective_rpc("tokenswift_stats")
        cost = runner_of(llm).tree_drafter.planner.cost
    # The engine is gone, and with it the last request's end has been noticed.
    records = sorted(map(read_record, folder.iterdir()), key=lambda record: record.prompt_len)
    texts = [prompt["prompt_token_ids"] + ids for prompt, ids in zip(prompts, written, strict=True)]
    assert [record.token_ids for record in records] == texts
    assert [record.prompt_len for record in records] == [20, 30]
    assert all(record.cost == cost for record in records)

    wholes = [total(stretches(record, 10)) for record in records]
    for name, counts in (
        ("drafted", stats["drafted_by_source"]),
        ("accepted", stats["accepted_by_source"]),
    ):
        assert sum((getattr(whole, name) for whole in wholes), type(wholes[0].drafted)()) == counts
    assert "self" in stats["drafted_by_source"]
    iterations = sum(len(record.iterations) for record in records)
    assert iterations == stats["num_iterations"]
    for record in records:
        assert record.iterations[0].decisions == ("prompt",)
        assert record.iterations[1].decisions == ("drafted", "self_draft")
        assert record.iterations[1].passes == 1
        assert record.iterations[1].num_requests == 2


def test_nothing_is_recorded_unless_asked_for(tiny_model: Path) -> None:
    with engine(tiny_model, **tokenswift()) as llm:
        assert runner_of(llm).recorder is None


def recorder(folder: Path, **options: Any) -> tuple[Recorder, Planner]:
    planner = Planner(CostModel(verify_points=((1, 10.0),)))
    return Recorder(folder, TokenSwiftOptions(**options), planner), planner


def written(folder: Path) -> list[Record]:
    return [read_record(path) for path in sorted(folder.iterdir())]


def test_a_tree_counts_with_what_was_decided_and_spent_for_it(tmp_path: Path) -> None:
    recording, planner = recorder(tmp_path)
    recording.start("a", [5, 6], sampled=False)
    recording.note_iteration("a", EMPTY_TREE, [], [7], 1)
    said = HeadProposals([[8], [4]], [[0.5], [0.5]], free=False, own_depths=2)
    planner.decisions["self_draft_probe"] += 1
    tree = DraftTree.build([8, 9], [0, 0], [Source.SELF, Source.NGRAM])
    recording.note_drafts({"a": Drafts(tree, said)})
    recording.note_iteration("a", tree, [1], [8, 4], 3)
    recording.note_drafts({"a": NO_DRAFTS})
    recording.note_iteration("a", EMPTY_TREE, [], [3], 1)
    recording.note_iteration("a", EMPTY_TREE, [], [2], 1)
    recording.finish("a")

    [record] = written(tmp_path)
    assert record.token_ids == [5, 6, 7, 8, 4, 3, 2]
    prompt, probe, plain, unplanned = record.iterations
    assert prompt.decisions == ("prompt",)
    assert probe.decisions == ("drafted", "self_draft_probe")
    assert (probe.position, probe.emitted, probe.passes, probe.num_requests) == (3, 2, 2, 3)
    assert (probe.drafted[Source.SELF], probe.drafted[Source.NGRAM]) == (1, 1)
    assert (probe.accepted[Source.SELF], probe.accepted[Source.NGRAM]) == (1, 0)
    assert probe.side_chains == 1
    assert (plain.decisions, plain.passes) == (("plain",), 0)
    assert unplanned.decisions == ("none",)


@pytest.mark.parametrize("self_draft", ["auto", "always"])
def test_where_nothing_is_found_most_steps_are_not_looked_at_and_the_record_says_so(
    tiny_model: Path, tmp_path: Path, self_draft: str
) -> None:
    """Without any source of drafts; a self-draft pass that is asked for always is always run."""
    prompts, params = [prompt_of(20, 0), prompt_of(30, 1)], SamplingParams(max_tokens=120, **GREEDY)
    with engine(tiny_model) as llm:
        plain = generate(llm, prompts, params)
    options = {"plan": "auto", "ngram_k": 0, "suffix_max_match": 0, "self_draft": self_draft}
    with engine(tiny_model, **tokenswift(record=str(tmp_path), **options)) as llm:
        assert generate(llm, prompts, params) == plain
        [stats] = llm.collective_rpc("tokenswift_stats")
    records = written(tmp_path)
    decisions = [i.decisions for record in records for i in record.iterations]
    rested = sum(decided == ("rested",) for decided in decisions)
    assert stats["decisions"]["rested"] == rested
    if self_draft == "always":
        assert rested == 0
    else:
        assert rested > 80
        assert decisions.count(("none",)) == len(records), "the last step has no room for drafts"


def test_an_id_that_comes_again_gets_a_file_of_its_own(tmp_path: Path) -> None:
    recording, _ = recorder(tmp_path)
    for tokens in ([1], [2, 3]):
        recording.start("a", tokens, sampled=True)
        recording.note_iteration("a", EMPTY_TREE, [], [9], 1)
        recording.finish("a")
    assert [record.token_ids for record in written(tmp_path)] == [[2, 3, 9], [1, 9]]
    assert all(record.sampled for record in written(tmp_path))


def test_a_request_that_wrote_nothing_leaves_no_record(tmp_path: Path) -> None:
    recording, _ = recorder(tmp_path)
    recording.start("a", [1], sampled=False)
    recording.finish_all()
    assert written(tmp_path) == []


@pytest.mark.parametrize("req_id", ["../../etc/passwd", "a/b", "..", "x" * 500, "ä\n\0"])
def test_a_request_s_id_cannot_name_a_file_elsewhere(req_id: str, tmp_path: Path) -> None:
    name = file_stem(req_id) + ".json"
    assert (tmp_path / name).resolve().parent == tmp_path.resolve()
    assert len(name) < 200


def test_a_disk_that_fails_does_not_end_the_engine(tmp_path: Path) -> None:
    recording, _ = recorder(tmp_path / "gone")
    recording.start("a", [1], sampled=False)
    recording.note_iteration("a", EMPTY_TREE, [], [9], 1)
    recording.finish("a")
    assert not (tmp_path / "gone").exists()
