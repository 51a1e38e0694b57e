"""Long generations: what is counted of each, and commands that cannot share an engine."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import long_generation


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
