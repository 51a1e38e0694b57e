"""Puts a small Llama or Qwen2 checkpoint into a larger model's geometry, with the same function.

    python benchmarks/geometry.py SOURCE TARGET --geometry llama-3.1-8b

So the real text and the real acceptance of a small model are measured at the real
cost of a large one. How each part keeps its function:

- *Width.* The small hidden state stands in the first dimensions, zeros in the
  rest. RMSNorm's mean runs over the larger width, so its weights are multiplied by
  ``sqrt(small / large)`` and its eps by ``small / large``.
- *Heads.* A wider head holds the small one's rotary pair ``i`` at pair ``r i``, where
  ``r`` is the ratio of the head sizes: ``theta^(-2 r i / (r d))`` is the same
  frequency. Attention divides by the root of the larger head size, so queries are
  multiplied by ``sqrt(r)``.
- *Groups.* A KV head serves as many of the small model's query heads as the larger
  geometry's group has room for; where that is fewer than in the small model, the
  KV head is repeated.
- *Biases.* Qwen2's of queries, keys and values are placed as the heads they belong to, zeros in
  the rest.
- *Layers.* Added layers have output projections of zero.

Weights that the function does not depend on (they meet only zeros of the hidden
state, or feed only weights of zero) are filled with small random numbers, since
arithmetic on zeros can run faster than on real data. The vocabulary stays.

With ``--rope-scaling`` positions beyond the small model's native length become
usable (YaRN without rounding its range, so that it too is the same in both head sizes);
``--rope-scaling yarn --rope-factor 4`` takes Qwen2.5's 32,768 to 131,072.

With ``--heads`` the self-drafting heads that were trained for SOURCE are widened with it, so
that they propose the same tokens for TARGET:

    python benchmarks/geometry.py SOURCE TARGET --heads PATH --heads-out OUT

They read the hidden state and the embeddings, which hold zeros after the small model's
dimensions, and leave zeros there: their norms follow the rule of the model's, and their
matrices are padded with zeros. The hidden layer of the sequential form is widened by the
ratio of the hidden sizes, so that it costs what the large model's would; its added units
are filled as above and feed only weights of zero. Where TARGET is there already, only the
heads are written.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from vllm_tokenswift.heads.checkpoint import inspect_heads, load_heads
from vllm_tokenswift.heads.files import new_folder, read_json
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.heads.target import TargetShape
from vllm_tokenswift.heads.writing import write_own

FILLER_STD = 0.02
BIASES = {"llama": (), "qwen2": ("q_proj", "k_proj", "v_proj")}
"""Attention projections that have a bias, by the kinds of models that are known."""


@dataclass(frozen=True)
class Geometry:
    """The shape of a Llama or Qwen2 model; every size in elements."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Geometry:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return cls(
            config["hidden_size"],
            config["num_hidden_layers"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            head_dim,
            config["intermediate_size"],
        )

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_attention_heads // self.num_key_value_heads


GEOMETRIES = {
    "llama-3.1-8b": Geometry(4096, 32, 32, 8, 128, 14336),
    "llama-2-7b": Geometry(4096, 32, 32, 32, 128, 11008),
    "qwen2.5-7b": Geometry(3584, 28, 28, 4, 128, 18944),
    "qwen2.5-14b": Geometry(5120, 48, 40, 8, 128, 13824),
}


class Widening:
    """Maps the weights of one geometry onto a larger one.

    biases: projections of attention that have one. Raises ValueError naming the size that does
    not fit.
    """

    def __init__(
        self,
        small: Geometry,
        large: Geometry,
        device: torch.device,
        biases: Sequence[str] = (),
    ) -> None:
        self.small = small
        self.large = large
        self.biases = biases
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)
        for name in ("hidden_size", "num_hidden_layers", "intermediate_size"):
            if getattr(large, name) < getattr(small, name):
                raise ValueError(
                    f"{name} is {getattr(large, name)}: it must be at least the source's "
                    f"{getattr(small, name)}"
                )
        if large.head_dim % small.head_dim:
            raise ValueError(
                f"head_dim is {large.head_dim}: it must be a multiple of the source's "
                f"{small.head_dim}"
            )
        # KV heads that each KV head of the source becomes, so that all its query heads fit.
        copies = -(-small.group // large.group)
        if small.num_key_value_heads * copies > large.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads is {large.num_key_value_heads}: the source's "
                f"{small.num_key_value_heads} heads of {small.group} queries need "
                f"{small.num_key_value_heads * copies} at {large.group} queries each"
            )
        kv_heads = range(small.num_key_value_heads)
        self.kv_head_sources = [kv for kv in kv_heads for _ in range(copies)]
        self.query_head_targets = [
            (kv * copies + g // large.group) * large.group + g % large.group
            for kv in kv_heads
            for g in range(small.group)
        ]

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """``[small hidden]`` -> ``[large hidden]``."""
        wide = torch.ones(self.large.hidden_size, device=self.device)
        ratio = self.small.hidden_size / self.large.hidden_size
        wide[: self.small.hidden_size] = weight.to(self.device).float() * ratio**0.5
        return wide

    def embedding(self, weight: torch.Tensor) -> torch.Tensor:
        """``[vocab, small hidden]`` -> ``[vocab, large hidden]``; also for an LM head."""
        wide = torch.zeros(weight.shape[0], self.large.hidden_size, device=self.device)
        wide[:, : self.small.hidden_size] = weight.to(self.device).float()
        return wide

    def layer(self, weights: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
        """A layer's tensors by their name within the layer; None makes an added layer."""
        large = self.large
        sizes = {
            "self_attn.q_proj": large.num_attention_heads * large.head_dim,
            "self_attn.k_proj": large.num_key_value_heads * large.head_dim,
            "self_attn.v_proj": large.num_key_value_heads * large.head_dim,
            "mlp.gate_proj": large.intermediate_size,
            "mlp.up_proj": large.intermediate_size,
        }
        wide = {f"{name}.weight": self._filler(rows) for name, rows in sizes.items()}
        for name in self.biases:
            rows = sizes[f"self_attn.{name}"]
            wide[f"self_attn.{name}.bias"] = torch.zeros(rows, device=self.device)
        query_size = large.num_attention_heads * large.head_dim
        for name, columns in (
            ("self_attn.o_proj", query_size),
            ("mlp.down_proj", large.intermediate_size),
        ):
            wide[f"{name}.weight"] = torch.zeros(large.hidden_size, columns, device=self.device)
        for name in ("input_layernorm", "post_attention_layernorm"):
            wide[f"{name}.weight"] = torch.ones(large.hidden_size, device=self.device)
        if weights is not None:
            self._place_attention(weights, wide)
            self._place_biases(weights, wide)
            self._place_mlp(weights, wide)
            for name in ("input_layernorm", "post_attention_layernorm"):
                wide[f"{name}.weight"] = self.norm(weights[f"{name}.weight"])
        return wide

    def draft_head(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A self-drafting head's tensors by their name within the head, in any form."""
        hidden = self.small.hidden_size
        wide = {}
        for name, weight in weights.items():
            if name == "linear.weight":
                wide[name] = self._padded(weight, self.large.hidden_size)
            elif name == "down.weight":
                wide[name] = self._padded(weight, self._draft_width(weight.shape[1]))
            elif name == "up.weight":
                width = weight.shape[0]
                # The columns are two blocks, one for the hidden state and one for the token.
                blocks = self._filler(2 * self._draft_width(width))
                blocks = blocks.view(-1, 2, self.large.hidden_size)
                blocks[:width] = 0
                blocks[:width, :, :hidden] = weight.to(self.device).float().view(width, 2, hidden)
                wide[name] = blocks.flatten(1)
            else:
                wide[name] = self.norm(weight)
        return wide

    def _draft_width(self, width: int) -> int:
        """Of a sequential head's hidden layer, from that of the small one."""
        return width * self.large.hidden_size // self.small.hidden_size

    def _padded(self, weight: torch.Tensor, columns: int) -> torch.Tensor:
        """``[small hidden, any]`` -> ``[large hidden, columns]``, with zeros."""
        wide = torch.zeros(self.large.hidden_size, columns, device=self.device)
        wide[: weight.shape[0], : weight.shape[1]] = weight.to(self.device).float()
        return wide

    def _filler(self, rows: int) -> torch.Tensor:  # [rows, large hidden]
        return torch.empty(rows, self.large.hidden_size, device=self.device).normal_(
            std=FILLER_STD, generator=self.generator
        )

    def _place_attention(
        self, weights: dict[str, torch.Tensor], wide: dict[str, torch.Tensor]
    ) -> None:
        small, large, hidden = self.small, self.large, self.small.hidden_size
        ratio, rotary = self._rotary()
        queries = self._heads(weights["self_attn.q_proj.weight"]) * ratio**0.5
        keys = self._heads(weights["self_attn.k_proj.weight"])
        values = self._heads(weights["self_attn.v_proj.weight"])
        output = weights["self_attn.o_proj.weight"].to(self.device).float()
        wide_queries = wide["self_attn.q_proj.weight"].view(-1, large.head_dim, large.hidden_size)
        wide_keys = wide["self_attn.k_proj.weight"].view(-1, large.head_dim, large.hidden_size)
        wide_values = wide["self_attn.v_proj.weight"].view(-1, large.head_dim, large.hidden_size)
        wide_output = wide["self_attn.o_proj.weight"]
        for target, source in enumerate(self.kv_head_sources):
            wide_keys[target, rotary, :hidden] = keys[source]
            wide_values[target, : small.head_dim, :hidden] = values[source]
        for source, target in enumerate(self.query_head_targets):
            # Zero where the key holds filler: those dimensions must not add to the score.
            wide_queries[target, :, :hidden] = 0
            wide_queries[target, rotary, :hidden] = queries[source]
            first = target * large.head_dim
            wide_output[:hidden, first : first + small.head_dim] = output[
                :, source * small.head_dim : (source + 1) * small.head_dim
            ]

    def _place_biases(
        self, weights: dict[str, torch.Tensor], wide: dict[str, torch.Tensor]
    ) -> None:
        ratio, rotary = self._rotary()
        size = self.small.head_dim
        places = {
            "q_proj": (self.query_head_targets, rotary, ratio**0.5),
            "k_proj": (self.kv_head_sources, rotary, 1.0),
            "v_proj": (self.kv_head_sources, torch.arange(size), 1.0),
        }
        for name in self.biases:
            heads, inner, factor = places[name]
            small = weights[f"self_attn.{name}.bias"].to(self.device).float().view(-1, size)
            large = wide[f"self_attn.{name}.bias"].view(-1, self.large.head_dim)
            for number, head in enumerate(heads):
                source, target = (number, head) if name == "q_proj" else (head, number)
                large[target, inner] = small[source] * factor

    def _rotary(self) -> tuple[int, torch.Tensor]:
        """How many times as large a head is, and where the small one's dimensions stand in it."""
        ratio = self.large.head_dim // self.small.head_dim
        pair = torch.arange(self.small.head_dim // 2)
        return ratio, torch.cat([ratio * pair, self.large.head_dim // 2 + ratio * pair])

    def _place_mlp(self, weights: dict[str, torch.Tensor], wide: dict[str, torch.Tensor]) -> None:
        hidden, inner = self.small.hidden_size, self.small.intermediate_size
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            wide[name][:inner, :hidden] = weights[name].to(self.device).float()
        name = "mlp.down_proj.weight"
        wide[name][:hidden, :inner] = weights[name].to(self.device).float()

    def _heads(self, weight: torch.Tensor) -> torch.Tensor:  # [heads, small head_dim, hidden]
        weight = weight.to(self.device).float()
        return weight.view(-1, self.small.head_dim, self.small.hidden_size)


class Checkpoint:
    """Reads tensors by name from a folder of safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.files = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt")
            self.files.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.files[name].get_tensor(name)

    def layer(self, index: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{index}."
        return {n.removeprefix(prefix): self[n] for n in self.files if n.startswith(prefix)}


def wide_config(
    config: dict[str, Any], large: Geometry, rope_type: str | None, rope_factor: float
) -> dict[str, Any]:
    """The target's config.json (its dtype aside).

    rope_type: "yarn", "linear" or None; it multiplies the usable length by rope_factor.
    """
    eps_ratio = config["hidden_size"] / large.hidden_size
    rope = dict(config.get("rope_parameters") or {"rope_type": "default"})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    native_length = config["max_position_embeddings"]
    if rope_type is not None:
        if rope["rope_type"] != "default":
            raise ValueError(
                f"the source's rope_type is {rope['rope_type']}: --rope-scaling needs a source "
                "whose rotary embedding is not scaled yet"
            )
        rope |= {"rope_type": rope_type, "factor": rope_factor}
        if rope_type == "yarn":
            rope |= {"original_max_position_embeddings": native_length, "truncate": False}
        native_length = int(native_length * rope_factor)
    kinds = {"layer_types": ["full_attention"] * large.num_hidden_layers}
    return config | {
        **(kinds if "layer_types" in config else {}),
        **vars(large),
        "rms_norm_eps": config["rms_norm_eps"] * eps_ratio,
        "rope_parameters": rope,
        "max_position_embeddings": native_length,
    }


def convert(
    source: Path,
    target: Path,
    large: Geometry,
    dtype: torch.dtype = torch.bfloat16,
    rope_type: str | None = None,
    rope_factor: float = 16.0,
) -> None:
    """Writes the checkpoint folder ``target``, one file a layer.

    Raises ValueError where the source is no plain Llama or does not fit the geometry.
    """
    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"]
    if kind not in BIASES or config.get("attention_bias") or config.get("mlp_bias"):
        raise ValueError(
            f"the source is a {kind} model, or has biases that its kind does not have: only Llama "
            "models without biases and Qwen2 models can be put into another geometry"
        )
    if config.get("use_sliding_window"):
        raise ValueError(
            "the source has use_sliding_window true: only models with full attention can be put "
            "into another geometry"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    widening = Widening(Geometry.of(config), large, device, BIASES[kind])
    checkpoint = Checkpoint(source)
    target.mkdir(parents=True, exist_ok=True)

    outer = {
        "model.embed_tokens.weight": widening.embedding(checkpoint["model.embed_tokens.weight"]),
        "model.norm.weight": widening.norm(checkpoint["model.norm.weight"]),
    }
    if not config.get("tie_word_embeddings"):
        outer["lm_head.weight"] = widening.embedding(checkpoint["lm_head.weight"])
    num_files = large.num_hidden_layers + 1
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for i in range(num_files):
        if i < large.num_hidden_layers:
            narrow = checkpoint.layer(i) if i < widening.small.num_hidden_layers else None
            tensors = {f"model.layers.{i}.{n}": t for n, t in widening.layer(narrow).items()}
        else:
            tensors = outer
        tensors = {name: tensor.to(dtype).cpu() for name, tensor in tensors.items()}
        file = f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        save_file(tensors, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    wide = wide_config(config, large, rope_type, rope_factor)
    wide["dtype"] = str(dtype).removeprefix("torch.")
    (target / "config.json").write_text(json.dumps(wide, indent=2))
    for path in source.iterdir():
        if path.name.startswith(("tokenizer", "generation_config", "chat_template")):
            shutil.copy(path, target / path.name)


def widen_heads(heads_path: str | Path, target_folder: Path, out: Path) -> None:
    """Writes heads for a widened model, with the function they have on the small one.

    heads_path: heads of any form, trained for the small model, as :func:`load_heads` takes.
    target_folder: of the widened model. out: a new folder, in our own layout.
    Raises ValueError where the small model is not known, or where the target cannot be it
    in another geometry.
    """
    info = inspect_heads(heads_path)
    if info.target is None:
        raise ValueError(
            f"{info.path} does not tell which model the heads were trained for: put that "
            "model's config.json beside them"
        )
    config = read_json(target_folder / "config.json")
    target = TargetShape.from_config(config)
    widening = Widening(
        Geometry.of(info.target.to_dict()), Geometry.of(config), torch.device("cpu")
    )
    eps = info.target.rms_norm_eps * info.target.hidden_size / target.hidden_size
    # Shapes hold eps rounded to six digits.
    if target.vocab_size != info.target.vocab_size or not math.isclose(
        target.rms_norm_eps, eps, rel_tol=1e-4
    ):
        raise ValueError(
            f"{target_folder} has vocab_size {target.vocab_size} and rms_norm_eps "
            f"{target.rms_norm_eps:.6g}: the model of the heads in {info.path} has "
            f"{info.target.vocab_size} and, in this hidden size, {eps:.6g}"
        )
    small = load_heads(heads_path, hidden_size=info.hidden_size, dtype=torch.float32, device="cpu")
    layers = [widening.draft_head(layer.state_dict()) for layer in small.layers]
    heads = DraftHeads(
        small.form,
        small.num_heads,
        target.hidden_size,
        target.rms_norm_eps,
        layers[0]["up.weight"].shape[0] if small.is_sequential else 0,
        small.vocabulary,
    )
    for layer, weights in zip(heads.layers, layers, strict=True):
        layer.load_state_dict(weights)
    with new_folder(out) as folder:
        write_own(
            heads.to(getattr(torch, info.dtype)),
            folder,
            target_name=target_folder.absolute().name,
            target=target,
            training=info.training,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rope-scaling", choices=("yarn", "linear"))
    parser.add_argument("--rope-factor", type=float, default=16.0)
    parser.add_argument("--heads", help="heads trained for SOURCE; an existing TARGET is kept")
    parser.add_argument("--heads-out", type=Path, help="new folder for the widened heads")
    arguments = parser.parse_args()
    if (arguments.heads is None) != (arguments.heads_out is None):
        parser.error("--heads and --heads-out go together")
    # The config is written after the weights: a folder that has it has them all.
    if arguments.heads is None or not (arguments.target / "config.json").is_file():
        convert(
            arguments.source,
            arguments.target,
            GEOMETRIES[arguments.geometry],
            getattr(torch, arguments.dtype),
            arguments.rope_scaling,
            arguments.rope_factor,
        )
    if arguments.heads is not None:
        widen_heads(arguments.heads, arguments.target, arguments.heads_out)


if __name__ == "__main__":
    main()
