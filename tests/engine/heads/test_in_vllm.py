"""Heads inside vLLM's engine: the logits they draft from are the trainer's."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch

from vllm_tokenswift.heads.files import new_folder
from vllm_tokenswift.heads.frozen_target import FrozenTarget, target_shape
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.heads.writing import write_merged, write_own

Target = Callable[..., Path]
Heads = Callable[..., DraftHeads]

PROMPT = [5 + 3 * i % 80 for i in range(23)]

# The functions below run in vLLM's worker, which cannot import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _watch_heads(worker: Any) -> None:
    runner = worker.model_runner
    runner.heads_seen = []

    def keep(_: Any, inputs: Any, reads: list[Any]) -> None:
        logits = [runner.model.compute_logits(read).float().tolist() for read in reads]
        runner.heads_seen.append((inputs[0].float().tolist(), logits))

    runner.drafter.heads.register_forward_hook(keep)


def _seen(worker: Any) -> Any:
    return worker.model_runner.heads_seen


def _while_watched(
    model: Path, heads: Path, watch: Callable[[Any], None], seen: Callable[[Any], Any], tokens: int
) -> Any:
    """What ``seen`` tells of a worker that ``watch`` prepared, after a greedy generation."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(model),
        dtype="float32",
        max_model_len=128,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 26,
        speculative_config={
            "method": "tokenswift",
            "heads": str(heads),
            "head_source": "free",
            "self_draft": "off",
            "plan": "fixed",
            "num_speculative_tokens": 8,
        },
    )
    llm.collective_rpc(watch)
    llm.generate([{"prompt_token_ids": PROMPT}], SamplingParams(temperature=0, max_tokens=tokens))
    [told] = llm.collective_rpc(seen)
    del llm
    return told


@pytest.mark.parametrize(
    ("model_type", "tied", "layout"),
    [
        ("llama", True, "own-released"),
        ("llama", False, "merged-released"),
        ("qwen2", True, "merged-linear"),
        ("qwen2", False, "own-linear"),
    ],
)
def test_heads_in_vllm_give_the_trainers_logits(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    target_folder: Target,
    random_heads: Heads,
    model_type: str,
    tied: bool,
    layout: str,
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    model, (kind, form) = target_folder(model_type, tied=tied), layout.split("-")
    trained, path = random_heads(form), tmp_path / "heads"
    if kind == "merged":
        write_merged(trained, model, path)
        served = path
    else:
        served = model
        with new_folder(path) as folder:
            shape = target_shape(str(model))
            write_own(trained, folder, target_name="small", target=shape, training={})

    frozen = FrozenTarget(str(model), "float32", torch.device("cpu"))
    hidden = frozen.hidden(torch.tensor([PROMPT]), trained.reads)[0, -1:]  # [1, hidden]
    expected = [read @ frozen.lm_head.T for read in trained(hidden)]  # [1, vocab] each

    # The hidden state that heads got after the prompt, and the logits made of it.
    seen_hidden, seen_logits = _while_watched(served, path, _watch_heads, _seen, tokens=6)[0]
    torch.testing.assert_close(torch.tensor(seen_hidden)[:1], hidden, rtol=1e-5, atol=1e-5)
    assert len(seen_logits) == len(expected)
    for seen, wanted in zip(seen_logits, expected, strict=True):
        torch.testing.assert_close(torch.tensor(seen)[:1], wanted, rtol=1e-5, atol=1e-5)


def _watch_paths(worker: Any) -> None:
    """Keeps, of every iteration, the heads' rows and the state and token they began with."""
    drafts = worker.model_runner.tree_drafter.head_drafter
    candidates = drafts.candidates
    worker.model_runner.paths_seen = []

    def keep(requests: Any, own: Any, start: Any) -> Any:
        found = candidates(requests, own, start)
        worker.model_runner.paths_seen.append(
            (requests[0].bonus_token, start[0].tolist(), found[0].tokens, found[0].below)
        )
        return found

    drafts.candidates = keep


def _paths_seen(worker: Any) -> Any:
    return worker.model_runner.paths_seen


@pytest.mark.parametrize("tied", [True, False])
def test_sequential_heads_in_vllm_propose_what_the_trainers_do_along_every_path(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    target_folder: Target,
    random_heads: Heads,
    tied: bool,
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    model, path = target_folder("llama", tied=tied), tmp_path / "heads"
    vocabulary = torch.arange(3, 96, 2)
    heads = random_heads("sequential", vocabulary=vocabulary)
    for layer in heads.layers:
        layer.post_layernorm.weight.data.mul_(4)  # sure enough to be followed further down
    with new_folder(path) as folder:
        shape = target_shape(str(model))
        write_own(heads, folder, target_name="small", target=shape, training={})
    seen = _while_watched(model, path, _watch_paths, _paths_seen, tokens=8)
    frozen = FrozenTarget(str(model), "float32", torch.device("cpu"))
    checked = 0
    for bonus_token, start, tokens, below in seen:
        states = {0: (torch.tensor([start]), bonus_token, 0)}
        for row in range(len(tokens)):
            state, token, depth = states[row]
            embedded = frozen.embeddings[[token]]
            state, read = heads.run_head(depth, state, embedded)
            best = (read @ frozen.lm_head[vocabulary].T)[0].topk(len(tokens[row])).indices
            assert tokens[row] == vocabulary[best].tolist()
            checked += depth > 0
            for place, next_row in enumerate(below[row]):
                if next_row >= 0:
                    states[next_row] = (state, tokens[row][place], depth + 1)
    assert checked > 0


def test_two_tensor_parallel_ranks_propose_alike_and_like_one(
    tmp_path: Path, target_folder: Target, random_heads: Heads
) -> None:
    model, forms = target_folder(), ("linear", "released")
    made = {str(tmp_path / form): random_heads(form) for form in forms}
    for path, heads in made.items():
        write_merged(heads, model, Path(path))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    outs = [tmp_path / f"rank{rank}.json" for rank in range(2)]
    script = Path(__file__).parent / "tensor_parallel_rank.py"
    given = [model, json.dumps(list(made)), port, json.dumps(PROMPT)]
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), *given, out])
        for rank, out in enumerate(outs)
    ]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    drafts = [json.loads(out.read_text()) for out in outs]
    assert drafts[0] == drafts[1]
    frozen = FrozenTarget(str(model), "float32", torch.device("cpu"))
    for heads, proposed in zip(made.values(), drafts[0], strict=True):
        states = frozen.hidden(torch.tensor([PROMPT]), heads.reads)[0]
        alone = [(read @ frozen.lm_head.T).topk(3).indices.tolist() for read in heads(states)]
        assert proposed == alone
