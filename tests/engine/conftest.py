"""Models for the tests of the seam."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pinned_costs
import pytest
import torch
from engine_kit import VOCABULARY, untrained_heads, write_heads
from transformers import LlamaConfig, LlamaForCausalLM

from vllm_tokenswift.engine.profiling.pass_times import PassTimes

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="module")
def costs_do_not_depend_on_the_machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """Pinned for all engines of a module, those in other processes too; unless it is marked."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("measured_costs") is None:
            patch.setattr(PassTimes, "measure", pinned_costs.measure)
            patch.setattr(PassTimes, "plain_ms", pinned_costs.plain_ms)
            for folder in (HERE, HERE / "plugin"):
                patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.08,
        bos_token_id=1,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def sequential_heads(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained, of half the vocabulary."""
    made = untrained_heads("sequential", tiny_model, vocabulary_size=VOCABULARY // 2)
    for layer in made.layers:  # sharp enough that a path goes on
        torch.nn.init.normal_(layer.down.weight, std=2.0)
    return write_heads(made, tiny_model, tmp_path_factory.mktemp("sequential"))
