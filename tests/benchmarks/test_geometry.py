"""A widened checkpoint computes the same logits as its source."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def load_geometry() -> ModuleType:
    """benchmarks/ holds scripts, not a package."""
    path = Path(__file__).parents[2] / "benchmarks" / "geometry.py"
    spec = importlib.util.spec_from_file_location("geometry", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["geometry"] = module
    spec.loader.exec_module(module)
    return module


geometry = load_geometry()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with groups of three, as SmolLM2 has."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=80,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=request.param,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)  # so that attention and norms matter
    folder = tmp_path_factory.mktemp("source")
    model.save_pretrained(folder)
    return folder


def logits(folder: Path, length: int) -> torch.Tensor:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, 101, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize(
    "large",
    [
        geometry.Geometry(144, 5, 12, 3, 16, 96),  # groups of four, one KV head unused
        geometry.Geometry(64, 3, 8, 8, 32, 80),  # no groups: KV heads repeated
        geometry.Geometry(64, 4, 8, 4, 8, 128),  # groups of two, the same head size
    ],
    ids=["grouped", "multi-head", "smaller groups"],
)
def test_logits_agree_in_float32(source: Path, tmp_path: Path, large: object) -> None:
    geometry.convert(source, tmp_path, large, torch.float32)
    expected = logits(source, 40)
    # sums over wider rows in another order; logits of this model reach several hundred
    torch.testing.assert_close(
        logits(tmp_path, 40), expected, atol=2e-5 * expected.abs().max().item(), rtol=1e-4
    )


@pytest.mark.parametrize("rope_type", ["yarn", "linear"])
def test_scaled_positions_are_the_same_in_both_head_sizes(
    source: Path, tmp_path: Path, rope_type: str
) -> None:
    small = geometry.Geometry.of(json.loads((source / "config.json").read_text()))
    geometry.convert(source, tmp_path / "small", small, torch.float32, rope_type, 4.0)
    large = geometry.Geometry(144, 3, 12, 3, 16, 96)
    geometry.convert(source, tmp_path / "large", large, torch.float32, rope_type, 4.0)
    expected = logits(tmp_path / "small", 200)  # beyond the native 64
    assert (expected - logits(source, 200)).abs().max() > 1.0
    torch.testing.assert_close(
        logits(tmp_path / "large", 200),
        expected,
        atol=2e-5 * expected.abs().max().item(),
        rtol=1e-4,
    )


def test_a_geometry_without_room_is_refused_by_name(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_key_value_heads is 3"):
        geometry.convert(source, tmp_path, geometry.Geometry(64, 3, 3, 3, 8, 80))
    with pytest.raises(ValueError, match="hidden_size is 32"):
        geometry.convert(source, tmp_path, geometry.Geometry(32, 3, 12, 3, 8, 80))
    with pytest.raises(ValueError, match="head_dim is 12"):
        geometry.convert(source, tmp_path, geometry.Geometry(64, 3, 12, 3, 12, 80))
