"""Folders of safetensors files: reading by name, and writing nothing half-way."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"


def read_json(path: Path) -> Any:
    """The contents of a JSON file; ValueError names the file where it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


class TensorFolder:
    """The tensors of all safetensors files of a folder, by name, read when asked for.

    With an index file the index decides which files count, as in ``transformers``;
    without one, every ``*.safetensors`` file of the folder does. Raises ValueError where
    there is no such file, one is missing, is cut short, or lacks a tensor of the index.

    only: the one file to read, where the folder may hold others.
    """

    def __init__(self, folder: Path, only: str | None = None) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}  # tensor name -> file
        if only is not None:
            self.files.update((tensor, folder / only) for tensor in self._names(folder / only))
            return
        index_path = folder / INDEX_NAME
        if index_path.is_file():
            weight_map: dict[str, str] = read_json(index_path).get("weight_map", {})
            held = {name: set(self._names(folder / name)) for name in set(weight_map.values())}
            for tensor, file in weight_map.items():
                if tensor not in held[file]:
                    raise ValueError(f"{index_path} places {tensor} in {file}, which lacks it")
                self.files[tensor] = folder / file
            return
        paths = sorted(folder.glob("*.safetensors"))
        if not paths:
            other = sorted(p.name for p in folder.glob("*.bin"))
            hint = f" ({', '.join(other)} must be converted to safetensors first)" if other else ""
            raise ValueError(f"{folder} holds no safetensors file{hint}")
        for path in paths:
            self.files.update((tensor, path) for tensor in self._names(path))

    @staticmethod
    def _names(path: Path) -> list[str]:
        if not path.is_file():
            raise ValueError(f"{path.parent} lacks {path.name}")
        try:
            with safe_open(path, framework="pt") as file:
                return list(file.keys())
        except SafetensorError as error:
            raise ValueError(
                f"{path} is truncated or not a safetensors file ({error}); "
                "copy or download it again"
            ) from error

    def shape(self, name: str) -> tuple[int, ...]:
        with safe_open(self.files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def raw(self, name: str) -> Tensor:
        """A tensor of any dtype."""
        with safe_open(self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def tensor(self, name: str) -> Tensor:
        tensor = self.raw(name)
        if not tensor.dtype.is_floating_point:
            raise ValueError(f"{name} in {self.files[name]} holds {tensor.dtype}, not floats")
        return tensor


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder that appears at ``path`` whole, when the block ends, or not at all.

    Raises ValueError where something other than an empty folder stands there already.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists already; name a new folder or remove it first")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield draft
        draft.chmod(0o755)
        if path.exists():
            path.rmdir()
        draft.rename(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A draft that stands at ``path`` once the block has ended, whoever else is writing there."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as scratch:
        draft = Path(scratch) / path.name
        yield draft
        os.replace(draft, path)


def write_text_whole(path: Path, text: str) -> None:
    """Write a text file so that a reader finds the old contents or the new."""
    with _whole(path) as draft:
        draft.write_text(text, encoding="utf-8")


def save_state_whole(path: Path, state: dict[str, Any]) -> None:
    """``torch.save`` with the same promise."""
    with _whole(path) as draft:
        torch.save(state, draft)
