"""Writing heads to disk, in the layouts that ``checkpoint.py`` describes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_tokenswift.heads.checkpoint import (
    MERGED_TENSOR,
    RECORD_NAME,
    TENSORS_NAME,
    VOCABULARY_TENSOR,
    head_tensors,
    inspect_heads,
    load_heads,
)
from vllm_tokenswift.heads.files import INDEX_NAME, TensorFolder, new_folder, read_json
from vllm_tokenswift.heads.model import DraftHeads
from vllm_tokenswift.heads.target import TargetShape

MERGED_HEADS_NAME = "model-medusa-layers.safetensors"


def _named(heads: DraftHeads, prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}{name}": tensor.detach().cpu().contiguous()
        for name, tensor in heads.layers.state_dict().items()
    }


def write_own(
    heads: DraftHeads,
    folder: Path,
    *,
    target_name: str,
    target: TargetShape,
    training: dict[str, Any],
) -> None:
    """Write the ``own`` layout.

    Args:
        heads: of any form.
        folder: an existing one (see :func:`files.new_folder`).
        target_name: for the record; of a local path its last part.
        target: the shape of the target.
        training: the record of the training run.
    """
    record = {
        "format": "tokenswift-heads",
        "form": heads.form.name_in_files,
        "num_heads": heads.num_heads,
        "hidden_size": heads.hidden_size,
        "target": {
            "name": target_name,
            "fingerprint": target.fingerprint(),
            "shape": target.to_dict(),
        },
        "training": training,
    }
    tensors = _named(heads, "heads.")
    if heads.vocabulary is not None:
        tensors[VOCABULARY_TENSOR] = heads.vocabulary.cpu().int()
    save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})
    (folder / TENSORS_NAME).chmod(0o644)  # the library writes for the owner alone
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_merged(heads: DraftHeads, target_folder: Path, out: Path) -> None:
    """Write the authors' layout: a copy of the target's folder with the heads in it.

    Args:
        heads: of the linear or the released form.
        target_folder: of the target.
        out: a new folder. It loads as ``model`` and as ``heads``.

    Raises:
        ValueError: the target has another hidden size, or has heads already, or the heads are
            of the sequential form, which that layout has no place for.
    """
    if heads.is_sequential:
        raise ValueError(
            "heads of the sequential form are not written into the authors' layout, which "
            "nobody else could read; keep them in a folder of their own"
        )
    config = read_json(target_folder / "config.json")
    if config.get("hidden_size") != heads.hidden_size:
        raise ValueError(
            f"the target in {target_folder} has hidden size {config.get('hidden_size')}, "
            f"the heads have {heads.hidden_size}"
        )
    tensors = TensorFolder(target_folder)
    if head_tensors(tensors, MERGED_TENSOR):
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
        named = _named(heads, "model.medusa_layers.")
        save_file(named, draft / MERGED_HEADS_NAME, metadata={"format": "pt"})
        (draft / MERGED_HEADS_NAME).chmod(0o644)
        weight_map = {tensor: names[file] for tensor, file in tensors.files.items()}
        weight_map |= dict.fromkeys(named, MERGED_HEADS_NAME)
        size = sum(file.stat().st_size for file in draft.glob("*.safetensors"))
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (draft / INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
        config["medusa_heads"] = heads.num_heads
        (draft / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def convert_heads(
    path: str | Path, out: Path, target_folder: Path | None, vocabulary: int | None = None
) -> None:
    """Write heads of any layout anew: merged with a target, or alone in our own layout.

    Args:
        path: the heads to read; see :func:`load_heads`.
        out: a new folder.
        target_folder: of the target to copy beside the heads; None for our own layout, which
            needs heads whose target is recorded.
        vocabulary: cut what the heads can propose to so many of the most frequent tokens;
            None leaves it as it is.

    Raises:
        ValueError: the heads cannot be read, cut, or written so; the sentence says why.
    """
    info = inspect_heads(path)
    if vocabulary is not None and not 0 < vocabulary <= (info.vocabulary_size or 0):
        raise ValueError(
            f"vocabulary is {vocabulary}, and the heads in {info.path} "
            + (
                f"propose {info.vocabulary_size} tokens: it must be from 1 to that"
                if info.vocabulary_size
                else "do not list the tokens they propose: they cannot be cut"
            )
        )
    config = read_json(target_folder / "config.json") if target_folder else None
    heads = load_heads(
        path,
        hidden_size=info.hidden_size,
        dtype=getattr(torch, info.dtype),
        device="cpu",
        target_config=config,
    )
    training = info.training
    if vocabulary is not None:
        assert heads.vocabulary is not None
        heads.vocabulary = heads.vocabulary[:vocabulary]
        training = {**training, "vocabulary_cut_to": vocabulary}
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
            training=training,
        )
