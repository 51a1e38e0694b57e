"""Every figure in README.md and docs/ is what its record says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figures

PAGES = figures.pages()
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)

RECORD: dict[str, Any] = {
    "rows": [{"tokens": 20, "speedup": 1.654}, {"tokens": 40, "speedup": 2.4}],
    "results": [
        {"text": "story, long", "batch": 1, "rates": [1.0, 3.0, 2.0]},
        {"text": "story, long", "batch": 4, "rates": [5.0]},
    ],
    "plain_ms": 9.0,
    "ours_ms": 2.0,
    "iterations": 3999,
    "good": True,
}


def page_with(folder: Path, text: str, record: Any = RECORD) -> Path:
    results = folder / "results"
    results.mkdir(exist_ok=True)
    (results / "r.json").write_text(json.dumps(record))
    page = folder / "page.md"
    page.write_text(text)
    return page


# -- the pages ------------------------------------------------------------------------


@every_page
def test_every_figure_is_its_records(page: Path) -> None:
    assert figures.disagreements(page) == []


@every_page
def test_every_number_that_reads_like_a_measurement_is_tied_to_a_record(page: Path) -> None:
    assert figures.untied(page.read_text()) == []


def test_readme_and_the_page_of_results_have_figures() -> None:
    counts = {page.name: len(figures.figures(page)) for page in PAGES}
    assert counts["README.md"] >= 20
    assert counts["results.md"] >= 100


# -- what holds them --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("plain_ms", 9.0),
        ("rows/1/speedup", 2.4),
        ("rows/tokens=20/speedup", 1.654),
        ("results/text=story, long&batch=4/rates/0", 5.0),
        ("results/text=story, long&batch=1/rates/median", 2.0),
        ("results/0/rates/min", 1.0),
        ("results/0/rates/max", 3.0),
        ("results/0/rates/count", 3),
        ("rows/*/speedup/max", 2.4),
        ("rows/*/tokens/sum", 60),
        ("results/*/rates/median/min", 2.0),
        ("results/*batch=4/rates/max/min", 5.0),
        ("results/*text=story, long/rates/max/sum", 8.0),
        ("plain_ms over ours_ms", 4.5),
    ],
)
def test_a_place_is_found(place: str, value: float) -> None:
    assert figures.look_up(RECORD, place) == value


@pytest.mark.parametrize(
    "place",
    [
        "none",
        "rows/9/speedup",
        "rows/tokens=7/speedup",
        "results/text=story, long/rates/0",
        "rows",
        "good",
        "rows/0",
        "plain_ms over none",
    ],
)
def test_a_place_that_is_not_there_or_no_number_is_refused(place: str) -> None:
    with pytest.raises(LookupError):
        figures.look_up(RECORD, place)


@pytest.mark.parametrize(
    ("shown", "place"),
    [("1.65", "rows/0/speedup"), ("2", "rows/0/speedup"), ("3,999", "iterations")],
)
def test_a_figure_agrees_when_it_is_the_value_rounded_as_shown(
    shown: str, place: str, tmp_path: Path
) -> None:
    page = page_with(tmp_path, f'It is [{shown}](results/r.json "{place}") times.')
    assert figures.disagreements(page) == []


@pytest.mark.parametrize(
    ("shown", "place", "said"),
    [("1.66", "rows/0/speedup", "1.65"), ("1.65", "rows/1/speedup", "2.40")],
)
def test_a_changed_number_is_found(shown: str, place: str, said: str, tmp_path: Path) -> None:
    page = page_with(tmp_path, f'It is [{shown}](results/r.json "{place}") times.')
    [sentence] = figures.disagreements(page)
    assert shown in sentence
    assert said in sentence


def test_a_changed_record_is_found_and_written(tmp_path: Path) -> None:
    text = (
        'At [1.65](results/r.json "rows/0/speedup"), then [2.4](results/r.json "rows/1/speedup").'
    )
    record = {"rows": [{"speedup": 1.7}, {"speedup": 2.4}]}
    page = page_with(tmp_path, text, record)
    assert len(figures.disagreements(page)) == 1
    page.write_text(figures.updated(page))
    assert figures.disagreements(page) == []
    assert page.read_text() == text.replace("1.65", "1.70")


def test_a_deleted_record_is_found(tmp_path: Path) -> None:
    page = page_with(tmp_path, 'It is [1.65](results/r.json "rows/0/speedup") times.')
    (tmp_path / "results" / "r.json").unlink()
    assert len(figures.disagreements(page)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "It is 1.65 times as fast.",
        "It is 3x as fast.",
        "A step takes 5 ms.",
        "14 of 20 texts differ.",
        "About 96 % agree.",
        "From 0.94 on.",
        "Some 2,000 tokens a second.",
        "(1.65)",
        "[1.65](results/r.json) without its place",
    ],
)
def test_a_number_without_a_record_is_found(text: str) -> None:
    assert len(figures.untied(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        'It is [1.65](results/r.json "rows/0/speedup") times as fast.',
        "vLLM 0.32 and 0.33, Python 3.11 to 3.13.",
        "At temperature 0.7 with a penalty of 1.1, min-p 0.1 and top-p 0.9; the goal of 0.97.",
        "Llama-3.1-8B writes 100,000 tokens after 4,096 on an H200 with `--x 1.5`.",
        "<!-- 1.5 times --> [a page](page-1.5.md)",
    ],
)
def test_settings_versions_and_code_are_no_figures(text: str) -> None:
    assert figures.untied(text) == []
