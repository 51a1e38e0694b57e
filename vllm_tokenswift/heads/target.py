"""What heads must know of their target model, and how a target is told from another.

Heads read one model's hidden states, so they fit that model only. A *fingerprint* of
the configuration fields that shape the hidden states is stored with the heads and
compared at load. Left out on purpose are names and paths, dtype and quantization,
context length and RoPE scaling (the same weights run at other lengths), and the tying
of the embeddings (an untied copy of a model is the same function).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class TargetShape:
    """The configuration fields of a target that shape its hidden states.

    ``rms_norm_eps`` is rounded to 6 digits: a model that went through GGUF has it in
    float32 (9.99999974e-06 for 1e-05).
    """

    model_type: str
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float

    @classmethod
    def from_config(cls, config: Any) -> TargetShape:
        """Read from a ``transformers`` configuration or the dict of a ``config.json``.

        Raises ValueError where a field is missing or the model type is not supported.
        """
        fields = dict(config) if isinstance(config, Mapping) else config.to_dict()
        model_type = fields.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise ValueError(
                f"model type {model_type!r} is not supported as a target of TokenSwift heads; "
                f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
            )
        num_heads = fields.get("num_attention_heads")
        required = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
        missing = [name for name in required if fields.get(name) is None]
        if missing or not num_heads:
            raise ValueError(
                "the target's configuration lacks "
                + ", ".join([*missing, *([] if num_heads else ["num_attention_heads"])])
            )
        return cls(
            model_type=model_type,
            hidden_size=fields["hidden_size"],
            num_hidden_layers=fields["num_hidden_layers"],
            intermediate_size=fields["intermediate_size"],
            num_attention_heads=num_heads,
            num_key_value_heads=fields.get("num_key_value_heads") or num_heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // num_heads,
            vocab_size=fields["vocab_size"],
            rms_norm_eps=float(f"{fields.get('rms_norm_eps', 1e-6):.6g}"),
        )

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def fingerprint(self) -> str:
        """The first 16 hexadecimal digits of SHA-256 over the fields as sorted JSON."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def differences(self, other: TargetShape) -> list[str]:
        """``"field is A here and B there"`` for each field in which the two differ."""
        theirs = other.to_dict()
        return [
            f"{name} is {value} and not {theirs[name]}"
            for name, value in self.to_dict().items()
            if value != theirs[name]
        ]
