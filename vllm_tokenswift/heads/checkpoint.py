"""Checkpoints of heads: three layouts on disk, read and written.

``own``
    A folder with ``heads.json`` (form, number of heads, hidden size, the target's name,
    fingerprint and shape, and the record of the training) and ``heads.safetensors`` with
    ``heads.{i}.linear.weight`` ``[hidden, hidden]`` and, in the released form,
    ``heads.{i}.input_layernorm.weight`` and ``heads.{i}.post_layernorm.weight``
    ``[hidden]``. Holds heads of either form.
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

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError
from safetensors.torch import save_file
from torch import Tensor

from vllm_tokenswift.heads.files import INDEX_NAME, TensorFolder, new_folder, read_json
from vllm_tokenswift.heads.model import DraftHeads, HeadForm
from vllm_tokenswift.heads.target import TargetShape

RECORD_NAME = "heads.json"
TENSORS_NAME = "heads.safetensors"
MERGED_HEADS_NAME = "model-medusa-layers.safetensors"
BUNDLED_FOLDER = Path(__file__).parent / "data"

_OWN_TENSOR = re.compile(r"^heads\.(\d+)\.(.+)$")
_MERGED_TENSOR = re.compile(r"^(?:model\.)?medusa_layers\.(\d+)\.(.+)$")
_PARTS = {
    HeadForm.LINEAR: ("linear.weight",),
    HeadForm.RELEASED: ("linear.weight", "input_layernorm.weight", "post_layernorm.weight"),
}


@dataclass(frozen=True)
class HeadsInfo:
    """What a checkpoint of heads is, before its tensors are read.

    layout: ``own`` or ``merged``.
    target_name: the target's name as given at training, or None where not recorded.
    target: the shape of the target it was trained for, or None where not recorded.
    has_target_weights: whether the folder also holds the target's weights.
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
    training: dict[str, Any] = field(default_factory=dict)


def bundled_heads() -> list[str]:
    """Names of the heads that come with this package; each is a valid ``path``."""
    return sorted(p.parent.name for p in BUNDLED_FOLDER.glob(f"*/{RECORD_NAME}"))


def resolve(path: str | Path) -> Path:
    """The local folder of heads given as a folder, a file in it, a bundled name or a hub
    repository.

    Raises ValueError where it is none of them.
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


def _head_tensors(tensors: TensorFolder, pattern: re.Pattern[str]) -> dict[int, dict[str, str]]:
    """``{head: {part: tensor name}}`` of the tensors whose names match."""
    found: dict[int, dict[str, str]] = {}
    for name in sorted(tensors.files):
        if match := pattern.match(name):
            found.setdefault(int(match[1]), {})[match[2]] = name
    return found


def _form(folder: Path, found: dict[int, dict[str, str]]) -> HeadForm:
    """The form that the names tell; ValueError names what is missing or unknown."""
    parts = {part for head in found.values() for part in head}
    form = HeadForm.LINEAR if parts <= set(_PARTS[HeadForm.LINEAR]) else HeadForm.RELEASED
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


def _check_shapes(tensors: TensorFolder, found: dict[int, dict[str, str]], hidden: int) -> None:
    for head in sorted(found):
        for part, name in found[head].items():
            wanted = (hidden, hidden) if part == "linear.weight" else (hidden,)
            if (shape := tensors.shape(name)) != wanted:
                raise ValueError(
                    f"{name} in {tensors.folder} has shape {list(shape)}; "
                    f"heads of hidden size {hidden} have {list(wanted)}"
                )


def _read_record(path: Path, record: Any, form: HeadForm) -> tuple[TargetShape, str]:
    """The target's shape and name from ``heads.json``, once the file agrees with itself."""
    try:
        said, shape, name = record["form"], record["target"]["shape"], record["target"]["name"]
        fingerprint = record["target"]["fingerprint"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a record of TokenSwift heads: no {error}") from error
    if said != form.value:
        raise ValueError(f"{path} says form {said!r}; the tensors are of form {form.value!r}")
    target = TargetShape.from_config(shape)
    if target.fingerprint() != fingerprint:
        raise ValueError(f"{path} was changed: its target's shape and fingerprint differ")
    return target, name


def _open(path: str | Path) -> tuple[HeadsInfo, TensorFolder, dict[int, dict[str, str]]]:
    """Read all that is said of a checkpoint, and check that it agrees with itself."""
    folder = resolve(path)
    own = (folder / RECORD_NAME).is_file()
    tensors = TensorFolder(folder, only=TENSORS_NAME if own else None)
    found = _head_tensors(tensors, _OWN_TENSOR if own else _MERGED_TENSOR)
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
    hidden = target.hidden_size if target else tensors.shape(found[0]["linear.weight"])[0]
    _check_shapes(tensors, found, hidden)
    first = tensors.tensor(found[0]["linear.weight"])
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
        training=config.get("training", {}) if own else {},
    )
    return info, tensors, found


def inspect_heads(path: str | Path) -> HeadsInfo:
    """What the checkpoint at ``path`` is; ValueError where it is no whole checkpoint."""
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

    path: a folder or a file in it, the name of bundled heads, or a hub repository.
    hidden_size: of the target.
    target_config: the target's ``transformers`` configuration (or the dict of its
        ``config.json``); when given, its shape must be the one the heads were trained
        for, and its ``rms_norm_eps`` is used. Names and paths may differ.

    Raises ValueError, in a sentence that names what is wrong, where files, tensor names,
    shapes or counts are, or where the heads are another target's.
    """
    info, tensors, found = _open(path)
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
    heads = DraftHeads(info.form, info.num_heads, info.hidden_size, eps)
    state = {
        f"layers.{head}.{part}": tensors.tensor(name)
        for head, parts in found.items()
        for part, name in parts.items()
    }
    heads.load_state_dict(state)
    return heads.requires_grad_(False).eval().to(device=device, dtype=dtype)


def _named(heads: DraftHeads, prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}{name.removeprefix('layers.')}": tensor.detach().cpu().contiguous()
        for name, tensor in heads.state_dict().items()
    }


def write_own(
    heads: DraftHeads,
    folder: Path,
    *,
    target_name: str,
    target: TargetShape,
    training: dict[str, Any],
) -> None:
    """Write the ``own`` layout into an existing folder (see :func:`files.new_folder`)."""
    record = {
        "format": "tokenswift-heads",
        "form": heads.form.value,
        "num_heads": heads.num_heads,
        "hidden_size": heads.hidden_size,
        "target": {
            "name": target_name,
            "fingerprint": target.fingerprint(),
            "shape": target.to_dict(),
        },
        "training": training,
    }
    save_file(_named(heads, "heads."), folder / TENSORS_NAME, metadata={"format": "pt"})
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_merged(heads: DraftHeads, target_folder: Path, out: Path) -> None:
    """Write the authors' layout: a copy of the target's folder with the heads in it.

    out: a new folder. It loads as ``model`` and as ``heads``. Raises ValueError where the
    target has another hidden size, or has heads already.
    """
    config = read_json(target_folder / "config.json")
    if config.get("hidden_size") != heads.hidden_size:
        raise ValueError(
            f"the target in {target_folder} has hidden size {config.get('hidden_size')}, "
            f"the heads have {heads.hidden_size}"
        )
    tensors = TensorFolder(target_folder)
    if _head_tensors(tensors, _MERGED_TENSOR):
        raise ValueError(f"the target in {target_folder} holds heads already")
    single = len(set(tensors.files.values())) == 1
    with new_folder(out) as draft:
        names = {}  # file -> its name in the copy; an index must not share its file's name
        for file in sorted(set(tensors.files.values())):
            names[file] = "model-00001-of-00001.safetensors" if single else file.name
            shutil.copyfile(file, draft / names[file])
        for file in sorted(target_folder.iterdir()):
            if file.suffix in {".json", ".txt", ".model", ".jinja"} and file.name != INDEX_NAME:
                shutil.copyfile(file, draft / file.name)
        head_tensors = _named(heads, "model.medusa_layers.")
        save_file(head_tensors, draft / MERGED_HEADS_NAME, metadata={"format": "pt"})
        weight_map = {tensor: names[file] for tensor, file in tensors.files.items()}
        weight_map |= dict.fromkeys(head_tensors, MERGED_HEADS_NAME)
        size = sum(file.stat().st_size for file in draft.glob("*.safetensors"))
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (draft / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
        config["medusa_heads"] = heads.num_heads
        (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def convert_heads(path: str | Path, out: Path, target_folder: Path | None) -> None:
    """Write heads of any layout anew: merged with a target, or alone in our own layout.

    out: a new folder. target_folder: of the target to copy beside the heads; None for our
    own layout, which needs heads whose target is recorded. Raises ValueError.
    """
    info = inspect_heads(path)
    config = read_json(target_folder / "config.json") if target_folder else None
    heads = load_heads(
        path,
        hidden_size=info.hidden_size,
        dtype=getattr(torch, info.dtype),
        device="cpu",
        target_config=config,
    )
    if target_folder is not None:
        write_merged(heads, target_folder, out)
        return
    if info.target is None:
        raise ValueError(
            f"{info.path} has no config.json, so the heads' target is not known; put the "
            "target's config.json beside them"
        )
    with new_folder(out) as folder:
        write_own(
            heads,
            folder,
            target_name=info.target_name or info.path.name,
            target=info.target,
            training=info.training,
        )
