"""benchmarks/results/: an index that says of every record what it is, and is true."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import figures, index

INDEX = index.read()
ENTRIES: list[dict[str, Any]] = INDEX["record"]
ARCHIVED: dict[str, str] = INDEX["archive"]

every_record = pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry["file"])


def records_in(folder: Any) -> set[str]:
    """The records of a folder, without what is drawn or written of them."""
    return {name for name in index.kept_files(folder) if name.endswith(".json")}


def test_every_record_is_in_the_index_once() -> None:
    files = [entry["file"] for entry in ENTRIES]
    assert sorted(files) == sorted(records_in(index.RESULTS))
    assert len(files) > 20


def test_every_other_file_belongs_to_a_record() -> None:
    for folder in (index.RESULTS, index.ARCHIVE):
        stems = {name.removesuffix(".json") for name in records_in(folder)}
        others = {name for name in index.kept_files(folder) if not name.endswith(".json")}
        stray = {name for name in others if name.rpartition(".")[0] not in stems}
        assert stray <= {"README.md", "index.toml"}


def test_every_archived_record_is_described_and_replaced_once() -> None:
    assert set(ARCHIVED) == records_in(index.ARCHIVE)
    replaced = [old for entry in ENTRIES for old in entry.get("replaces", [])]
    assert sorted(replaced) == sorted(ARCHIVED)


@every_record
def test_a_record_says_how_it_was_made_or_the_index_does(entry: dict[str, Any]) -> None:
    own = set(index.said(index.load(entry["file"])))
    established = set(entry.get("established", {}))
    assert own | established == set(index.REQUIRED)
    assert not own & established, "the record says so itself"


@every_record
def test_what_the_index_says_of_a_record_has_no_figure_of_its_own(entry: dict[str, Any]) -> None:
    assert figures.untied(index.without_figures(entry["shows"])) == []


@every_record
def test_a_copied_record_is_marked(entry: dict[str, Any]) -> None:
    record = index.load(entry["file"])
    note = record.get("note", "") if isinstance(record, dict) else ""
    assert entry.get("copied", False) == note.startswith("Copied from the table")


def test_the_page_is_the_index() -> None:
    assert index.PAGE.read_text() == index.render(INDEX), "run `python -m benchmarks.index`"


def test_a_copied_record_is_marked_in_the_page() -> None:
    page = index.render(INDEX)
    copied = [entry for entry in ENTRIES if entry.get("copied")]
    assert copied
    for entry in copied:
        [row] = [
            line
            for line in page.splitlines()
            if line.startswith("| ") and entry["file"][:-5] + "]" in line
        ]
        assert index.COPIED in row


def test_what_no_record_says_is_not_taken_from_it() -> None:
    said = index.said(
        {
            "software": "vLLM 0.32.0",
            "commit": "",
            "parts": [
                {"description": {"command": "a command", "commit": "not in a repository"}},
                {"command": "another", "hardware": "a GPU"},
            ],
        }
    )
    assert said == {"versions": "vLLM 0.32.0", "command": "a command", "hardware": "a GPU"}


def test_a_record_of_another_form_says_nothing() -> None:
    assert index.said([{"device": "a GPU"}]) == {}
