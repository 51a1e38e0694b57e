"""The processors of plain vLLM: on V1 through its InputBatch, on V2 driven directly."""

from __future__ import annotations

import inspect
import random
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sampling_reference import CPU, PlainDecoder, decode_plainly
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import LogitsProcessor as LogitsProcessorV1
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.worker.gpu.sample.logits_processor import (
    LogitsContext,
    LogitsProcRequestState,
    build_custom_logits_processors,
)
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2

from vllm_tokenswift.sampling.penalty.batch_windows import BatchWindows, LiveWindow
from vllm_tokenswift.sampling.processors import EtaSampling, WindowedPenalty

VOCAB = 32
NAMES = [f"vllm_tokenswift.sampling.processors:{n}" for n in ("WindowedPenalty", "EtaSampling")]


def penalised(seed: int, theta: float = 1.4, window: int = 6) -> SamplingParams:
    return SamplingParams(
        seed=seed,
        max_tokens=200,
        extra_args={"penalty_theta": theta, "penalty_window": window, "eta_epsilon": 0.01},
    )


def expected_penalty(
    logits: torch.Tensor, text: list[int], theta: float, window: int
) -> torch.Tensor:
    result = logits.clone()
    for token in set(text[-window:]):
        result[token] = logits[token] / theta if logits[token] > 0 else logits[token] * theta
    return result


def test_vllm_loads_both_processors_by_name_for_runner_v1() -> None:
    config = SimpleNamespace(
        speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        additional_config={},
    )
    loaded = build_logitsprocs(config, CPU, False, False, NAMES)  # type: ignore[arg-type]
    assert isinstance(loaded.non_argmax_invariant[-1], WindowedPenalty)
    assert isinstance(loaded.argmax_invariant[-1], EtaSampling)


def test_requests_that_come_and_go_keep_their_tokens_on_runner_v1() -> None:
    params = {str(i): penalised(i, window=3 + i) for i in range(5)}
    params["unpenalised"] = SamplingParams(seed=9, max_tokens=200)
    prompts = {name: [1 + i, 2, 3] for i, name in enumerate(params)}
    alone = {name: decode_plainly(params[name], prompts[name], 80, VOCAB) for name in params}
    decoder = PlainDecoder(VOCAB)
    present: list[str] = []
    rng = random.Random(3)
    for _ in range(200):
        name = rng.choice(list(params))
        if name in present and len(present) > 1:
            decoder.remove(name)  # preempted: the others move in the batch
            present.remove(name)
        elif name not in present:
            if name in decoder.requests:
                decoder.resume(name)
            else:
                decoder.add(name, params[name], prompts[name])
            present.append(name)
        if all(len(decoder.requests[n].output_token_ids) < 80 for n in present):
            decoder.step()
    for name, request in decoder.requests.items():
        tokens = request.output_token_ids
        assert len(tokens) > 10
        assert tokens == alone[name][: len(tokens)], name


def test_placeholders_of_async_scheduling_never_enter_the_window() -> None:
    options = SimpleNamespace(penalty_theta=1.5, penalty_window=4)
    output: list[int] = []
    live = LiveWindow(options, [1, 2], output)  # type: ignore[arg-type]
    for token in range(3, 30):
        output.append(-1)
        assert live.read_output().tokens.tolist() == [1, 2, *output[:-1]][-4:]
        output[-1] = token  # vLLM writes the sampled token when it has arrived
        assert live.read_output().tokens.tolist() == [1, 2, *output][-4:]


def test_tokens_that_vllm_takes_back_leave_the_window() -> None:
    options = SimpleNamespace(penalty_theta=1.5, penalty_window=4)
    output = [3, 4, 5, 6, 7, 8]
    live = LiveWindow(options, [1, 2], output)  # type: ignore[arg-type]
    del output[3:]
    assert live.read_output().tokens.tolist() == [2, 3, 4, 5]
    output += [9]
    assert live.read_output().tokens.tolist() == [3, 4, 5, 9]


def test_a_step_reads_only_the_new_tokens() -> None:
    class Watched(list[int]):
        read = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            found = super().__getitem__(index)
            Watched.read += len(found) if isinstance(index, slice) else 1
            return found

    options = SimpleNamespace(penalty_theta=1.5, penalty_window=4)
    output = Watched(range(5_000))
    live = LiveWindow(options, [1, 2], output)  # type: ignore[arg-type]
    Watched.read = 0
    output.append(7)
    live.read_output()
    assert Watched.read <= 3


def test_greedy_and_unpenalised_rows_stay_as_they_are_on_runner_v1() -> None:
    windows = BatchWindows(SimpleNamespace(penalty_theta=1.0, penalty_window=8))  # type: ignore[arg-type]
    windows.update_batch(
        SimpleNamespace(  # type: ignore[arg-type]
            removed=[],
            moved=[],
            added=[(0, SamplingParams(), [1], []), (1, penalised(1), [4, 5], [6])],
        )
    )
    logits = torch.randn(2, VOCAB)
    before = logits.clone()
    windows.penalise(logits)
    assert torch.equal(logits[0], before[0])
    assert torch.equal(logits[1], expected_penalty(before[1], [4, 5, 6], 1.4, 6))


def test_bad_parameters_are_refused_at_admission() -> None:
    for kind in (WindowedPenalty, EtaSampling):
        with pytest.raises(ValueError, match=r"penalty_theta is 0\.5"):
            kind.validate_params(SamplingParams(extra_args={"penalty_theta": 0.5}))


# Runner V2


def v2_states(max_num_reqs: int, max_len: int) -> LogitsProcRequestState:
    """vLLM's request states with plain tensors where V2 has device buffers."""
    return LogitsProcRequestState(
        device=CPU,
        max_num_reqs=max_num_reqs,
        vocab_size=VOCAB,
        all_token_ids=SimpleNamespace(gpu=torch.zeros(max_num_reqs, max_len, dtype=torch.int32)),  # type: ignore[arg-type]
        prompt_len=SimpleNamespace(),  # type: ignore[arg-type]
        prefill_len=SimpleNamespace(),  # type: ignore[arg-type]
        total_len=SimpleNamespace(),  # type: ignore[arg-type]
    )


def v2_processor(states: LogitsProcRequestState) -> WindowedPenalty:
    """As vLLM's V2 loader makes it, from its name."""
    request_states = SimpleNamespace(
        **{field.name: getattr(states, field.name) for field in fields(states)}
    )
    config = SimpleNamespace(additional_config={})
    (processor,) = build_custom_logits_processors(config, request_states, False, NAMES[:1])  # type: ignore[arg-type]
    assert isinstance(processor, WindowedPenalty)
    return processor


def test_the_v2_runner_gets_the_same_penalty_with_and_without_drafts() -> None:
    rng = random.Random(4)
    states = v2_states(max_num_reqs=6, max_len=64)
    processor = v2_processor(states)
    for _ in range(40):
        slots = rng.sample(range(6), 3)
        texts, settings, drafts = [], [], []
        for slot in slots:
            text = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 50))]
            theta, window = rng.choice([1.0, 1.3, 2.0]), rng.choice([1, 2, 5, 100])
            changes = processor.add_request(slot, penalised(0, theta, window))
            assert changes == (theta != 1.0)
            states.all_token_ids.gpu[slot].fill_(VOCAB - 1)  # garbage after the text
            states.all_token_ids.gpu[slot, : len(text)] = torch.tensor(text)
            texts.append(text)
            settings.append((theta, window))
            drafts.append([rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 4]))])
        processor.apply_staged_writes()
        rows = [(i, j) for i in range(3) for j in range(len(drafts[i]) + 1)]
        ctx = LogitsContext(
            expanded_idx_mapping=torch.tensor([slots[i] for i, _ in rows], dtype=torch.int32),
            idx_mapping=torch.tensor(slots, dtype=torch.int32),
            idx_mapping_np=np.array(slots, dtype=np.int32),
            expanded_local_pos=torch.tensor([j for _, j in rows], dtype=torch.int32),
            input_ids=torch.tensor(
                [[texts[i][-1], *drafts[i]][j] for i, j in rows], dtype=torch.int32
            ),
            pos=torch.tensor([len(texts[i]) - 1 + j for i, j in rows]),
            seq_lens_upper_bound_np=np.array([len(texts[i]) + len(drafts[i]) for i in range(3)]),
        )
        logits = torch.randn(len(rows), VOCAB)
        expected = torch.stack(
            [
                expected_penalty(logits[row], texts[i] + drafts[i][:j], *settings[i])
                for row, (i, j) in enumerate(rows)
            ]
        )
        assert torch.equal(processor.apply(logits, ctx), expected)


def test_the_penalty_is_a_processor_of_both_runners() -> None:
    assert issubclass(WindowedPenalty, LogitsProcessorV1)
    assert issubclass(WindowedPenalty, LogitsProcessorV2)
    for base in (LogitsProcessorV1, LogitsProcessorV2):
        for name, method in inspect.getmembers(base, inspect.isfunction):
            if name == "__init__":
                continue
            ours = inspect.signature(getattr(WindowedPenalty, name))
            given = [p for p in inspect.signature(method).parameters if p != "self"]
            ours.bind(*["self", *given])  # raises where vLLM's call would not fit


def test_interface_fields_that_the_v2_penalty_reads_exist() -> None:
    assert {
        "idx_mapping_np",
        "expanded_idx_mapping",
        "expanded_local_pos",
        "input_ids",
        "pos",
        "seq_lens_upper_bound_np",
    } <= {field.name for field in fields(LogitsContext)}
    assert {"device", "max_num_reqs", "all_token_ids"} <= {
        field.name for field in fields(LogitsProcRequestState)
    }
