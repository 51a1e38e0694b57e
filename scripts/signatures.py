"""Signatures of everything TokenSwift relies on in vLLM, read from a release's source.

    python scripts/signatures.py --version 0.33.0 --check      # compare with the snapshot
    python scripts/signatures.py --version 0.33.0 --write      # renew the snapshot

The source is the installed vLLM where it is that release, else the release's wheel,
downloaded without its dependencies; only its Python files are unpacked. ``--source``
names a directory that holds the package ``vllm`` instead.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

from vllm_tokenswift import versions
from vllm_tokenswift.patches.source_tree import SourceTree, names_imported_from_vllm

ROOT = Path(__file__).resolve().parent.parent


def seams() -> list[str]:
    """Targets of the seam table and of every import from vLLM in our source, sorted."""
    table = tomllib.loads((ROOT / "patches" / "seams.toml").read_text())
    targets = {
        f"{owner}{'.' if ':' in owner else ':'}{member}"
        for owner, entry in table.items()
        for member in entry["members"]
    }
    for package in ("vllm_tokenswift", "patches"):
        targets |= names_imported_from_vllm(ROOT / package).keys()
    return sorted(targets)


def snapshot_path(version: str) -> Path:
    return (
        ROOT / "tests" / "unit" / "patches" / "data" / f"signatures-{versions.minor(version)}.json"
    )


def installed_source() -> Path | None:
    """The directory that holds the installed package ``vllm``, found without importing it."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]).parent


def installed_version() -> str | None:
    """The installed vLLM's version, read from its source."""
    source = installed_source()
    if source is None:
        return None
    for line in (source / "vllm" / "_version.py").read_text().splitlines():
        if line.startswith("__version__ = "):
            return line.split("'")[1]
    return None


def unpack_release(version: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*command, "--dest", str(folder), f"vllm=={version}"], check=True)
    [wheel] = folder.glob("vllm-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".py")]
        archive.extractall(folder / "source", names)
    return folder / "source"


def describe_all(source: Path) -> dict[str, str | None]:
    tree = SourceTree(source)
    return {target: tree.describe(target) for target in seams()}


def differences(found: dict[str, str | None], expected: dict[str, str | None]) -> list[str]:
    """One line for each seam that is not as expected, by name."""
    return [
        f"{target}: {found.get(target) or 'missing'}, expected {expected.get(target) or 'missing'}"
        for target in sorted(found.keys() | expected.keys())
        if found.get(target) != expected.get(target)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", required=True, help="a release of vLLM, such as 0.33.0")
    parser.add_argument("--source", type=Path, help="a directory that holds the package vllm")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true")
    action.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source: Path | None = arguments.source
        if source is None and installed_version() == arguments.version:
            source = installed_source()
        found = describe_all(source or unpack_release(arguments.version, Path(folder)))
    path = snapshot_path(arguments.version)
    if arguments.write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        missing = [target for target, signature in found.items() if signature is None]
        print(f"{path.relative_to(ROOT)}: {len(found)} seams, missing: {missing or 'none'}")
        return 0
    problems = differences(found, json.loads(path.read_text()))
    print("\n".join(problems) or f"vLLM {arguments.version}: all {len(found)} seams as expected")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
