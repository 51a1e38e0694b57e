"""Runs the kernels' tests where there is no GPU, in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/unit/cuda runs on the GPU itself")
def test_kernels_equal_their_eager_twins_in_tritons_interpreter() -> None:
    """In a process of their own: Triton decides at its import whether it interprets."""
    folder = Path(__file__).parent / "cuda"
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    # The run below is no worker of pytest-xdist, even where this one is.
    environment.pop("PYTEST_XDIST_WORKER", None)
    result = subprocess.run(
        [*command, str(folder)], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
