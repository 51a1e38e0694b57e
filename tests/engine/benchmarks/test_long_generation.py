"""Long generations: commands that share an engine write a record each."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import long_generation
from benchmarks.prompts import STORY

ROOT = Path(long_generation.__file__).parents[1]
ENGINE = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26}


def several(max_model_len: int, lines: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.long_generation", "several"]
    return subprocess.run(
        [*command, "--max-model-len", str(max_model_len), *lines],
        cwd=ROOT,
        env=os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
    )


def test_commands_in_one_engine_write_a_record_each_and_go_on_from_each_others(
    demo_model: Path, tmp_path: Path
) -> None:
    story, engine = tmp_path / "story.txt", shlex.quote(json.dumps(ENGINE))
    story.write_text(STORY)
    same = f"generate {demo_model} --method tokenswift --dtype float32 --engine {engine}"
    greedy = f"{same} --temperature 0 --theta 1 --prefix 10 --prompt-file {story}"
    lines = [
        f"{same} --prefix 10 --prompt-file {story} --tokens 40 --out {tmp_path}/a.json",
        f"{greedy} --tokens 90 --out {tmp_path}/b.json",
        f"{same} --continue {tmp_path}/a.json --tokens 30 --out {tmp_path}/a.json",
        f"{greedy} --tokens 90 --out {tmp_path}/again.json",
    ]
    run = several(256, lines)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]

    sampled, first, again = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("a", "b", "again")
    )
    assert [len(text) for text in sampled["texts"]] == [10 + 40 + 30]
    assert again["texts"] == first["texts"]
    assert len(first["texts"][0]) == 10 + 90
    for record, of_command in ((sampled, lines[0]), (first, lines[1])):
        description = record["description"]
        assert description["command"].split()[1:3] == ["generate", demo_model.name]
        assert ("--temperature 0" in description["command"]) == ("--temperature 0" in of_command)
        assert description["engine_shared_with"] == 3
        assert description["max_model_len"] == 256
    assert [part["arguments"]["tokens"] for part in sampled["parts"]] == [40, 30]
    assert counted_tokens(sampled) == 40 + 30
    assert counted_tokens(first) == 90


def counted_tokens(record: dict[str, Any]) -> int:
    """Tokens that the iterations of a record's parts emitted, by its rate for each."""
    points = record["points"]
    iterations = sum(
        later["stats"]["num_iterations"] - earlier["stats"]["num_iterations"]
        for earlier, later in zip(points[::2], points[1::2], strict=True)
    )
    rate = long_generation.acceptance(record, tokens=1000)["tokens_per_iteration"]
    return round(rate * iterations)
