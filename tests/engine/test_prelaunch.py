"""Verify passes launched before their step is scheduled, as on a GPU; here on the CPU's engine.

There a pass is over when its launch returns, so nothing is gained; but whatever could go wrong
with what a pass ahead writes, and with steps that come otherwise, goes wrong here as well.
"""

from __future__ import annotations

from types import SimpleNamespace

import engine_kit
import pytest
from engine_kit import engine, generate, prompt_of, runner_of, tokenswift
from vllm import SamplingParams

from vllm_tokenswift.demo.texts import WINDOWED_PENALTY
from vllm_tokenswift.draft.draft_state import DraftState
from vllm_tokenswift.engine import runner as runner_module
from vllm_tokenswift.engine.profiling import cache as cost_cache
from vllm_tokenswift.engine.profiling import host_time
from vllm_tokenswift.engine.runner import TokenSwiftRunnerMixin
from vllm_tokenswift.explain.record import Record
from vllm_tokenswift.metrics import Stats

PENALTY = {"penalty_theta": 1.3, "penalty_window": 64}


@pytest.fixture
def prelaunches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenSwiftRunnerMixin, "prelaunches", True)


@pytest.fixture
def runs_ahead(prelaunches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a launch takes as long as its pass: counted as host time it would forbid drafting."""
    monkeypatch.setattr(runner_module, "drafting_ms", lambda *_: (0.0, 0.0))


def params_of(max_tokens: int, seed: int) -> SamplingParams:
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0, "min_p": 0.1, "extra_args": PENALTY},
        {"temperature": 0.0, "extra_args": {"tokenswift": False}},
    ]
    return SamplingParams(
        **kinds[seed % len(kinds)], seed=seed, max_tokens=max_tokens, ignore_eos=True
    )


PROMPTS = [prompt_of(7 + 9 * i, seed=i) for i in range(11)]
PARAMS = [params_of(40 + 23 * (i % 4), i) for i in range(11)]


def steps(llm, arrivals, aborts=None, params=PARAMS):
    """Steps an engine; requests arrive, and are aborted, at given steps (step -> request)."""
    core, written, ids = llm.llm_engine, {}, {}
    for step in range(2000):
        if step in arrivals:
            i = arrivals[step]
            ids[i] = core.add_request(str(i), PROMPTS[i], params[i])
        if step in (aborts or {}):
            core.abort_request([ids[aborts[step]]], internal=True)
        for output in core.step():
            written[int(output.request_id)] = list(output.outputs[0].token_ids)
        if step > max(arrivals) and not core.has_unfinished_requests():
            break
    return [written[i] for i in sorted(written)]


def undrafted(params: SamplingParams, allowed: bool) -> SamplingParams:
    """Nothing is drafted for these: it is not allowed, or the text offers nothing."""
    of_text = {"temperature": 1.0} if allowed else {"extra_args": {"tokenswift": False}}
    return SamplingParams(
        **of_text, seed=params.seed, max_tokens=params.max_tokens, ignore_eos=True
    )


def plain_texts(model, prompts, params, **arguments):
    return engine_kit.plain_texts(
        model, prompts, params, logits_processors=[WINDOWED_PENALTY], **arguments
    )


def test_texts_are_plain_vllm_s_while_requests_come_and_go(tiny_model, runs_ahead):
    """More requests than the batch holds, of different lengths; each also alone."""
    plain = plain_texts(tiny_model, PROMPTS, PARAMS)
    with engine(tiny_model, **tokenswift()) as llm:
        stats = runner_of(llm).stats
        assert [generate(llm, [p], s)[0] for p, s in zip(PROMPTS, PARAMS, strict=True)] == plain
        # Alone, all passes but a prompt's own and the last are foreseen.
        assert stats.num_passes_ahead > 0.8 * (stats.num_iterations - 3 * len(PROMPTS))
        assert stats.num_passes_dropped == 0
        assert "unknown" not in stats.drafted_by_source, "a pass ahead forgot whose drafts it has"
        assert stats.tokens_moved > 0, "no side branch was ever accepted"
        assert generate(llm, PROMPTS, PARAMS) == plain


def test_texts_are_plain_vllm_s_when_requests_arrive_unforeseen(tiny_model, runs_ahead):
    plain = plain_texts(tiny_model, PROMPTS, PARAMS)
    with engine(tiny_model, **tokenswift()) as llm:
        written = steps(llm, {7 * i: i for i in range(len(PROMPTS))})
        assert written == plain
        assert runner_of(llm).stats.num_passes_dropped > 0


def test_draft_passes_and_heads_may_come_between(tiny_model, sequential_heads, runs_ahead):
    plain = plain_texts(tiny_model, PROMPTS, PARAMS)[:5]
    options = {"budget_tokens": 64, "refresh_tokens": 8, "heads": str(sequential_heads)}
    with engine(tiny_model, **tokenswift(self_draft="always", **options)) as llm:
        assert generate(llm, PROMPTS[:5], PARAMS[:5]) == plain
        assert runner_of(llm).stats.drafted_by_source["heads"] > 0
        assert runner_of(llm).stats.num_draft_passes > 0
        assert runner_of(llm).stats.num_passes_ahead > 0


def test_a_text_that_stops_by_itself_leaves_nothing_behind(tiny_model, runs_ahead):
    """What comes after the text's end, and after the pass ahead of it, is as if it had not been."""
    [text] = plain_texts(tiny_model, PROMPTS[:1], [params_of(60, 0)])
    stop = params_of(60, 0)
    stop.stop_token_ids = [text[30]]
    with engine(tiny_model, **tokenswift()) as llm:
        [stopped] = generate(llm, PROMPTS[:1], stop)
        assert stopped == text[: text.index(text[30]) + 1]
        assert generate(llm, PROMPTS[:1], params_of(60, 0)) == [text]


def test_a_request_that_is_aborted_leaves_the_others_as_they_are(tiny_model, runs_ahead):
    plain = plain_texts(tiny_model, PROMPTS, PARAMS)[:3]
    with engine(tiny_model, **tokenswift()) as llm:
        assert steps(llm, {0: 0, 1: 1, 2: 2}, aborts={9: 1}) == [plain[0], plain[2]]
        assert runner_of(llm).stats.num_passes_dropped > 0


def test_small_caches_and_long_texts(tiny_model, runs_ahead):
    """Requests are preempted and resumed; texts end at the model's length."""
    cramped = {"num_gpu_blocks_override": 14, "max_model_len": 256, "max_num_seqs": 4}
    params = [params_of(300, i) for i in range(4)]
    plain = plain_texts(tiny_model, PROMPTS[:4], params, max_model_len=256)
    with engine(tiny_model, **tokenswift(), **cramped) as llm:
        assert generate(llm, PROMPTS[:4], params) == plain


def test_a_model_that_changes_between_steps_is_asked_again(tiny_model, runs_ahead):
    with engine(tiny_model, **tokenswift()) as llm:
        core, runner = llm.llm_engine, runner_of(llm)
        core.add_request("0", PROMPTS[0], params_of(60, 0))
        for _ in range(6):
            core.step()
        before = runner.stats.num_passes_dropped
        llm.collective_rpc("reload_weights")
        assert runner.stats.num_passes_dropped == before + 1
        written = []
        while core.has_unfinished_requests():
            for output in core.step():
                written = list(output.outputs[0].token_ids)
    assert [written] == plain_texts(tiny_model, PROMPTS[:1], [params_of(60, 0)])


@pytest.mark.parametrize("allowed", [False, True], ids=["speculation off", "nothing to draft"])
def test_undrafted_texts_go_on_before_their_samples_are_read(tiny_model, runs_ahead, allowed):
    """Alone, then arriving unforeseen, with one that is aborted and one that stops by itself."""
    params = [undrafted(p, allowed) for p in PARAMS]
    plain = plain_texts(tiny_model, PROMPTS, params)
    with engine(tiny_model, **tokenswift()) as llm:
        stats = runner_of(llm).stats
        assert [generate(llm, [p], s)[0] for p, s in zip(PROMPTS, params, strict=True)] == plain
        if not allowed:
            assert stats.num_passes_unread > 0.7 * (stats.num_iterations - 3 * len(PROMPTS))
        assert stats.num_passes_unread > 30
        assert stats.num_passes_dropped == 0, "each text's length was known"
        arrivals = {7 * i: i for i in range(len(PROMPTS))}
        assert steps(llm, arrivals, params=params) == plain
        assert stats.num_passes_dropped > 0
        assert steps(llm, {0: 0, 1: 1, 2: 2}, aborts={9: 1}, params=params) == [plain[0], plain[2]]
        stop = undrafted(PARAMS[2], allowed)
        stop.stop_token_ids = [plain[2][20]]
        stopped = plain[2][: plain[2].index(plain[2][20]) + 1]
        assert generate(llm, [PROMPTS[2], PROMPTS[3]], [stop, params[3]]) == [stopped, plain[3]]


def test_a_record_says_of_steps_launched_unread_that_they_were_plain(
    tiny_model, runs_ahead, tmp_path
):
    with engine(tiny_model, **tokenswift(record=str(tmp_path))) as llm:
        generate(llm, PROMPTS[:1], undrafted(params_of(120, 1), allowed=True))
        assert runner_of(llm).stats.num_passes_unread > 5
    [file] = tmp_path.iterdir()
    decided = [i.decisions for i in Record.from_json(file.read_text()).iterations if i.is_decode]
    assert sum("plain" in decisions for decisions in decided) > 5
    assert not any("none" in decisions for decisions in decided[:-2])


def test_drafting_begins_again_when_it_pays(tiny_model, runs_ahead):
    """A text without drafts is joined by one with many, and goes on when that is over."""
    params = [undrafted(params_of(120, 1), allowed=False), params_of(90, 3)]
    plain = plain_texts(tiny_model, PROMPTS[:2], params)
    with engine(tiny_model, **tokenswift()) as llm:
        assert steps(llm, {0: 0, 20: 1}, params=params) == plain
        stats = runner_of(llm).stats
        assert stats.num_accepted_tokens > 20
        assert stats.num_passes_unread > 30


@pytest.mark.parametrize("self_draft", ["auto", "always"])
def test_the_host_s_time_is_measured_at_start_and_leaves_nothing_behind(
    tiny_model, prelaunches, tmp_path, monkeypatch, self_draft
):
    """By a clock that goes on a millisecond for each request that is drafted for."""
    monkeypatch.setattr(cost_cache, "cost_folder", lambda: tmp_path)
    clock, draft = SimpleNamespace(seconds=0.0), DraftState.draft
    clock.perf_counter = lambda: clock.seconds

    def draft_and_tick(*arguments, **options):
        clock.seconds += 0.001
        return draft(*arguments, **options)

    monkeypatch.setattr(host_time, "time", clock)
    monkeypatch.setattr(DraftState, "draft", draft_and_tick)
    params = params_of(40, 0)
    plain = plain_texts(tiny_model, PROMPTS[:1], [params])
    with engine(tiny_model, **tokenswift(self_draft=self_draft)) as llm:
        runner = runner_of(llm)
        cost = runner.tree_drafter.planner.cost
        assert cost.drafting_ms > 0
        assert cost.host_drafting_ms(3) == pytest.approx(3 * cost.drafting_ms)
        assert runner.stats == Stats()
        assert not runner.requests
        assert not runner.request_states
        assert not runner.input_batch.req_ids
        assert generate(llm, PROMPTS[:1], params) == plain
