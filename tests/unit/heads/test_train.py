from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_tokenswift.heads import train
from vllm_tokenswift.heads.checkpoint import inspect_heads, load_heads
from vllm_tokenswift.heads.data import make_batch, read_sequences
from vllm_tokenswift.heads.frozen_target import FrozenTarget
from vllm_tokenswift.heads.model import DraftHeads, HeadForm
from vllm_tokenswift.heads.recipe import TrainingRecipe
from vllm_tokenswift.heads.train import PLOT_NAME, learning_rate, train_heads
from vllm_tokenswift.heads.writing import write_merged

Target = Callable[..., Path]
Heads = Callable[..., DraftHeads]

# Each letter has one successor, so a head can learn to be right.
CYCLE = string.ascii_letters * 50


def _recipe(**options: Any) -> TrainingRecipe:
    defaults: dict[str, Any] = {
        "num_steps": 6,
        "warmup_steps": 2,
        "batch_size": 2,
        "grad_accumulation": 2,
        "seq_tokens": 64,
        "loss_chunk": 50,
        "dtype": "float32",
        "device": "cpu",
    }
    return TrainingRecipe(**(defaults | options))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data.txt").write_text(CYCLE)
    return tmp_path / "data.txt"


def _weights(path: Path) -> dict[str, torch.Tensor]:
    heads = load_heads(path, hidden_size=64, dtype=torch.float32, device="cpu")
    return dict(heads.state_dict())


def _assert_equal(one: Path, other: Path) -> None:
    ours, theirs = _weights(one), _weights(other)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def _reference_states(model: Any, ids: torch.Tensor, reads: str) -> torch.Tensor:
    """The state that heads start from, taken from the last layer's own output."""
    seen: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    hook = model.model.layers[-1].register_forward_hook(keep)
    with torch.no_grad():
        model(ids)
    hook.remove()
    state = seen[0].view(*ids.shape, -1)
    return model.model.norm(state) if reads == "post_norm" else state


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "layout",
    ["own-linear", "own-released", "own-sequential", "merged-linear", "merged-released"],
)
def test_loaded_heads_give_the_logits_that_the_trainer_gives(
    tmp_path: Path, target_folder: Target, data: Path, model_type: str, tied: bool, layout: str
) -> None:
    target, (kind, form) = target_folder(model_type, tied=tied), layout.split("-")
    train_heads(str(target), data, tmp_path / "heads", _recipe(form=form, num_steps=2))
    path = tmp_path / "heads"
    trained = load_heads(path, hidden_size=64, dtype=torch.float32, device="cpu")
    if kind == "merged":
        path = tmp_path / "merged"
        write_merged(trained, target, path)
    # What the trainer computes ...
    frozen = FrozenTarget(str(target), "float32", torch.device("cpu"))
    ids = torch.arange(2, 32).view(2, 15)
    embedded = [torch.randn(2, 15, 64)] * 3
    reads = trained(frozen.hidden(ids, trained.reads), embedded)
    # ... and what a loaded checkpoint does on the states of an independent forward pass.
    model = AutoModelForCausalLM.from_pretrained(target if kind == "own" else path).eval()
    loaded = load_heads(
        path, hidden_size=64, dtype=torch.float32, device="cpu", target_config=model.config
    )
    assert (loaded.form, loaded.num_heads) == (form, 3)
    again = loaded(_reference_states(model, ids, loaded.reads), embedded)
    for one, other in zip(reads, again, strict=True):
        # float32 rounding of logits of size 10 over sums of 64 terms
        torch.testing.assert_close(
            one @ frozen.lm_head.T, model.lm_head(other), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("form", ["linear", "released", "sequential"])
def test_heads_learn_a_text_that_can_be_foretold(
    tmp_path: Path, target_folder: Target, data: Path, form: str
) -> None:
    recipe = _recipe(form=form, num_steps=60, warmup_steps=5, learning_rate=2e-2)
    info = train_heads(str(target_folder()), data, tmp_path / "heads", recipe)
    held_out = info.training["held_out"]
    assert [head["predicts_tokens_ahead"] for head in held_out] == [2, 3, 4]
    for head in held_out:
        assert head["top1"] > 0.7, head  # chance is 0.02
        assert head["top1"] <= head["top2"] <= head["top3"]
    assert len(info.training["loss_nats"]) == 60
    assert (tmp_path / "heads" / PLOT_NAME).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "heads.training").exists()


def test_sequential_heads_are_asked_behind_the_token_before_and_propose_the_frequent_ones(
    tmp_path: Path, target_folder: Target
) -> None:
    # Pairs "Aa", "Bb", ... in any order: the second letter follows from the first, which is
    # itself not to be foretold.
    rng = random.Random(0)
    pairs = "".join(rng.choice(["Aa", "Bb", "Cc", "Dd", "Ee", "Ff"]) for _ in range(3000))
    text = tmp_path / "pairs.txt"
    text.write_text(pairs)
    recipe = _recipe(
        form="sequential", vocabulary=12, num_steps=80, warmup_steps=5, learning_rate=2e-2
    )
    info = train_heads(str(target_folder()), text, tmp_path / "heads", recipe)
    assert info.vocabulary_size == 12
    for head in info.training["held_out"]:
        assert head["top1"] > 0.5, head  # second letters: half of all, 1/6 of the first ones


def test_only_the_heads_learn(tmp_path: Path, target_folder: Target, data: Path) -> None:
    target = target_folder(tied=True)
    before = (target / "model.safetensors").read_bytes()
    train_heads(str(target), data, tmp_path / "heads", _recipe())
    assert (target / "model.safetensors").read_bytes() == before
    assert all(name.startswith("layers.") for name in _weights(tmp_path / "heads"))


_CHILD = """
import json, os, signal, sys
from vllm_tokenswift.heads import train
from vllm_tokenswift.heads.recipe import TrainingRecipe

save, saves_to_go = train.save_state_whole, int(os.environ.get("SAVES", "1000000"))

def save_or_be_killed(*arguments):
    global saves_to_go
    if not saves_to_go:
        os.kill(os.getpid(), signal.SIGKILL)
    saves_to_go -= 1
    save(*arguments)

train.save_state_whole = save_or_be_killed
train.train_heads(sys.argv[1], sys.argv[2], sys.argv[3], TrainingRecipe(**json.loads(sys.argv[4])))
"""


def _child(*arguments: object, **environment: str) -> subprocess.Popen[bytes]:
    """A training in a process of its own; with ``SAVES``, killed where it would save again."""
    command = [sys.executable, "-c", _CHILD, *map(str, arguments)]
    return subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)


def _interrupt_after(saves: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next training of this process ends where it would save once more."""
    save, saved = train.save_state_whole, []

    def save_or_end(*arguments: Any) -> None:
        if len(saved) == saves:
            monkeypatch.undo()
            raise KeyboardInterrupt
        save(*arguments)
        saved.append(arguments)

    monkeypatch.setattr(train, "save_state_whole", save_or_end)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "by"), [("float32", "a signal"), ("bfloat16", "the keyboard")])
def test_a_killed_and_resumed_training_ends_with_the_weights_of_an_uninterrupted_one(
    tmp_path: Path,
    target_folder: Target,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    by: str,
) -> None:
    target = target_folder()
    recipe = _recipe(num_steps=50, save_every=10, dtype=dtype)
    if by == "a signal":
        child = _child(target, data, tmp_path / "killed", json.dumps(recipe.to_dict()), SAVES="2")
        assert child.wait(timeout=600) == -signal.SIGKILL
    else:
        _interrupt_after(2, monkeypatch)
        with pytest.raises(KeyboardInterrupt):
            train_heads(str(target), data, tmp_path / "killed", recipe)
    state = tmp_path / "killed.training/state.pt"
    assert not (tmp_path / "killed").exists()
    assert torch.load(state, weights_only=True)["step"] == 20
    resumed = train_heads(str(target), data, tmp_path / "killed", recipe)
    train_heads(str(target), data, tmp_path / "whole", recipe)
    _assert_equal(tmp_path / "killed", tmp_path / "whole")
    assert len(resumed.training["loss_nats"]) == 50
    assert not state.parent.exists()


def test_an_interrupted_training_is_not_continued_with_another_recipe(
    tmp_path: Path, target_folder: Target, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, out = target_folder(), tmp_path / "heads"
    _interrupt_after(1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        train_heads(str(target), data, out, _recipe(num_steps=5000, save_every=1))
    with pytest.raises(ValueError, match=r"another num_steps \(5000, now 4\), save_every"):
        train_heads(str(target), data, out, _recipe(num_steps=4, save_every=2))


def test_accumulated_small_batches_teach_what_one_large_batch_does(
    tmp_path: Path, target_folder: Target, data: Path
) -> None:
    target = target_folder()
    for name, batch, accumulation in (("large", 4, 1), ("small", 1, 4)):
        recipe = _recipe(batch_size=batch, grad_accumulation=accumulation)
        train_heads(str(target), data, tmp_path / name, recipe)
    small = _weights(tmp_path / "small")
    for name, tensor in _weights(tmp_path / "large").items():
        # Adam divides by the root of the squared gradient, which widens float32 rounding.
        torch.testing.assert_close(tensor, small[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_two_ranks_teach_what_one_does_with_the_same_sequences(
    tmp_path: Path, target_folder: Target, data: Path
) -> None:
    target = target_folder()
    train_heads(str(target), data, tmp_path / "one", _recipe())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        _child(
            target,
            data,
            tmp_path / "two",
            json.dumps(_recipe(batch_size=1).to_dict()),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=600) for rank in ranks] == [0, 0]
    two = _weights(tmp_path / "two")
    for name, tensor in _weights(tmp_path / "one").items():
        torch.testing.assert_close(tensor, two[name], rtol=1e-3, atol=1e-4)
    info = inspect_heads(tmp_path / "two")
    assert info.training["processes"] == 2
    assert len(info.training["held_out"]) == 3


def test_padding_changes_no_hidden_state(tmp_path: Path, target_folder: Target) -> None:
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"token_ids": list(range(2, 2 + n))}) + "\n" for n in (40, 12))
    )
    sequences = read_sequences(
        tmp_path / "data.jsonl",
        None,  # type: ignore[arg-type]  # nothing to tokenize
        seq_tokens=50,
        num_heads=3,
        vocab_size=96,
        limit=9,
    )
    frozen = FrozenTarget(str(target_folder()), "float32", torch.device("cpu"))
    both = frozen.hidden(torch.from_numpy(make_batch(sequences, 3).token_ids), "pre_norm")
    alone = frozen.hidden(torch.from_numpy(make_batch(sequences[1:], 3).token_ids), "pre_norm")
    torch.testing.assert_close(both[1, :12], alone[0])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("", "are empty: they hold no text"),
        ("too short", "hold 9 tokens, less than one sequence of 64"),
        ("x" * 70, "the data make one sequence|less than one sequence"),
    ],
)
def test_data_that_will_not_do_leave_nothing_behind(
    tmp_path: Path, target_folder: Target, content: str, sentence: str
) -> None:
    target = target_folder()
    (tmp_path / "data.txt").write_text(content)
    before = sorted(tmp_path.iterdir())
    if content.startswith("x"):
        content = "x" * 66  # a second piece of 2 tokens is too short for three heads
        (tmp_path / "data.txt").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        train_heads(str(target), tmp_path / "data.txt", tmp_path / "heads", _recipe())
    assert sorted(tmp_path.iterdir()) == before


def test_an_unsupported_target_is_refused_and_leaves_nothing(tmp_path: Path, data: Path) -> None:
    (tmp_path / "mamba").mkdir()
    (tmp_path / "mamba/config.json").write_text(json.dumps({"model_type": "mamba"}))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="model type 'mamba' is not supported"):
        train_heads(str(tmp_path / "mamba"), data, tmp_path / "heads", _recipe())
    assert sorted(tmp_path.iterdir()) == before


def test_a_target_that_does_not_exist_is_refused(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ValueError, match="no configuration of a model can be read"):
        train_heads(str(tmp_path / "nowhere"), data, tmp_path / "heads", _recipe())


def test_a_target_cut_short_is_refused_by_its_file(
    tmp_path: Path, target_folder: Target, data: Path
) -> None:
    target = target_folder()
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        train_heads(str(target), data, tmp_path / "heads", _recipe())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_heads": 0}, "num_heads is 0; it must be at least 1"),
        ({"seq_tokens": 4}, "seq_tokens is 4; it must be at least num_heads"),
        ({"held_out": 0.7}, "held_out is 0.7; it must be from 0 to 0.5"),
        ({"dtype": "int8"}, "dtype is int8; it must be one of bfloat16"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"form": "medusa"}, "form is 'medusa'; it must be one of linear, released, sequential"),
    ],
)
def test_a_recipe_that_will_not_do_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        _recipe(**options)


@pytest.mark.parametrize("name", ["conditioned", "sequential"])
def test_the_sequential_form_has_an_old_name_which_records_keep(name: str) -> None:
    recipe = _recipe(form=name)
    assert recipe == _recipe(form="sequential")
    assert recipe.form is HeadForm.SEQUENTIAL
    assert recipe.to_dict()["form"] == "conditioned"


def test_the_defaults_are_the_papers() -> None:
    recipe = TrainingRecipe()
    assert (recipe.beta1, recipe.beta2, recipe.weight_decay) == (0.9, 0.999, 0.1)
    assert (recipe.num_steps, recipe.warmup_steps) == (200, 50)
    assert (recipe.batch_size, recipe.grad_accumulation, recipe.seq_tokens) == (3, 10, 8192)


def test_the_learning_rate_rises_and_then_follows_half_a_cosine() -> None:
    recipe = TrainingRecipe()
    assert learning_rate(0, 1.0, recipe) == pytest.approx(1 / 50)
    assert learning_rate(49, 1.0, recipe) == learning_rate(50, 1.0, recipe) == 1.0
    assert learning_rate(125, 1.0, recipe) == pytest.approx(0.5)
    assert learning_rate(199, 1.0, recipe) == pytest.approx((1 + math.cos(math.pi * 149 / 150)) / 2)
