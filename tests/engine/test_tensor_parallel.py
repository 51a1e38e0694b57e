"""Two ranks plan, draft and accept alike, heads included: real workers of vLLM's, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def written_by(model: Path, heads: Path, size: int, out: Path) -> dict[str, Any]:
    program = Path(__file__).parent / "tensor_parallel_engine.py"
    command = [sys.executable, program, model, heads, str(size), out]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, timeout=300, env=environment)
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def test_two_ranks_write_what_one_writes_and_count_alike(tiny_model, conditioned_heads, tmp_path):
    one = written_by(tiny_model, conditioned_heads, 1, tmp_path / "one.json")
    two = written_by(tiny_model, conditioned_heads, 2, tmp_path / "two.json")
    assert two["texts"] == one["texts"]
    first, second = two["stats"]
    assert first == second
    assert first["drafted_by_source"]["free_heads"] > 50
