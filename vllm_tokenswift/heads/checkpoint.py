"""Checkpoints of heads: three layouts on disk (written by ``writing.py``).

``own``
    A folder with ``heads.json`` (form, number of heads, hidden size, the target's name,
    fingerprint and shape, and the record of the training) and ``heads.safetensors`` with
    ``heads.{i}.linear.weight`` ``[hidden, hidden]`` and, in the released form,
    ``heads.{i}.input_layernorm.weight`` and ``heads.{i}.post_layernorm.weight``
    ``[hidden]``. Heads of the sequential form have ``up.weight`` ``[width, 2 hidden]``,
    ``down.weight`` ``[hidden, width]`` and ``token_layernorm.weight`` in place of the linear
    layer and, where they propose a part of the vocabulary only, ``vocabulary`` ``[tokens]``.
    Holds heads of any form.
``merged``, released form
    What the authors publish: the target's weights and the heads in one folder, the heads
    as ``model.medusa_layers.{i}.`` plus the same names, in one file or in shards with an
    index. ``config.json`` is the target's; its ``medusa_heads`` is the number of heads.
``merged``, linear form
    The paper's form in the same layout: ``model.medusa_layers.{i}.linear.weight`` and no
    norms. (The authors published no such checkpoint; the names follow the released ones.)

A merged folder without the target's weights loads as heads too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

from vllm_tokenswift.heads.files import TensorFolder, read_json
from vllm_tokenswift.heads.model import DraftHeads, HeadForm
from vllm_tokenswift.heads.target import TargetShape

RECORD_NAME = "heads.json"
TENSORS_NAME = "heads.safetensors"
BUNDLED_FOLDER = Path(__file__).parent / "data"

OWN_TENSOR = re.compile(r"^heads\.(\d+)\.(.+)$")
MERGED_TENSOR = re.compile(r"^(?:model\.)?medusa_layers\.(\d+)\.(.+)$")
VOCABULARY_TENSOR = "vocabulary"
_NORMS = ("input_layernorm.weight", "post_layernorm.weight")
_PARTS = {
    HeadForm.LINEAR: ("linear.weight",),
    HeadForm.RELEASED: ("linear.weight", *_NORMS),
    HeadForm.SEQUENTIAL: ("up.weight", "down.weight", "token_layernorm.weight", *_NORMS),
}


@dataclass(frozen=True)
class HeadsInfo:
    """What a checkpoint of heads is, before its tensors are read.

    Args:
        path: its folder.
        layout: ``own`` or ``merged``.
        form: of the heads.
        num_heads: length of the chain.
        hidden_size: of the target.
        eps: of the heads' norms.
        target_name: the target's name as given at training, or None where not recorded.
        target: the shape of the target it was trained for, or None where not recorded.
        has_target_weights: whether the folder also holds the target's weights.
        dtype: of the weights, by torch's name.
        vocabulary_size: tokens that the heads can propose, None for all.
        training: the record of the training run; empty where there is none.
    """

    path: Path
    layout: str
    form: HeadForm
    num_heads: int
    hidden_size: int
    eps: float
    target_name: str | None
    target: TargetShape | None
    has_target_weights: bool
    dtype: str
    vocabulary_size: int | None = None
    training: dict[str, Any] = field(default_factory=dict)


def bundled_heads() -> list[str]:
    """Names of the heads that come with this package; each is a valid ``path``."""
    return sorted(p.parent.name for p in BUNDLED_FOLDER.glob(f"*/{RECORD_NAME}"))


def resolve(path: str | Path) -> Path:
    """The local folder of heads given as a folder, a file in it, a bundled name or a hub
    repository.

    Raises:
        ValueError: it is none of them.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if str(path) in bundled_heads():
        return BUNDLED_FOLDER / str(path)
    if folder.is_file():
        return folder.parent
    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except (HFValidationError, RepositoryNotFoundError, OSError) as error:
        raise ValueError(
            f"heads {str(path)!r} is neither a folder, nor heads of this package "
            f"({', '.join(bundled_heads()) or 'none'}), nor a hub repository within reach"
        ) from error


def head_tensors(tensors: TensorFolder, pattern: re.Pattern[str]) -> dict[int, dict[str, str]]:
    """The tensors whose names match, as heads.

    Args:
        tensors: of the checkpoint.
        pattern: of names; its groups are the head's number and the part's name.

    Returns:
        ``{head: {part: tensor name}}``.
    """
    found: dict[int, dict[str, str]] = {}
    for name in sorted(tensors.files):
        if match := pattern.match(name):
            found.setdefault(int(match[1]), {})[match[2]] = name
    return found


def _form(folder: Path, found: dict[int, dict[str, str]]) -> HeadForm:
    """The form that the names tell; ValueError names what is missing or unknown."""
    parts = {part for head in found.values() for part in head}
    form = HeadForm.RELEASED
    if parts <= set(_PARTS[HeadForm.LINEAR]):
        form = HeadForm.LINEAR
    elif parts & {"up.weight", "down.weight"}:
        form = HeadForm.SEQUENTIAL
    if unknown := sorted(parts - set(_PARTS[form])):
        name = next(head[unknown[0]] for head in found.values() if unknown[0] in head)
        raise ValueError(
            f"{folder} holds {name}, which is no part of TokenSwift heads; "
            f"a head has {', '.join(_PARTS[form])}"
        )
    for head in range(max(found) + 1):
        for part in _PARTS[form]:
            if part not in found.get(head, {}):
                raise ValueError(f"{folder} lacks {part} of head {head} (form {form.value})")
    return form


def _width(tensors: TensorFolder, found: dict[int, dict[str, str]]) -> int:
    """Of the hidden layer that sequential heads have; 0 in other forms."""
    name = found[0].get("up.weight")
    return tensors.shape(name)[0] if name else 0


def _check_shapes(tensors: TensorFolder, found: dict[int, dict[str, str]], hidden: int) -> None:
    width = _width(tensors, found)
    matrices = {
        "linear.weight": (hidden, hidden),
        "up.weight": (width, 2 * hidden),
        "down.weight": (hidden, width),
    }
    for head in sorted(found):
        for part, name in found[head].items():
            wanted = matrices.get(part, (hidden,))
            if (shape := tensors.shape(name)) != wanted:
                raise ValueError(
                    f"{name} in {tensors.folder} has shape {list(shape)}; "
                    f"heads of hidden size {hidden} have {list(wanted)}"
                )


def _read_record(path: Path, record: Any, form: HeadForm) -> tuple[TargetShape, str]:
    """The target's shape and name from ``heads.json``, once the file agrees with itself."""
    try:
        named, shape, name = record["form"], record["target"]["shape"], record["target"]["name"]
        fingerprint = record["target"]["fingerprint"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a record of TokenSwift heads: no {error}") from error
    if named not in (form.value, form.name_in_files):
        raise ValueError(f"{path} says form {named!r}; the tensors are of form {form.value!r}")
    target = TargetShape.from_config(shape)
    if target.fingerprint() != fingerprint:
        raise ValueError(f"{path} was changed: its target's shape and fingerprint differ")
    return target, name


def _vocabulary(tensors: TensorFolder, target: TargetShape | None) -> torch.Tensor | None:
    """int64 ``[tokens]``: what the heads can propose, None where it is everything."""
    if VOCABULARY_TENSOR not in tensors.files:
        return None
    tokens = tensors.raw(VOCABULARY_TENSOR)
    size = target.vocab_size if target else None
    known = tokens.dim() == 1 and not tokens.is_floating_point() and len(tokens) > 0
    if known:
        tokens = tokens.long()
        known = int(tokens.min()) >= 0 and len(tokens.unique()) == len(tokens)
    if not known or (size is not None and int(tokens.max()) >= size):
        raise ValueError(
            f"{VOCABULARY_TENSOR} in {tensors.folder} must list different token ids"
            + (f" below {size}, the target's vocabulary" if size else "")
        )
    return tokens


def _open(
    path: str | Path,
) -> tuple[HeadsInfo, TensorFolder, dict[int, dict[str, str]], torch.Tensor | None]:
    """Read all that is said of a checkpoint, and check that it agrees with itself.

    Returns what it is, its tensors, their names by head and part, and its vocabulary.
    """
    folder = resolve(path)
    own = (folder / RECORD_NAME).is_file()
    tensors = TensorFolder(folder, only=TENSORS_NAME if own else None)
    found = head_tensors(tensors, OWN_TENSOR if own else MERGED_TENSOR)
    if not found:
        names = "heads.{i}.linear.weight" if own else "model.medusa_layers.{i}.linear.weight"
        raise ValueError(f"{folder} holds no TokenSwift heads: no tensor is named {names}")
    form = _form(folder, found)
    config_path = folder / (RECORD_NAME if own else "config.json")
    config = read_json(config_path) if config_path.is_file() else {}
    count_name = "num_heads" if own else "medusa_heads"
    if (stated := config.get(count_name, len(found))) != len(found):
        raise ValueError(
            f"{config_path} says {count_name} = {stated}, but {folder} holds {len(found)} heads"
        )
    target: TargetShape | None
    target_name: str | None
    if own:
        target, target_name = _read_record(config_path, config, form)
    else:
        target = TargetShape.from_config(config) if config else None
        target_name = config.get("_name_or_path")
    matrix = found[0]["down.weight" if form is HeadForm.SEQUENTIAL else "linear.weight"]
    hidden = target.hidden_size if target else tensors.shape(matrix)[0]
    _check_shapes(tensors, found, hidden)
    vocabulary = _vocabulary(tensors, target)
    first = tensors.tensor(matrix)
    info = HeadsInfo(
        path=folder,
        layout="own" if own else "merged",
        form=form,
        num_heads=len(found),
        hidden_size=hidden,
        eps=target.rms_norm_eps if target else 1e-6,
        target_name=target_name,
        target=target,
        has_target_weights="model.embed_tokens.weight" in tensors.files,
        dtype=str(first.dtype).removeprefix("torch."),
        vocabulary_size=None if vocabulary is None else len(vocabulary),
        training=config.get("training", {}) if own else {},
    )
    return info, tensors, found, vocabulary


def inspect_heads(path: str | Path) -> HeadsInfo:
    """What the checkpoint at ``path`` is.

    Args:
        path: a folder or a file in it, the name of bundled heads, or a hub repository.

    Raises:
        ValueError: it is no whole checkpoint.
    """
    return _open(path)[0]


def load_heads(
    path: str | Path,
    *,
    hidden_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
    target_config: Any = None,
) -> DraftHeads:
    """Load heads in any of the three layouts, ready to draft (evaluation, no gradients).

    Args:
        path: a folder or a file in it, the name of bundled heads, or a hub repository.
        hidden_size: of the target.
        dtype: of the loaded heads.
        device: of the loaded heads.
        target_config: the target's ``transformers`` configuration (or the dict of its
            ``config.json``); when given, its shape must be the one the heads were trained
            for, and its ``rms_norm_eps`` is used. Names and paths may differ.

    Raises:
        ValueError: files, tensor names, shapes or counts are wrong, or the heads are another
            target's; the sentence names what.
    """
    info, tensors, found, vocabulary = _open(path)
    if info.hidden_size != hidden_size:
        raise ValueError(
            f"the heads in {info.path} are of hidden size {info.hidden_size}, "
            f"the target's is {hidden_size}: train heads for this target"
        )
    eps = info.eps
    if target_config is not None:
        target = TargetShape.from_config(target_config)
        if info.target and info.target.fingerprint() != target.fingerprint():
            raise ValueError(
                f"the heads in {info.path} were trained for another target"
                f"{f' ({info.target_name})' if info.target_name else ''}: its "
                + "; its ".join(info.target.differences(target))
            )
        eps = target.rms_norm_eps
    heads = DraftHeads(
        info.form,
        info.num_heads,
        info.hidden_size,
        eps,
        _width(tensors, found),
        vocabulary,
    )
    heads.layers.load_state_dict(
        {
            f"{head}.{part}": tensors.tensor(name)
            for head, parts in found.items()
            for part, name in parts.items()
        }
    )
    return heads.requires_grad_(False).eval().to(device=device, dtype=dtype)
