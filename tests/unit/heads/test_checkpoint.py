from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from vllm_tokenswift.heads.checkpoint import (
    RECORD_NAME,
    TENSORS_NAME,
    bundled_heads,
    inspect_heads,
    load_heads,
)
from vllm_tokenswift.heads.cli import describe
from vllm_tokenswift.heads.files import INDEX_NAME, new_folder
from vllm_tokenswift.heads.model import DraftHeads, HeadForm
from vllm_tokenswift.heads.target import TargetShape
from vllm_tokenswift.heads.writing import MERGED_HEADS_NAME, convert_heads, write_merged, write_own

HIDDEN_SIZE = 64
Target = Callable[..., Path]
Heads = Callable[..., DraftHeads]


def _save_own(path: Path, heads: DraftHeads, config: LlamaConfig) -> DraftHeads:
    with new_folder(path) as folder:
        write_own(
            heads,
            folder,
            target_name="small",
            target=TargetShape.from_config(config),
            training={"steps": 3},
        )
    return heads


def _load(path: Path, **options: object) -> DraftHeads:
    defaults = {"hidden_size": HIDDEN_SIZE, "dtype": torch.float32, "device": "cpu"}
    return load_heads(path, **(defaults | options))  # type: ignore[arg-type]


def _config(folder: Path) -> LlamaConfig:
    return LlamaConfig.from_pretrained(folder)


def _assert_same(loaded: DraftHeads, heads: DraftHeads) -> None:
    assert loaded.form == heads.form
    assert loaded.state_dict().keys() == heads.state_dict().keys()
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


@pytest.mark.parametrize("form", ["linear", "released", "sequential"])
def test_heads_come_back_from_our_own_layout_as_they_were(
    random_heads: Heads, tmp_path: Path, target_folder: Target, form: str
) -> None:
    config = _config(target_folder())
    heads = _save_own(tmp_path / "heads", random_heads(form), config)
    loaded = _load(tmp_path / "heads", target_config=config)
    _assert_same(loaded, heads)
    assert loaded.eps == 1e-5
    assert not any(p.requires_grad for p in loaded.parameters())


def test_a_vocabulary_comes_back_with_its_heads(
    random_heads: Heads, tmp_path: Path, target_folder: Target
) -> None:
    config = _config(target_folder())
    tokens = torch.tensor([3, 5, 90])
    heads = _save_own(tmp_path / "heads", random_heads("sequential", vocabulary=tokens), config)
    _assert_same(_load(tmp_path / "heads", target_config=config), heads)
    assert inspect_heads(tmp_path / "heads").vocabulary_size == 3


@pytest.mark.parametrize("name", ["conditioned", "sequential"])
def test_files_call_the_sequential_form_by_its_old_name_and_load_under_both(
    random_heads: Heads, tmp_path: Path, target_folder: Target, name: str
) -> None:
    config = _config(target_folder())
    heads = _save_own(tmp_path / "heads", random_heads(name), config)
    path = tmp_path / "heads" / RECORD_NAME
    record = json.loads(path.read_text())
    assert record["form"] == "conditioned"
    path.write_text(json.dumps(record | {"form": name}))
    _assert_same(_load(tmp_path / "heads", target_config=config), heads)
    assert inspect_heads(tmp_path / "heads").form is HeadForm.SEQUENTIAL
    path.write_text(json.dumps(record | {"form": "released"}))
    with pytest.raises(ValueError, match="says form 'released'; the tensors are of form 'seq"):
        _load(tmp_path / "heads")


def test_what_is_printed_of_the_bundled_heads_calls_their_form_sequential() -> None:
    assert "form         sequential" in describe("smollm2-135m-instruct").splitlines()


def test_a_vocabulary_is_cut_to_its_most_frequent_tokens(
    random_heads: Heads, tmp_path: Path, target_folder: Target
) -> None:
    config = _config(target_folder())
    tokens = torch.tensor([90, 3, 5])
    heads = _save_own(tmp_path / "heads", random_heads("sequential", vocabulary=tokens), config)
    convert_heads(tmp_path / "heads", tmp_path / "cut", None, vocabulary=2)
    heads.vocabulary = tokens[:2]
    _assert_same(_load(tmp_path / "cut", target_config=config), heads)
    assert inspect_heads(tmp_path / "cut").training == {"steps": 3, "vocabulary_cut_to": 2}
    for wrong in (0, 4):
        with pytest.raises(ValueError, match=f"vocabulary is {wrong}.*propose 3 tokens"):
            convert_heads(tmp_path / "heads", tmp_path / "wrong", None, vocabulary=wrong)


@pytest.mark.parametrize("tokens", [[3, 3], [-1, 4], [96], [[1, 2]]])
def test_a_vocabulary_that_is_none_is_refused(
    random_heads: Heads, tmp_path: Path, target_folder: Target, tokens: list[int]
) -> None:
    heads = random_heads("sequential", vocabulary=torch.tensor(tokens))
    _save_own(tmp_path / "heads", heads, _config(target_folder()))
    with pytest.raises(ValueError, match="vocabulary in .* must list different token ids below 96"):
        _load(tmp_path / "heads")


def test_sequential_heads_are_not_written_into_the_authors_layout(
    random_heads: Heads, tmp_path: Path, target_folder: Target
) -> None:
    with pytest.raises(ValueError, match="sequential form are not written into the authors'"):
        write_merged(random_heads("sequential"), target_folder(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["linear", "released"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_folder_serves_as_heads_and_as_the_model(
    random_heads: Heads, tmp_path: Path, target_folder: Target, form: str, tied: bool
) -> None:
    target, heads, merged = target_folder(tied=tied), random_heads(form), tmp_path / "merged"
    write_merged(heads, target, merged)
    _assert_same(_load(merged, target_config=_config(merged)), heads)
    info = inspect_heads(merged)
    assert (info.layout, info.num_heads, info.has_target_weights) == ("merged", 3, True)
    plain = AutoModelForCausalLM.from_pretrained(target)
    again = AutoModelForCausalLM.from_pretrained(merged)
    ids = torch.arange(20)[None]
    assert torch.equal(plain(ids).logits, again(ids).logits)


def test_heads_spread_over_shards_load(random_heads: Heads, tmp_path: Path) -> None:
    heads = random_heads("released")
    tensors = {
        f"model.medusa_{name}": tensor.clone() for name, tensor in heads.state_dict().items()
    }
    names = sorted(tensors)
    shards = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    weight_map = {name: file for file, held in shards.items() for name in held}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    _assert_same(_load(tmp_path), heads)


@pytest.mark.parametrize("layout", ["own", "merged"])
def test_heads_of_another_hidden_size_are_refused(
    random_heads: Heads, tmp_path: Path, target_folder: Target, layout: str
) -> None:
    if layout == "own":
        _save_own(tmp_path / "heads", random_heads("released"), _config(target_folder()))
    else:
        write_merged(random_heads("released"), target_folder(), tmp_path / "heads")
    with pytest.raises(ValueError, match="of hidden size 64, the target's is 32"):
        _load(tmp_path / "heads", hidden_size=32)


def test_heads_of_another_target_are_refused_by_the_field_that_differs(
    random_heads: Heads, tmp_path: Path, target_folder: Target
) -> None:
    config = _config(target_folder())
    _save_own(tmp_path / "heads", random_heads("linear"), config)
    config.vocab_size += 1
    with pytest.raises(ValueError, match=r"\(small\): its vocab_size is 96 and not 97"):
        _load(tmp_path / "heads", target_config=config)


def test_a_renamed_or_retied_target_is_the_same_target(
    random_heads: Heads, tmp_path: Path, target_folder: Target
) -> None:
    config = _config(target_folder())
    _save_own(tmp_path / "heads", random_heads("linear"), config)
    config._name_or_path = "elsewhere"
    config.tie_word_embeddings = True
    config.max_position_embeddings *= 4
    _load(tmp_path / "heads", target_config=config)


def test_an_unsupported_target_is_refused_by_its_type(
    random_heads: Heads, tmp_path: Path, target_folder: Target
) -> None:
    _save_own(tmp_path / "heads", random_heads("linear"), _config(target_folder()))
    with pytest.raises(ValueError, match="model type 'mamba' is not supported"):
        _load(tmp_path / "heads", target_config={"model_type": "mamba"})


@pytest.mark.parametrize("layout", ["own", "merged"])
def test_a_truncated_file_is_refused_by_its_name(
    random_heads: Heads, tmp_path: Path, target_folder: Target, layout: str
) -> None:
    folder = tmp_path / "heads"
    if layout == "own":
        _save_own(folder, random_heads("released"), _config(target_folder()))
        file = folder / TENSORS_NAME
    else:
        write_merged(random_heads("released"), target_folder(), folder)
        file = folder / MERGED_HEADS_NAME
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{file.name} is truncated"):
        _load(folder)


def _change(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / TENSORS_NAME)
    change(tensors)
    save_file(tensors, folder / TENSORS_NAME)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda t: t.pop("heads.1.post_layernorm.weight"),
            "lacks post_layernorm.weight of head 1",
        ),
        (lambda t: t.pop("heads.1.linear.weight"), "lacks linear.weight of head 1"),
        (
            lambda t: t.update({"heads.0.bias": torch.zeros(64)}),
            "heads.0.bias, which is no part of TokenSwift heads",
        ),
        (
            lambda t: t.update({"heads.2.linear.weight": torch.zeros(64, 16)}),
            r"heads.2.linear.weight in .* has shape \[64, 16\]",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if name.startswith("heads.2.")],
            "says num_heads = 3, but .* holds 2 heads",
        ),
        (lambda t: t.clear(), "holds no TokenSwift heads"),
    ],
)
def test_wrong_names_shapes_and_counts_are_refused_by_name(
    random_heads: Heads,
    tmp_path: Path,
    target_folder: Target,
    change: Callable[[dict[str, torch.Tensor]], None],
    sentence: str,
) -> None:
    _save_own(tmp_path / "heads", random_heads("released"), _config(target_folder()))
    _change(tmp_path / "heads", change)
    with pytest.raises(ValueError, match=sentence):
        _load(tmp_path / "heads")


def test_a_wrong_count_in_a_merged_folders_configuration_is_refused(
    random_heads: Heads, tmp_path: Path, target_folder: Target
) -> None:
    write_merged(random_heads("linear"), target_folder(), tmp_path / "merged")
    config = json.loads((tmp_path / "merged/config.json").read_text())
    (tmp_path / "merged/config.json").write_text(json.dumps(config | {"medusa_heads": 4}))
    with pytest.raises(ValueError, match=r"says medusa_heads = 4, but .* holds 3 heads"):
        _load(tmp_path / "merged")


def test_a_record_that_was_edited_is_refused(
    random_heads: Heads, tmp_path: Path, target_folder: Target
) -> None:
    _save_own(tmp_path / "heads", random_heads("linear"), _config(target_folder()))
    path = tmp_path / "heads" / RECORD_NAME
    path.write_text(path.read_text().replace('"vocab_size": 96', '"vocab_size": 97'))
    with pytest.raises(ValueError, match="was changed"):
        _load(tmp_path / "heads")


def test_a_target_without_heads_is_refused_as_heads(target_folder: Target) -> None:
    with pytest.raises(ValueError, match="holds no TokenSwift heads"):
        _load(target_folder())


def test_a_folder_of_bin_files_is_refused_by_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin must be converted to safetensors"):
        _load(tmp_path)


def test_a_failed_write_leaves_nothing(
    random_heads: Heads, tmp_path: Path, target_folder: Target
) -> None:
    before = {p.name for p in tmp_path.iterdir()} | {"llama-untied"}
    with pytest.raises(ValueError, match="has hidden size 64, the heads have 32"):
        write_merged(random_heads("linear", hidden_size=32), target_folder(), tmp_path / "out")
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "out") as folder:
        (folder / "half").write_text(str(1 // 0))
    assert {p.name for p in tmp_path.iterdir()} == before


def test_an_existing_folder_is_not_overwritten(
    random_heads: Heads, tmp_path: Path, target_folder: Target
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/file").touch()
    with pytest.raises(ValueError, match="exists already"):
        write_merged(random_heads("linear"), target_folder(), tmp_path / "out")


def test_the_heads_that_come_with_the_package_load_by_their_name() -> None:
    assert "smollm2-135m-instruct" in bundled_heads()
    heads = load_heads("smollm2-135m-instruct", hidden_size=576, dtype=torch.bfloat16, device="cpu")
    assert (heads.form, heads.num_heads, heads.reads) == ("sequential", 4, "pre_norm")
    held_out = inspect_heads("smollm2-135m-instruct").training["held_out"]
    assert [head["head"] for head in held_out] == [0, 1, 2, 3]


def test_a_name_that_is_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a folder, nor heads of this package"):
        _load(Path("no-such-heads"))
