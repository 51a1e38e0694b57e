"""A widened checkpoint computes the same logits as its source, and so do widened heads."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from vllm_tokenswift.heads.checkpoint import inspect_heads, load_heads
from vllm_tokenswift.heads.files import new_folder, read_json
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.heads.target import TargetShape
from vllm_tokenswift.heads.writing import write_own


def load_geometry() -> ModuleType:
    """benchmarks/ holds scripts, not a package."""
    path = Path(__file__).parents[3] / "benchmarks" / "geometry.py"
    spec = importlib.util.spec_from_file_location("geometry", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["geometry"] = module
    spec.loader.exec_module(module)
    return module


geometry = load_geometry()

LARGE = {
    "grouped": geometry.Geometry(144, 5, 12, 3, 16, 96),  # groups of four, one KV head unused
    "multi-head": geometry.Geometry(64, 3, 8, 8, 32, 80),  # no groups: KV heads repeated
    "smaller groups": geometry.Geometry(64, 4, 8, 4, 8, 128),  # groups of two, same head size
}


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


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2 with groups of three and biases of queries, keys and values."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=101,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=80,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    assert (model.model.layers[0].self_attn.k_proj.bias != 0).all()
    folder = tmp_path_factory.mktemp("qwen")
    model.save_pretrained(folder)
    return folder


def logits(folder: Path, length: int) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(0, 101, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens).logits


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE.keys())
def test_logits_agree_in_float32(source: Path, tmp_path: Path, large: object) -> None:
    geometry.convert(source, tmp_path, large, torch.float32)
    expected = logits(source, 40)
    # sums over wider rows in another order; logits of this model reach several hundred
    torch.testing.assert_close(
        logits(tmp_path, 40), expected, atol=2e-5 * expected.abs().max().item(), rtol=1e-4
    )


@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE.keys())
def test_a_qwen2_keeps_its_logits_and_its_biases(qwen: Path, tmp_path: Path, large: object) -> None:
    geometry.convert(qwen, tmp_path, large, torch.float32)
    expected = logits(qwen, 40)
    torch.testing.assert_close(
        logits(tmp_path, 40), expected, atol=2e-5 * expected.abs().max().item(), rtol=1e-4
    )


def test_a_qwen2_s_positions_scale_as_a_llama_s_do(qwen: Path, tmp_path: Path) -> None:
    small = geometry.Geometry.of(json.loads((qwen / "config.json").read_text()))
    geometry.convert(qwen, tmp_path / "small", small, torch.float32, "yarn", 4.0)
    large = geometry.Geometry(144, 5, 12, 3, 16, 96)
    geometry.convert(qwen, tmp_path / "large", large, torch.float32, "yarn", 4.0)
    expected = logits(tmp_path / "small", 200)  # beyond the native 64
    torch.testing.assert_close(
        logits(tmp_path / "large", 200),
        expected,
        atol=2e-5 * expected.abs().max().item(),
        rtol=1e-4,
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "mistral"}, "is a mistral model"),
        ({"attention_bias": True}, "has biases that its kind"),
        ({"use_sliding_window": True}, "use_sliding_window true"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    qwen: Path, tmp_path: Path, changed: dict, said: str
) -> None:
    config = json.loads((qwen / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=said):
        geometry.convert(tmp_path, tmp_path / "wide", LARGE["grouped"])


SMOLLM2_135M = geometry.Geometry(576, 30, 9, 3, 64, 1536)
QWEN_HALF_B = geometry.Geometry(896, 24, 14, 2, 64, 4864)
QWEN_ONE_AND_HALF_B = geometry.Geometry(1536, 28, 12, 2, 128, 8960)


@pytest.mark.parametrize("name", geometry.GEOMETRIES)
@pytest.mark.parametrize("small", [SMOLLM2_135M, QWEN_HALF_B, QWEN_ONE_AND_HALF_B])
def test_the_packaged_models_fit_the_geometries(small: object, name: str) -> None:
    large = geometry.GEOMETRIES[name]
    if small.num_hidden_layers > large.num_hidden_layers:  # SmolLM2's 30 in Qwen2.5-7B's 28
        with pytest.raises(ValueError, match="num_hidden_layers is 28"):
            geometry.Widening(small, large, torch.device("cpu"))
    else:
        geometry.Widening(small, large, torch.device("cpu"))


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


FORMS = ["linear", "released", "sequential"]
VOCABULARY = torch.tensor([3, 5, 90])


def write_heads(folder: Path, target: Path, form: str) -> Path:
    """Random heads for ``target``, whose last linear layers are not zero."""
    shape = TargetShape.from_config(read_json(target / "config.json"))
    torch.manual_seed(2)
    heads = DraftHeads(
        form,
        num_heads=3,
        hidden_size=shape.hidden_size,
        eps=shape.rms_norm_eps,
        width=80,
        vocabulary=VOCABULARY if form == "sequential" else None,
    )
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    with new_folder(folder) as draft:
        write_own(heads, draft, target_name="small", target=shape, training={"steps": 3})
    return folder


def load_for(target: Path, heads_path: Path) -> DraftHeads:
    config = read_json(target / "config.json")
    return load_heads(
        heads_path,
        hidden_size=config["hidden_size"],
        dtype=torch.float32,
        device="cpu",
        target_config=config,
    )


def head_logits(target: Path, heads_path: Path) -> torch.Tensor:
    """``[heads, rows, vocab]`` of heads that read the target's own states of one text."""
    heads = load_for(target, heads_path)
    model = LlamaForCausalLM.from_pretrained(target, dtype=torch.float32)
    states: dict[str, torch.Tensor] = {}

    def remember(_: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        states.update(pre_norm=inputs[0][0], post_norm=output[0])

    model.model.norm.register_forward_hook(remember)
    tokens = torch.randint(0, 101, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(tokens)
        embedded = [model.model.embed_tokens(tokens[0].roll(-1 - i)) for i in range(3)]
        reads = heads(states[heads.reads], embedded)
        return torch.stack([model.lm_head(read) for read in reads])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE.keys())
def test_widened_heads_read_the_same_and_leave_zeros_after(
    source: Path, tmp_path: Path, large: object, form: str
) -> None:
    geometry.convert(source, tmp_path / "wide", large, torch.float32)
    small_path = write_heads(tmp_path / "heads", source, form)
    geometry.widen_heads(small_path, tmp_path / "wide", tmp_path / "wide-heads")
    small = load_for(source, small_path)
    wide = load_for(tmp_path / "wide", tmp_path / "wide-heads")

    generator = torch.Generator().manual_seed(3)
    # So small that the norms' eps matters in some of the rows.
    rows = (
        torch.randn(4, 7, small.hidden_size, generator=generator)
        * torch.logspace(-3, 0, 7)[:, None]
    )  # [hidden state and three embeddings, rows, hidden]
    added = wide.hidden_size - small.hidden_size
    wide_rows = torch.nn.functional.pad(rows, (0, added))
    expected = small(rows[0], list(rows[1:]))
    for read, small_read in zip(wide(wide_rows[0], list(wide_rows[1:])), expected, strict=True):
        assert torch.equal(read[:, small.hidden_size :], torch.zeros(7, added))
        torch.testing.assert_close(read[:, : small.hidden_size], small_read, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE.keys())
def test_widened_heads_on_the_widened_model_have_the_same_logits(
    source: Path, tmp_path: Path, large: object, form: str
) -> None:
    geometry.convert(source, tmp_path / "wide", large, torch.float32)
    small_path = write_heads(tmp_path / "heads", source, form)
    geometry.widen_heads(small_path, tmp_path / "wide", tmp_path / "wide-heads")
    expected = head_logits(source, small_path)
    # the two models' own hidden states differ as much as their logits do, see above
    torch.testing.assert_close(
        head_logits(tmp_path / "wide", tmp_path / "wide-heads"),
        expected,
        atol=2e-5 * expected.abs().max().item(),
        rtol=1e-4,
    )


def test_widened_sequential_heads_cost_what_the_large_model_s_would(
    source: Path, tmp_path: Path
) -> None:
    geometry.convert(source, tmp_path / "wide", LARGE["grouped"], torch.float32)
    small_path = write_heads(tmp_path / "heads", source, "sequential")
    geometry.widen_heads(small_path, tmp_path / "wide", tmp_path / "wide-heads")
    layer = load_for(tmp_path / "wide", tmp_path / "wide-heads").layers[0]
    assert layer.up.weight.shape == (240, 2 * 144)  # three times as wide, like the model
    assert layer.down.weight.shape == (144, 240)
    assert (layer.up.weight[80:] != 0).all()


def test_widened_heads_keep_their_vocabulary_and_record(source: Path, tmp_path: Path) -> None:
    geometry.convert(source, tmp_path / "wide", LARGE["grouped"], torch.float32)
    small_path = write_heads(tmp_path / "heads", source, "sequential")
    geometry.widen_heads(small_path, tmp_path / "wide", tmp_path / "wide-heads")
    info = inspect_heads(tmp_path / "wide-heads")
    assert info.layout == "own"
    assert info.target_name == "wide"
    assert info.training == {"steps": 3}
    vocabulary = load_for(tmp_path / "wide", tmp_path / "wide-heads").vocabulary
    assert vocabulary is not None
    assert torch.equal(vocabulary, VOCABULARY)


@pytest.mark.parametrize(("field", "value"), [("vocab_size", 102), ("rms_norm_eps", 1e-6)])
def test_heads_of_another_model_are_refused(
    source: Path, tmp_path: Path, field: str, value: float
) -> None:
    geometry.convert(source, tmp_path / "wide", LARGE["grouped"], torch.float32)
    config = read_json(tmp_path / "wide" / "config.json") | {field: value}
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    small_path = write_heads(tmp_path / "heads", source, "linear")
    with pytest.raises(ValueError, match=f"{field} {value}"):
        geometry.widen_heads(small_path, tmp_path / "wide", tmp_path / "wide-heads")
    assert not (tmp_path / "wide-heads").exists()


def test_the_command_widens_heads_with_the_model_or_for_one_that_is_there(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(geometry.GEOMETRIES, "tiny", LARGE["grouped"])
    small_path = write_heads(tmp_path / "heads", source, "released")
    wide = tmp_path / "wide"

    def command(out: str) -> None:
        line = ["geometry.py", str(source), str(wide), "--geometry", "tiny"]
        line += ["--heads", str(small_path), "--heads-out", str(tmp_path / out)]
        monkeypatch.setattr(sys, "argv", line)
        geometry.main()

    command("first")
    written = {path: path.stat().st_mtime_ns for path in wide.iterdir()}
    assert inspect_heads(tmp_path / "first").hidden_size == 144
    command("second")
    assert inspect_heads(tmp_path / "second").hidden_size == 144
    assert {path: path.stat().st_mtime_ns for path in wide.iterdir()} == written
