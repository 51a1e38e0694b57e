"""Long generations: commands that share an engine, and what is counted of each."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.engine
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


def point(tokens: int, seconds: float, iterations: int, emitted: int) -> dict[str, Any]:
    stats = {
        "num_iterations": iterations,
        "num_emitted_tokens": emitted,
        "num_accepted_tokens": emitted - iterations,
        "num_ngram_tokens": 0,
    }
    return {"tokens": tokens, "seconds": seconds, "stats": stats}


@pytest.mark.parametrize("before_second_part", [0, 70, 1000])
def test_what_an_engine_counted_between_two_parts_of_a_text_is_not_the_texts(
    before_second_part: int,
) -> None:
    begin = before_second_part
    points = [
        point(0, 0.0, iterations=500, emitted=900),
        point(99, 1.5, iterations=550, emitted=1000),
        point(100, 1.5, iterations=begin, emitted=begin),
        point(150, 2.0, iterations=begin + 10, emitted=begin + 50),
    ]
    rates = long_generation.acceptance({"points": points}, tokens=150)
    assert rates["tokens_per_iteration"] == (100 + 50) / (50 + 10)


GENERATE = "generate model --prompt-file story.txt --out a.json --prefix 100"
PLAIN = f"{GENERATE} --method plain --tokens 700"


@pytest.mark.parametrize(
    ("lines", "because"),
    [
        (
            [PLAIN, f"{GENERATE} --method ngram"],
            "one engine has one --method: it is 'plain' in the first command, and 'ngram' in: "
            "generate model",
        ),
        (
            [PLAIN, "cost other-model --text a.json --out b.json"],
            "one engine has one model: it is 'model' in the first command, and 'other-model' in: "
            "cost",
        ),
        (
            [PLAIN, "cost model --text a.json --out b.json --penalise-plain"],
            "one engine has one --penalise-plain: it is False in the first command, and True in",
        ),
        (
            [PLAIN, """cost model --text a.json --out b.json --engine '{"block_size": 32}'"""],
            "one engine has one --engine: it is {} in the first command, and {'block_size': 32} in",
        ),
        (
            [PLAIN, "report --tokenswift a.json --plain b.json --out c"],
            "several runs generate and cost, not report",
        ),
        (
            [PLAIN, "cost model --text a.json --out b.json"],
            "--max-model-len 900 is too short, 912 are needed for: cost model --text a.json",
        ),
    ],
)
def test_commands_that_one_engine_cannot_run_are_refused_before_it_starts(
    lines: list[str], because: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["several", "--max-model-len", "900", *lines]
    arguments = long_generation.make_parser().parse_args(words)
    with pytest.raises(SystemExit) as refused:
        arguments.run(arguments)
    assert refused.value.code == 2
    assert because in capsys.readouterr().err
