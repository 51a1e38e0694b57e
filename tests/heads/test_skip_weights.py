from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader

from vllm_tokenswift.heads.skip_weights import skip_head_weights


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER"
    monkeypatch.setattr(AutoWeightsLoader, name, getattr(AutoWeightsLoader, name))


def _load(*head_weights: str) -> set[str]:
    module = nn.ModuleDict({"model": nn.ModuleDict({"norm": nn.LayerNorm(4)})})
    weights = [("model.norm.weight", torch.ones(4))]
    weights += [(name, torch.zeros(4, 4)) for name in head_weights]
    return AutoWeightsLoader(module).load_weights(weights)


def test_vllm_stops_at_the_heads_of_a_merged_checkpoint_unless_they_are_skipped() -> None:
    name = "model.medusa_layers.0.linear.weight"
    with pytest.raises(ValueError, match=r"named 'model\.medusa_layers'"):
        _load(name)
    skip_head_weights()
    assert _load(name, "model.medusa_layers.2.post_layernorm.weight") == {"model.norm.weight"}


def test_other_unknown_weights_still_stop_the_load() -> None:
    skip_head_weights()
    with pytest.raises(ValueError, match=r"named 'model\.other'"):
        _load("model.other.weight")


def test_skipping_twice_is_skipping_once() -> None:
    skip_head_weights()
    once = AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER
    skip_head_weights()
    assert AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER is once
