"""Shared by the tests of this folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for sampling_reference


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """vLLM compiles the ranks of logprobs; compiling takes longer than all the tests."""
    with torch.compiler.set_stance("force_eager"):
        yield
