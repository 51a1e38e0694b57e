from __future__ import annotations

import pytest
import torch
from torch import nn
from vllm.model_executor.models.utils import AutoWeightsLoader

from vllm_tokenswift.heads.skip_weights import head_weights_skipped


def _load(*head_weights: str) -> set[str]:
    module = nn.ModuleDict({"model": nn.ModuleDict({"norm": nn.LayerNorm(4)})})
    weights = [("model.norm.weight", torch.ones(4))]
    weights += [(name, torch.zeros(4, 4)) for name in head_weights]
    return AutoWeightsLoader(module).load_weights(weights)


def test_vllm_stops_at_the_heads_of_a_merged_checkpoint_unless_they_are_skipped() -> None:
    name = "model.medusa_layers.0.linear.weight"
    with pytest.raises(ValueError, match=r"named 'model\.medusa_layers'"):
        _load(name)
    with head_weights_skipped():
        assert _load(name, "model.medusa_layers.2.post_layernorm.weight") == {"model.norm.weight"}
    with pytest.raises(ValueError, match=r"named 'model\.medusa_layers'"):
        _load(name)


def test_other_unknown_weights_still_stop_the_load() -> None:
    with head_weights_skipped(), pytest.raises(ValueError, match=r"named 'model\.other'"):
        _load("model.other.weight")


def test_skipping_within_skipping_is_skipping_once() -> None:
    with head_weights_skipped():
        with head_weights_skipped():
            assert _load("model.medusa_layers.0.linear.weight") == {"model.norm.weight"}
        assert _load("model.medusa_layers.0.linear.weight") == {"model.norm.weight"}
