"""Small random targets and heads, written to disk as users have them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from vllm_tokenswift.heads.model import DraftHeads

HIDDEN_SIZE = 64
VOCAB_SIZE = 96


def _small_target(model_type: str, tied: bool) -> PreTrainedModel:
    """A random 2-layer Llama or Qwen2 in float32, its final norm not the identity."""
    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # of size 32, the least that vLLM's CPU attention has
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if model_type == "llama":
        model: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        model = Qwen2ForCausalLM(Qwen2Config(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5)  # away from the near-zero logits of the initialisation
        model.model.norm.weight.uniform_(0.5, 1.5)
    return model.eval()


def _random_heads(
    form: str,
    num_heads: int = 3,
    hidden_size: int = HIDDEN_SIZE,
    vocabulary: torch.Tensor | None = None,
) -> DraftHeads:
    torch.manual_seed(11)
    heads = DraftHeads(form, num_heads, hidden_size, eps=1e-5, vocabulary=vocabulary)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return heads


def _letters() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each printable ASCII character."""
    vocabulary = {"<s>": 0, "</s>": 1} | {chr(32 + i): i + 2 for i in range(VOCAB_SIZE - 2)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="</s>"))
    tokenizer.pre_tokenizer = Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="</s>"
    )


@pytest.fixture
def small_target() -> Callable[[str, bool], PreTrainedModel]:
    return _small_target


@pytest.fixture
def random_heads() -> Callable[..., DraftHeads]:
    return _random_heads


@pytest.fixture
def target_folder(tmp_path: Path) -> Callable[..., Path]:
    """``target_folder("llama", tied=True)``: a small target saved in a folder."""

    def save(model_type: str = "llama", tied: bool = False) -> Path:
        folder = tmp_path / f"{model_type}-{'tied' if tied else 'untied'}"
        _small_target(model_type, tied).save_pretrained(folder)
        _letters().save_pretrained(folder)
        return folder

    return save
